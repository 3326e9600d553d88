"""A graph's program holds every operand once, with the role, place and order that the runtime needs."""

from dataclasses import replace

import pytest
from support.small_engine import LIMITS, SPEC, planned_graphs

from dsc.compiler.ir.graph import Graph, GraphInfo, constant, weight
from dsc.compiler.ir.weight import Source
from dsc.compiler.lower import lower
from dsc.compiler.memory import memory_report
from dsc.passes.plan_memory import PlanMemory, liveness, max_live_bytes
from dsc.runtime.errors import DscError
from dsc.runtime.program import Operand

SHA = "a" * 64


def test_roles_and_order():
    graph, sample = planned_graphs()
    program = lower(graph, SHA)
    assert program.onnx_sha256 == SHA
    assert program.letters == LIMITS.bounds("decode")
    assert (program.inputs, program.outputs) == (("tokens", "logit_rows"), ("logits", "hidden"))
    assert [node.name for node in program.nodes] == [node.name for node in graph.nodes]
    roles = {name: operand.role for name, operand in program.operands.items()}
    assert roles == {
        "tokens": "input", "logit_rows": "input", "embed.weight": "weight", "embed_tokens.y": "activation",
        "norm.weight": "weight", "layers.0.norm.y": "activation", "linear.packed": "weight",
        "linear.scales": "weight", "layers.0.linear.y": "activation", "hidden": "output", "logits": "output",
    }  # fmt: skip
    assert program.operands["linear.packed"] == Operand("int8", (64, 64), "weight", 4096, tensor="linear.packed")
    assert program.operands["embed_tokens.y"] == Operand("float32", ("T", 64), "activation", 4 * 64 * 4, offset=0)
    assert program.nodes[0].inputs == ("tokens", "embed.weight", "")  # absent slots are there, to the last
    assert program.nodes[0].attributes == {"dtype": "float32", "table_format": "bf16"}
    assert program.nodes[0].variants == ()
    assert {o.role for o in lower(sample, SHA).operands.values()} == {"input", "output"}


def with_cache():
    """A Qkv node that appends to a cache, as fuse_qkv leaves it."""
    info = GraphInfo(SPEC, "main", "decode", (0,), LIMITS.bounds("decode"))
    graph = Graph("main.decode", info)
    nope, latent, rope, block_bytes = 16, 32, 8, 16 * 40 * 2
    widths = {"q_width": nope + rope, "q_lora": 0, "heads": 1, "nope": nope, "latent": latent, "rope": rope}
    attributes = {**widths, "epsilon": 1e-6, "cache_dtype": "bfloat16", "block_tokens": 16, "block_bytes": block_bytes, "joint": 1, "w_format": "fp32", "w_kv_format": "fp32"}  # fmt: skip
    inputs = {
        "x": graph.add_input("x", "float32", ("T", 64)),
        "w": weight("qkv.weight", Source("qkv", "float32", (nope + 2 * rope + latent, 64)), "attention"),
        "kv_norm": weight("kv_norm.weight", Source("kv_norm", "float32", (latent,))),
        "cos": weight("rope.cos", Source("cos", "float32", (64, rope // 2))),
        "sin": weight("rope.sin", Source("sin", "float32", (64, rope // 2))),
        "positions": graph.add_input("positions", "int32", ("T",)),
        "slots": graph.add_input("slots", "int32", ("T",)),
        "cache": graph.add_input("cache.0", "uint8", ("N", block_bytes)),
    }
    node = graph.plugin("Qkv", inputs, attributes, "layers.0.self_attn.qkv", {"cache_out": "cache.0.out"})
    graph.add_output(node.outputs[0], "q")
    graph.add_output(node.outputs[3])
    PlanMemory().run(graph)
    return graph


def test_a_cache_is_state_and_its_output_an_alias():
    program = lower(with_cache(), SHA)
    blocks = LIMITS.bounds("decode")["N"]
    assert program.operands["cache.0"] == Operand("uint8", ("N", 1280), "state", blocks * 1280)
    assert program.operands["cache.0.out"] == Operand("uint8", ("N", 1280), "state", blocks * 1280, alias="cache.0")
    assert program.root("cache.0.out") == "cache.0"
    assert program.outputs == ("q", "cache.0.out")
    assert program.operands["layers.0.self_attn.qkv.latent"].role == "activation"
    assert memory_report(program)["state_bytes"] == blocks * 1280


def test_the_report_counts_what_lives_as_the_planner_does():
    graphs = [*planned_graphs(), with_cache()]
    for graph in graphs:
        memory = memory_report(lower(graph, SHA))
        assert memory["live_bytes"] == max_live_bytes(liveness(graph))
        assert memory["arena_bytes"] >= memory["live_bytes"]
        assert memory["tensors"] == len(graph.memory_plan)


def test_what_is_no_plugin_op_is_named_all_at_once():
    graph = planned_graphs()[0]
    x = graph.find("dsc.RmsNorm")[0].outputs[0]
    for name in ("one", "two"):
        graph.add("Sigmoid", [x], [replace_output(graph, x, name)], name)
    with pytest.raises(DscError) as caught:
        lower(graph, SHA)
    assert "main.decode cannot be lowered: 2 faults" in str(caught.value)
    assert "main.decode: two: is left in the graph\n  wanted  plugin ops only\n  got     Sigmoid" in str(caught.value)


def replace_output(graph, like, name):
    from dsc.compiler.ir.graph import type_of, variable

    return variable(name, type_of(like))


def test_a_constant_by_value_is_named():
    graph = planned_graphs()[0]
    graph.find("dsc.LmHead")[0].inputs[1] = constant("rows", [0], "int32")
    with pytest.raises(DscError, match="lm_head reads rows: a constant that is no weight cannot be stored"):
        lower(graph, SHA)


def test_a_graph_without_a_plan_is_told_to_plan():
    graph = planned_graphs()[0]
    graph.memory_plan = {}
    with pytest.raises(
        DscError, match=r"main\.decode: embed_tokens\.y has no place\n  try  plan_memory as the last pass"
    ):
        lower(graph, SHA)


def test_a_smaller_step_fits_the_offsets_of_the_largest():
    graph = planned_graphs()[0]
    program = lower(graph, SHA)
    from dsc.runtime.program import nbytes

    for tokens in range(program.letters["T"] + 1):
        letters = {**program.letters, "T": tokens}
        sizes = {n: nbytes(o.dtype, o.shape, letters) for n, o in program.operands.items() if o.offset is not None}
        assert all(size <= program.operands[name].bytes for name, size in sizes.items())


def test_a_plan_that_leaves_the_arena_is_refused():
    program = lower(planned_graphs()[0], SHA)
    with pytest.raises(DscError, match="leaves the arena"):
        replace(program, arena_bytes=program.arena_bytes - 1).check("main.decode")


def test_a_plan_made_before_the_graph_changed_is_refused():
    graph = planned_graphs()[0]
    first, last = graph.find("dsc.Embedding")[0].outputs[0], graph.find("dsc.Linear")[0]
    assert graph.memory_plan[first.name] == graph.memory_plan[last.outputs[0].name]
    last.inputs[0] = first  # the embedding is needed longer than the planner knew
    with pytest.raises(DscError) as caught:
        lower(graph, SHA)
    assert str(caught.value) == (
        "main.decode: layers.0.linear: layers.0.linear.y lies in the memory of embed_tokens.y, which is still needed\n"
        "  got  bytes 0 to 1024, and 0 to 1024\n"
        "  try  plan_memory as the last pass"
    )
