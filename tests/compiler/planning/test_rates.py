"""Predicted rates, by tables of kernels that follow a law."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.engines import ROOT

from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.model_shapes import first_layers, read_shape
from dsc.compiler.planning.measured import Table, read_table
from dsc.compiler.planning.ops import PlannedOp, planned_ops
from dsc.compiler.planning.rates import Predictor, predict
from dsc.compiler.planning.weights import planned_weights
from dsc.compiler.planning.work import Step, work
from dsc.compiler.recipe import Recipe, load_recipe
from dsc.runtime.bench_floor import RATES
from dsc.runtime.manifest import Parallel
from dsc.runtime.spec import ModelSpec

H200 = RATES["sm_90a"]
R1 = read_shape("deepseek-ai/DeepSeek-R1")[0]
SLICE = first_layers(R1, 3)
ONE_RANK = Mesh(1, 1)
BATCHES, CONTEXTS = (1, 16, 64, 256), (2048, 8192)
FIXED_US, SHARE, IN_A_STEP, SAMPLE_US, GAP_US = 3.0, 1.4, 1.25, 20.0, 5.0


def kernel_tables() -> Any:
    """The program that makes the tables."""
    file = ROOT / "benchmarks" / "kernel_tables.py"
    spec = importlib.util.spec_from_file_location("kernel_tables", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_rank(name: str) -> Recipe:
    return load_recipe(name).override("sm_90a", 1)


def law_us(op: PlannedOp, step: Step) -> float:
    """What a kernel takes by itself in these tests."""
    return FIXED_US + SHARE * work(op, step, H200).seconds * 1e6


def nodes_of(ops: list[PlannedOp], step: Step) -> list[dict[str, Any]]:
    letters = {"T": step.tokens, "B": step.sequences, "P": 128, "context": 32768}
    return [
        {
            "name": op.name,
            "op": op.op,
            "count": op.count,
            "seconds": law_us(op, step) / 1e6,
            "dims": {**op.widths, **letters},
            "attributes": dict(op.formats),
        }
        for op in ops
    ]


def bench_of(spec: ModelSpec, recipe: Recipe, mesh: Mesh = ONE_RANK) -> dict[str, Any]:
    """What `dsc bench --nodes --json` would print, kernels taking IN_A_STEP times as long in a step as by themselves."""
    weights = planned_weights(spec, recipe)
    decode, prefill = [], []
    for context in CONTEXTS:
        for batch in BATCHES:
            nodes = nodes_of(planned_ops(spec, recipe, weights, mesh, "decode"), Step("decode", batch, 1, context))
            busy = IN_A_STEP * sum(n["count"] * n["seconds"] for n in nodes) + SAMPLE_US / 1e6
            decode.append(
                {
                    "batch": batch, "context": context, "nodes": nodes, "device_seconds": busy, "experts": {"a": 3.0},
                    "sample_seconds": SAMPLE_US / 1e6, "seconds": busy + GAP_US / 1e6,
                }
            )  # fmt: skip
        steps = [Step("prefill", n, context, context) for n in sorted({1, 8192 // context})]
        ops = planned_ops(spec, recipe, weights, mesh, "prefill")
        held = [{"prompts": s.sequences, "tokens": s.queries, "nodes": nodes_of(ops, s)} for s in steps]
        whole = IN_A_STEP * sum(n["count"] * n["seconds"] for n in held[-1]["nodes"])
        prefill.append(
            {
                "prompts": steps[-1].sequences, "context": context, "nodes": held, "seconds_at_once": whole, "experts": {"a": 3.0}
            }
        )  # fmt: skip
    return {
        "engine": recipe.name, "model": recipe.model, "device": "NVIDIA H200", "date": "2026-11-30", "driver": "580",
        "toolchain": {}, "decode": decode, "prefill": prefill,
    }  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return bench_of(SLICE, one_rank("r1-wint4"))


@pytest.fixture(scope="module")
def table(bench: dict[str, Any]) -> Table:
    return read_table({"gpu": "h200", "sources": [kernel_tables().source(bench)]}, H200)


def predictor(table: Table, spec: ModelSpec, name: str, mesh: Mesh = ONE_RANK) -> Predictor:
    recipe = replace(one_rank(name), parallel=Parallel(mesh.tensor, mesh.expert, 1))
    return Predictor(spec, recipe, planned_weights(spec, recipe), mesh, table)


# -- tables that follow a law


def test_measured_steps_are_predicted_as_they_are(bench: dict[str, Any], table: Table) -> None:
    made = predictor(table, SLICE, "r1-wint4")
    for point in bench["decode"]:
        found = made.decode(point["batch"], point["context"])
        assert found.seconds == pytest.approx(point["seconds"], rel=1e-3)
    for point in bench["prefill"]:
        found_prefill = made.prefill(point["context"], 8192, 256)
        assert (found_prefill.prompts, found_prefill.seconds) == (
            point["prompts"],
            pytest.approx(point["seconds_at_once"], rel=1e-3),
        )
    assert list(made.notes()) == []


@pytest.mark.parametrize(("batch", "context"), [(4, 2048), (32, 2048), (128, 8192), (16, 4096), (48, 5000)])
def test_between_measured_steps(table: Table, batch: int, context: int) -> None:
    made = predictor(table, SLICE, "r1-wint4")
    found = made.decode(batch, context)
    assert found.seconds == pytest.approx(lawful_seconds(made, batch, context), rel=0.03)
    assert list(made.notes()) == []


def lawful_seconds(made: Predictor, batch: int, context: int) -> float:
    step = Step("decode", batch, 1, context)
    return (IN_A_STEP * sum(op.count * law_us(op, step) for op in made.ops["decode"]) + SAMPLE_US + GAP_US) / 1e6


def test_beyond_measured_steps_is_told(table: Table) -> None:
    made = predictor(table, SLICE, "r1-wint4")
    found = made.decode(512, 16384)
    assert found.seconds == pytest.approx(lawful_seconds(made, 512, 16384), rel=0.05)
    notes = list(made.notes())
    assert "scaled from context 8,192: MlaAttention" in notes
    assert any("Linear" in note and note.startswith("scaled from decode of 256 tokens: ") for note in notes), notes
    assert notes[0].startswith("100% of these times were not measured")


def test_other_widths_are_scaled_by_work(table: Table) -> None:
    """Kimi-K2 by tables of R1: half the heads, more experts, one dense layer."""
    spec = replace(SLICE, num_heads=64, num_experts=384, num_groups=1, topk_groups=1)
    made = predictor(table, spec, "r1-wint4")
    for batch in (1, 64, 256):
        assert made.decode(batch, 4096).seconds == pytest.approx(lawful_seconds(made, batch, 4096), rel=0.1)
    notes = list(made.notes())
    assert any("Moe" in note and note.startswith("scaled from other widths: ") for note in notes), notes
    assert [note for note in notes if "formats" in note] == ["scaled from other formats: Router"]  # it has no groups


def test_other_formats_are_told(table: Table) -> None:
    made = predictor(table, SLICE, "v2-lite-wint4")
    made.decode(16, 2048)
    notes = list(made.notes())
    assert any("Linear" in note and note.startswith("scaled from other formats: ") for note in notes), notes


def test_norms_that_were_measured_before_they_quantized(table: Table) -> None:
    """Their readers were measured quantizing, so that the sum is a measured one."""
    source = table.sources[0]
    bare = [replace(e, op=replace(e.op, formats={})) if "quantize" in e.op.formats else e for e in source.entries]
    assert bare != list(source.entries)
    made = predictor(table, SLICE, "r1-wint4")
    before = predictor(replace(table, sources=(replace(source, entries=tuple(bare)),)), SLICE, "r1-wint4")
    assert before.decode(16, 2048).seconds == pytest.approx(made.decode(16, 2048).seconds, rel=1e-3)
    assert list(before.notes()) == []
    other = predictor(table, SLICE, "v2-lite-wint4")  # whose norms make no codes
    other.decode(16, 2048)
    assert not any("RmsNorm" in note for note in other.notes())


def test_an_op_that_was_not_measured_is_told(table: Table) -> None:
    source = table.sources[0]
    bare = replace(source, entries=tuple(e for e in source.entries if e.op.op != "Router"))
    made = predictor(replace(table, sources=(bare,)), SLICE, "r1-wint4")
    made.decode(1, 2048)
    assert list(made.notes()) == ["left out, since no such op was measured: Router"]


def test_ranks_share_the_work(table: Table) -> None:
    whole, ranks = predictor(table, R1, "r1-wint4"), predictor(table, R1, "r1-wint4", Mesh(8, 8))
    for batch in (1, 256):
        one, eight = whole.decode(batch, 2048).seconds, ranks.decode(batch, 2048).seconds
        assert one / 8 < eight < one
    assert "what 8 ranks exchange is left out: it was not measured among so many" in ranks.notes()
    # Attention and dense layers of a rank see their own sequences, experts those of all ranks.
    groups = predictor(table, R1, "r1-wint4", Mesh(1, 8))
    assert groups.decode(256, 2048).seconds < whole.decode(256, 2048).seconds
    assert any("what 8 ranks exchange is left out" in note for note in groups.notes())


def test_what_two_ranks_exchange_is_counted_where_it_was_measured(table: Table) -> None:
    mesh, recipe = Mesh(2, 2), replace(one_rank("r1-wint4"), parallel=Parallel(2, 2, 1))
    bench = bench_of(SLICE, recipe, mesh)
    both = replace(
        table,
        sources=(
            *table.sources,
            *read_table({"gpu": "h200", "sources": [kernel_tables().source(bench)]}, H200).sources,
        ),
    )
    made = predictor(both, SLICE, "r1-wint4", mesh)
    for point in bench["decode"]:
        assert made.decode(point["batch"], point["context"]).seconds == pytest.approx(point["seconds"], rel=1e-3)
    assert list(made.notes()) == []
    exchanged = [op.op for op, _ in made.estimates if op.op in ("AllReduce", "GatherLogits")]
    assert exchanged
    unmeasured = predictor(table, SLICE, "r1-wint4", mesh)
    unmeasured.decode(64, 2048)
    assert any("what 2 ranks exchange is left out" in note for note in unmeasured.notes())
    four = predictor(both, SLICE, "r1-wint4", Mesh(4, 4))
    four.decode(64, 2048)
    assert any("what 4 ranks exchange is left out" in note for note in four.notes())


def test_prompts_longer_than_a_step(table: Table) -> None:
    made = predictor(table, SLICE, "r1-wint4")
    long = made.prefill(32768, 8192, 256)
    assert (long.prompts, long.tokens) == (1, 32768)
    first = made.prefill(8192, 8192, 256)
    assert long.seconds > 4 * first.seconds  # later chunks attend to more
    assert made.prefill(512, 8192, 4).prompts == 4


def test_why_nothing_is_predicted(table: Table) -> None:
    for name, given, why in (
        ("r1-wint4", None, "no kernels were measured there"),
        ("tiny-r1-fp32", table, "tables are of bf16 activations"),
    ):
        recipe = one_rank(name)
        weights = planned_weights(SLICE, recipe)
        found = predict(SLICE, recipe, weights, ONE_RANK, given, "H200", context=64, batch_tokens=128, sequences=2)
        assert (found.decode, found.prefill, found.why) == ((), None, why)
    recipe = one_rank("r1-wint4")
    recipe = replace(recipe, passes=tuple(entry for entry in recipe.passes if entry.name != "fuse_moe"))
    found = predict(SLICE, recipe, [], ONE_RANK, table, "H200", context=64, batch_tokens=128, sequences=2)
    assert found.why == "the recipe leaves out fuse_moe, and tables are of their ops"


def test_steps_without_figures_are_left_out_and_told(
    bench: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    silent = {**bench, "decode": [{**bench["decode"][0], "nodes": None}, *bench["decode"][1:]]}
    made = kernel_tables().source(silent)
    assert len(made["steps"]) == len(kernel_tables().source(bench)["steps"]) - 1
    assert "r1-wint4: decode, batch 1, context 2048: left out, it has no nodes" in capsys.readouterr().err
