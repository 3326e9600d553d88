"""Planned ops are the nodes of the graphs, and their least work is what is read off programs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import ROOT, TINY_R1
from support.families import make_checkpoint

from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.graphs import make_graphs
from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.lower import lower
from dsc.compiler.model_shapes import read_shape
from dsc.compiler.planning.ops import PlannedOp, missing_passes, planned_ops
from dsc.compiler.planning.weights import planned_weights
from dsc.compiler.planning.work import Step, work
from dsc.compiler.recipe import load_recipe, packaged_recipes, parse_recipe
from dsc.runtime.bench_floor import Rates, StepFacts, step_floor
from dsc.runtime.bench_layers import Part
from dsc.runtime.bench_nodes import node_times
from dsc.runtime.manifest import Parallel
from dsc.runtime.program import Program

RATES = Rates(memory=1e12, bf16=1e14, fp8=2e14)
# Recipe, model, ranks and groups of them for experts.
PAIRS = [
    ("r1-wint4", "r1", 1, 1), ("r1-fp8", "r1", 1, 1), ("r1-fp8", "v3.1", 1, 1), ("r1-wint8-2node", "faults", 1, 1),
    ("v2-lite-wint4", "v2-lite", 1, 1), ("v2-lite-wint4", "v2", 1, 1), ("kimi-k2-wint4", "k2", 1, 1),
    ("tiny-r1-fp32", "tiny-r1", 1, 1), ("tiny-r1-fp32", "tiny-r1", 2, 2), ("tiny-r1-bf16", "v2-lite", 4, 2),
    ("r1-wint8", "r1", 4, 1),
]  # fmt: skip
STORED = ("Linear", "LmHead", "Qkv", "MlaAttention", "Moe")


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def planned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Program, list[PlannedOp]]]:
    """Program and planned ops by phase."""
    name, family, tensor, expert = request.param
    folder: Path = TINY_R1 if family == "tiny-r1" else make_checkpoint(tmp_path_factory.mktemp("ops"), family)
    recipe = replace(load_recipe(name).override("cpu"), parallel=Parallel(tensor, expert, 1))
    spec = read_config(folder)
    if not spec.num_mtp_layers:
        recipe = replace(recipe, mtp=replace(recipe.mtp, enabled=False, drafts=0))
    checkpoint = Checkpoint.open(folder, spec, mtp=recipe.mtp.enabled)
    weights = planned_weights(checkpoint.spec, recipe)
    graphs = {graph.name: graph for graph in make_graphs(recipe, checkpoint)[0]}
    return {
        phase: (
            lower(graphs[f"main.{phase}"], ""),
            planned_ops(checkpoint.spec, recipe, weights, Mesh(tensor, expert), phase),
        )
        for phase in ("prefill", "decode")
    }


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_ops_are_those_of_the_graphs(planned: dict[str, tuple[Program, list[PlannedOp]]], phase: str) -> None:
    program, ops = planned[phase]
    facts = StepFacts.decode(4, 100)
    parts = [Part(node.name, 1e-6, 1) for node in program.nodes]
    nodes = node_times(program, facts, parts, None)
    found: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        op = next(op for op in ops if op.name == node.name and op.op == node.op)
        assert dict(op.widths) == {name: node.dims[name] for name in op.widths}, node
        assert dict(op.formats) == node.attributes
        found[op.name, op.op] += node.count
    assert found == {(op.name, op.op): op.count for op in ops}


@pytest.mark.parametrize(
    ("phase", "step", "facts"),
    [
        ("decode", Step("decode", 3, 1, 100), StepFacts.decode(3, 100)),
        ("prefill", Step("prefill", 2, 48, 48), StepFacts.prefill(2, 0, 48)),
        ("prefill", Step("prefill", 2, 16, 48), StepFacts.prefill(2, 32, 16)),
    ],
)
def test_work_is_the_floor_of_the_program(
    planned: dict[str, tuple[Program, list[PlannedOp]]], phase: str, step: Step, facts: StepFacts
) -> None:
    """Of every op that stores weights, norms and rope tables aside, and with all experts hit."""
    program, ops = planned[phase]
    checked = set()
    for floor in step_floor(program, facts, RATES):
        if floor.op not in STORED:
            continue
        general = ".".join("*" if part.isdigit() else part for part in floor.node.split("."))
        op = next(op for op in ops if op.name == general)
        found = work(op, replace(step, sequences=10**6) if op.op == "Moe" else step, RATES)
        if op.op != "Moe":
            assert found.flop == pytest.approx(floor.flop, rel=1e-9), op
        left_out = 8192 + step.tokens * 2 * (64 // 2) * 4  # norms, rows of rope tables
        assert floor.bytes - left_out <= found.bytes <= floor.bytes, op
        checked.add(op.op)
    assert checked == {node.op for node in program.nodes} & set(STORED)


def test_norms_make_codes_for_the_readers_of_their_layers() -> None:
    text = (ROOT / "recipes" / "r1-wint4.yaml").read_text()
    default = "default: {format: fp8, block: [128, 128]}"
    assert default in text
    text = text.replace(default, "default: {format: wint8}\n      dense_mlp: {format: fp8}")
    spec, after = read_shape("deepseek-ai/DeepSeek-R1")[0], "layers.*.post_attention_layernorm"
    wanted = {"with": [(3, {"quantize": "fp8"}), (58, {})], "without": [(61, {})]}
    for name, given in (("with", text), ("without", text.replace("  - quantize_norms\n", ""))):
        recipe = parse_recipe(given, "mine.yaml", "mine").override(ranks=1)
        ops = planned_ops(spec, recipe, planned_weights(spec, recipe), Mesh(1, 1), "decode")
        norms = [op for op in ops if op.op in ("RmsNorm", "AddRmsNorm")]
        assert [(op.count, op.formats) for op in norms if op.name == after] == wanted[name]
        assert [(op.count, op.formats) for op in norms if op.name != after] == [(1, {}), (60, {}), (1, {})]


def test_every_recipe_inserts_what_is_taken_for_granted() -> None:
    for name in packaged_recipes():
        assert missing_passes(load_recipe(name)) == [], name
