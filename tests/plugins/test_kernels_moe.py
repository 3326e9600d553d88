"""Kernels of Moe and Router compiled without a GPU: nothing spills, tensor cores are used, sm_80 has no FP8 in it."""

from typing import Any

import pytest
import torch
from support.gpu import node_program
from support.interpreted_ops import Sources

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.cubin import instructions
from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.formats import parse_format
from dsc.plugins.gpu_node import Arch, CudaSource, TritonSource
from dsc.runtime.program import ProgramNode
from dsc.runtime.steps import Kernel, Variant

TENSOR_CORES = {"sm_80": {"HMMA"}, "sm_90a": {"HGMMA", "QGMMA"}, "sm_100a": {"UTCHMMA", "UTCQMMA"}}
ONE_TOKEN = {"moe_one_gate_up", "moe_one_down"}
SMALL, R1 = (16, 4, 256, 384, 256), (256, 8, 7168, 2048, 2048)  # experts, of a token, D, F, of the shared expert


def lowered(op: str, inputs: dict[str, torch.Tensor], attributes: dict[str, object], arch: str):
    """The node with its variants, and what was compiled for it."""
    compiler = CubinCompiler(Arch(arch))
    (program,) = lower_gpu([node_program(op, inputs, attributes, {"T": 1024})], compiler)
    return program.nodes[0], compiler


def moe(format_: str, shared: str, arch: str, sizes: tuple[int, ...] = SMALL) -> tuple[ProgramNode, CubinCompiler]:
    """A node of experts and what was compiled for it."""
    return lowered("Moe", *moe_inputs(format_, shared, sizes), arch)


def moe_inputs(format_: str, shared: str, sizes: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Inputs, without memory, and attributes of a node of experts."""
    experts, top_k, d, f, shared_f = sizes
    inputs = {
        "x": torch.empty(3, d, dtype=torch.bfloat16, device="meta"),
        "ids": torch.empty(3, top_k, dtype=torch.int32, device="meta"),
        "weights": torch.empty(3, top_k, device="meta"),
    }
    attributes = {}
    for prefix, kind, width, lead in (("", format_, f, (experts,)), ("shared_", shared, shared_f, ())):
        for name, shape in (("gate", (width, d)), ("up", (width, d)), ("down", (d, width))):
            attributes[f"{prefix}{name}_format"] = kind
            for part, (dtype, size) in parse_format(kind).parts((*lead, *shape)).items():
                slot = f"{prefix}{name}" if part == "data" else f"{prefix}{name}.{part}"
                inputs[slot] = torch.empty(size, dtype=getattr(torch, dtype), device="meta")
    return inputs, attributes


@pytest.mark.parametrize(
    ("arch", "format_", "shared", "borders"),
    [
        ("sm_90a", "wint4:128", "fp8", ["T <= 1", "T <= 6", "T <= 64", "T <= 256", "T <= 575", ""]),
        ("sm_80", "wint4:128", "wint8", ["T <= 1", "T <= 6", "T <= 64", "T <= 256", "T <= 575", ""]),
        ("sm_100a", "fp8", "bf16", ["T <= 1", "T <= 32", "T <= 128", ""]),
    ],
)
def test_moe_compiles(arch: str, format_: str, shared: str, borders: list[str]) -> None:
    node, compiler = moe(format_, shared, arch)
    for source, built in compiler.built.items():
        assert built.resources.stack_bytes == 0, (source, built.resources)
        used = instructions(built.cubin)
        if built.compiled.entry in ("moe_gate_up", "moe_down"):
            assert used & TENSOR_CORES[arch], (source, used)
        if built.compiled.entry.startswith(("moe_few", "moe_one")):
            assert "HMMA" in used, (source, used)
        assert arch != "sm_80" or not used & {"QMMA", "QGMMA"}, (source, used)
    assert [variant.guard for variant in node.variants] == borders
    entries = [entries_of(variant) for variant in node.variants if "dequantize_rows" not in entries_of(variant)]
    assert entries[0] == ["moe_one_gate_up", "moe_one_down", "moe_sum"]
    for steps in entries[1:]:
        before, products = steps[: steps.index("moe_plan")], steps[steps.index("moe_plan") + 1 : -1]
        assert ("quantize_rows" in before) == ("fp8" in (format_, shared))
        # A shared expert that is not in the same launches has each of its products ahead of the others'.
        assert [step.endswith("gate_up") for step in products] in ([True, False], [True, True, False, False])
        assert steps[-1] == "moe_sum"


@pytest.mark.parametrize(("arch", "shared"), [("sm_80", "wint8"), ("sm_90a", "fp8"), ("sm_100a", "wint4:128")])
def test_many_tokens_have_integer_codes_dequantized_once(arch: str, shared: str) -> None:
    node, compiler = moe("wint4:128", shared, arch)
    assert all(built.resources.stack_bytes == 0 for built in compiler.built.values())
    products = ["dequantize_rows", "dequantize_rows", "moe_gate_up", "dequantize_rows", "moe_down"]
    beside = ["quantize_rows", "moe_gate_up", "moe_down"] if shared == "fp8" else products
    assert entries_of(node.variants[-1]) == ["moe_plan", *beside, *products, "moe_sum"]
    # A launch that waits for all before it: what it writes, an earlier one may have read.
    assert not any(step.pdl for step in node.variants[-1].steps if step.entry == "dequantize_rows")
    assert not any("dequantize_rows" in entries_of(variant) for variant in node.variants[:-1])


def test_codes_of_large_experts_stay_codes() -> None:
    """In bfloat16 two stacks of R1's would take 15 GB."""
    node, _ = moe("wint4:128", "wint4:128", "sm_90a", R1)
    assert [variant.guard for variant in node.variants][-1] == ""
    assert "dequantize_rows" not in entries_of(node.variants[-1])


def entries_of(variant: Variant) -> list[str]:
    return [step.entry for step in variant.steps if isinstance(step, Kernel)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("format_", "shared"), [("fp8", "fp8"), ("fp8", "wint8"), ("wint4:128", "fp8"), ("wint8", "fp8:ue8m0")]
)
def test_codes_of_the_norm_save_a_launch(format_: str, shared: str, arch: str) -> None:
    """All else stays in its order; the work list waits for the router by itself where nothing comes before it."""
    inputs, attributes = moe_inputs(format_, shared, SMALL)
    codes = {
        "x_codes": torch.empty(3, 256, dtype=torch.float8_e4m3fn, device="meta"),
        "x_scales": torch.empty(2, 3, device="meta"),
    }
    found = []
    for given in (inputs, inputs | codes):
        sources: Any = Sources(Arch(arch))
        (program,) = lower_gpu([node_program("Moe", given, attributes, {"T": 1024})], sources)
        found.append([(v.guard, [sources.by_name[step.cubin] for step in v.steps]) for v in program.nodes[0].variants])
    saved = 0
    for (guard, before), (same, after) in zip(*found, strict=True):
        assert guard == same
        kept = [_name(source) for source in before if _name(source) != "quantize_rows"]
        assert [_name(source) for source in after] == kept, guard
        saved += len(before) - len(after)
        for steps in (before, after):
            first = [_name(source) for source in steps].index("moe_plan") if "moe_plan" in map(_name, steps) else -1
            assert first < 0 or dict(steps[first].defines)["LATE"] == str(int(first > 0)), guard
    alone = found[0][0][0] == "T <= 1"  # one_token.cu quantizes x itself
    assert saved == len(found[0]) - alone


def _name(source: TritonSource | CudaSource) -> str:
    return source.function if isinstance(source, TritonSource) else source.entry


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("format_", ["wint4:128", "fp8"])
def test_nothing_of_r1_spills(arch: str, format_: str) -> None:
    _, compiler = moe(format_, format_, arch, R1)
    assert all(built.resources.stack_bytes == 0 for built in compiler.built.values())


def test_a_rank_takes_the_kernels_of_as_many_pairs() -> None:
    """An expert of R1 has as many pairs on one rank as on the eighth of eight, where most pairs of a step are of others."""
    guards = {}
    for experts, groups in ((256, 1), (32, 8), (32, 1)):
        node, sources = lowered_sources("wint4:128", "fp8", (experts, 8, 7168, 2048, 2048 // groups), groups)
        guards[experts, groups] = [variant.guard for variant in node.variants]
        spread = [dict(source.defines)["SPREAD"] for source in sources if _name(source).startswith("moe_one")]
        assert spread == [str(int(groups > 1))] * 2
    borders = ["T <= 1", "T <= 48", "T <= 512", "T <= 2048", ""]
    assert guards[256, 1] == borders
    # What fits in bfloat16 is dequantized, at as many pairs an expert.
    assert guards[32, 8] == [*borders[:-1], "T <= 4607", ""]
    assert guards[32, 1] != guards[32, 8]


def lowered_sources(
    format_: str, shared: str, sizes: tuple[int, ...], groups: int
) -> tuple[ProgramNode, list[TritonSource | CudaSource]]:
    """A node on one of so many groups of ranks, and what would be compiled for it, for Hopper."""
    inputs, attributes = moe_inputs(format_, shared, sizes)
    given = {**attributes, **({"expert_groups": groups} if groups > 1 else {})}
    sources: Any = Sources(Arch("sm_90a"))
    (program,) = lower_gpu([node_program("Moe", inputs, given, {"T": 8192})], sources)
    return program.nodes[0], list(sources.by_name.values())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize(("format_", "shared"), [("wint4:128", "fp8"), ("fp8", "fp8"), ("bf16", "")])
def test_experts_of_a_rank_compile(format_: str, shared: str, arch: str) -> None:
    """Of R1 on eight: 32 experts, an eighth of the shared one, and a single token's pairs shared out anew."""
    inputs, attributes = moe_inputs(format_, shared or "bf16", (32, 8, 7168, 2048, 256))
    if not shared:
        inputs = {name: tensor for name, tensor in inputs.items() if not name.startswith("shared")}
    _, compiler = lowered("Moe", inputs, {**attributes, "expert_groups": 8}, arch)
    assert all(built.resources.stack_bytes == 0 for built in compiler.built.values())
    one = {built.compiled.entry for built in compiler.built.values() if built.compiled.entry.startswith("moe_one")}
    assert one == (set() if (format_, arch) == ("fp8", "sm_80") or (shared, arch) == ("fp8", "sm_80") else ONE_TOKEN)


@pytest.mark.parametrize("format_", ["wint4:128", "fp8", "wint8", "bf16"])
def test_a_token_is_shared_out_evenly(format_: str) -> None:
    """Of R1's experts no multiprocessor reads over 4 % more than its share, and all its warps have work."""
    from dsc.plugins.moe.one_token import BLOCKS

    _, compiler = moe(format_, "fp8" if format_ == "wint4:128" else format_, "sm_90a", R1)
    for source, built in compiler.built.items():
        if not built.compiled.entry.startswith("moe_one"):
            continue
        d = {name: int(value) for name, value in source.defines}
        each, first = (d["F"] // 8, d["SHARED_F"] // 8) if d["GATE_UP"] else (d["D"] // 32, d["D"] // 32)
        units = d["SHARED_COST"] * first + d["TOP_K"] * each
        most = -(-units // BLOCKS[90])
        assert most * BLOCKS[90] <= 1.06 * units
        assert most % d["WARPS"] == 0 or most < d["WARPS"] or format_ == "bf16"


def test_fp8_experts_without_fp8_instructions() -> None:
    """sm_80 decodes e4m3 by its bits and multiplies bfloat16; few_tokens.cu is not for it."""
    node, compiler = moe("fp8", "fp8", "sm_80")
    assert not any(built.compiled.entry.startswith("moe_few") for built in compiler.built.values())
    assert all(built.resources.stack_bytes == 0 for built in compiler.built.values())
    assert len(node.variants) == 3


@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_router_compiles(arch: str, mapped: bool) -> None:
    inputs = {
        "x": torch.empty(3, 7168, dtype=torch.bfloat16, device="meta"),
        "w": torch.empty(256, 7168, device="meta"),
        "bias": torch.empty(256, device="meta"),
        "slots": torch.empty(3, dtype=torch.int32, device="meta"),
    }
    if mapped:
        inputs["expert_map"] = torch.empty(1, 256, dtype=torch.int32, device="meta")
    attributes = {"top_k": 8, "groups": 8, "topk_groups": 4, "scoring": "sigmoid", "group_score": "top2_sum"}
    node, compiler = lowered("Router", inputs, {**attributes, "normalize": 1, "scale": 2.5}, arch)
    assert [len(variant.steps) for variant in node.variants] == [2, 2, 2, 2]
    for source, built in compiler.built.items():
        assert built.resources.stack_bytes == 0, (source, built.resources)
        if built.compiled.entry == "router_logits":
            assert instructions(built.cubin) & TENSOR_CORES[arch], source
