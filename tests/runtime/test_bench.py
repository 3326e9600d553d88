"""dsc bench: floors worked out by hand, routing that is counted, figures that are withheld, on an engine of the CPU."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from support.engines import TINY_R1

from dsc import runtime
from dsc.compiler.build import RandomWeights, compile_engine
from dsc.compiler.cli import main
from dsc.compiler.recipe import load_recipe
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.bench_floor import RATES, Rates, StepFacts, independent_hits, step_floor
from dsc.runtime.bench_points import DecodePoint, PrefillPoint, decode_data, knee, prefill_data
from dsc.runtime.bench_prefill import PrefillBench
from dsc.runtime.bench_routing import exposing, router_outputs, spreads
from dsc.runtime.bench_steps import Bench
from dsc.runtime.bench_tables import notes, prefill_notes, show
from dsc.runtime.engine import Engine
from dsc.runtime.program import layer_of

RATE = Rates(memory=1e9, bf16=1e30, fp8=1e30)  # bytes a nanosecond: seconds are bytes
POINT = DecodePoint(
    batch=4, context=64, seconds=0.5, device_seconds=0.4, sample_seconds=0.1, floor=0.15, experts={"a": 3.0},
    independent=3.2, valid=True, memory_bytes=10,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bench") / "random.engine"
    return compile_engine(
        load_recipe("tiny-r1-fp8"), model=str(TINY_R1), output=output, random=RandomWeights(layers=3)
    ).folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return runtime.load(folder)


def floors(folder: Path, facts: StepFacts, rates: Rates = RATE, graph: str = "main.decode") -> dict[str, object]:
    return {floor.node: floor for floor in step_floor(EngineFolder.open(folder).program(graph), facts, rates)}


def test_floors_are_the_bytes_that_a_step_touches(folder: Path):
    manifest = EngineFolder.open(folder).manifest
    stored = {name: entry.bytes for name, entry in manifest.tensors.items()}
    found = floors(folder, StepFacts.decode(2, 100, {"layers.1.mlp.router": 8, "layers.2.mlp.router": 16}))
    token = manifest.kv_cache.block_bytes // manifest.kv_cache.block_tokens
    layer = "model.layers.1.mlp"

    def parts(name: str) -> int:
        return stored[f"{name}.weight"] + stored[f"{name}.scales"]

    projections = [f"{name}_proj" for name in ("gate", "up", "down")]
    routed = sum(parts(f"{layer}.experts.{name}") for name in projections)
    shared = sum(parts(f"{layer}.shared_experts.{name}") for name in projections)
    assert found["layers.1.mlp.moe"].bytes == routed * 8 // 16 + shared
    assert found["layers.2.mlp.moe"].bytes > found["layers.1.mlp.moe"].bytes
    assert found["layers.0.self_attn.o_proj"].bytes == parts("model.layers.0.self_attn.o_proj")
    assert found["embed_tokens"].bytes == 2 * stored["model.embed_tokens.weight"] // manifest.spec.vocab_size
    kv_b = sum(size for name, size in stored.items() if name.startswith("model.layers.0.self_attn.kv_b_proj"))
    tables = 2 * 2 * stored["rope.cos"] // manifest.limits.context_tokens
    assert found["layers.0.self_attn.attention"].bytes == kv_b + tables + 2 * 100 * token
    assert found["lm_head"].seconds == pytest.approx(stored["lm_head.weight"] / 1e9)


def test_floors_are_the_arithmetic_where_that_takes_longer(folder: Path):
    spec = EngineFolder.open(folder).spec
    rates = Rates(memory=1e30, bf16=1e9, fp8=2e9)
    found = floors(folder, StepFacts.prefill(3, 50, 20), rates, "main.prefill")
    tokens = 60
    o_proj = 2 * tokens * spec.hidden_size * spec.num_heads * spec.v_head_dim
    assert found["layers.0.self_attn.o_proj"].seconds == pytest.approx(o_proj / 2e9)
    assert found["lm_head"].seconds == pytest.approx(2 * 3 * spec.hidden_size * spec.vocab_size / 1e9)
    pairs = 3 * (20 * 50 + 20 * 21 // 2)
    widths = spec.qk_head_dim + spec.v_head_dim
    expand = 2 * 3 * 70 * spec.num_heads * spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim)
    attention = expand + 2 * pairs * spec.num_heads * widths
    assert found["layers.0.self_attn.attention"].flop == attention
    assert found["layers.1.input_layernorm"].bytes > 0
    assert RATES["sm_90a"].memory == 4.25e12


def test_random_tokens_spread_over_the_experts(engine: Engine):
    """Random weights are there for this: every layer hits what independent routing would, or nearly so."""
    program = engine.programs["main.prefill"].program
    ids = router_outputs(program)
    assert list(ids) == ["layers.1.mlp.router", "layers.2.mlp.router"]
    copy = exposing(program, list(ids.values()))
    assert set(copy.outputs) - set(program.outputs) == set(ids.values())
    for tokens in (3, 8, 64):
        data = hits_of_random_tokens(engine, tokens)
        independent = independent_hits(16, 4, tokens)
        assert min(data.values()) > 0.85 * independent, (tokens, data)


def hits_of_random_tokens(engine: Engine, tokens: int) -> dict[str, float]:
    from dsc.runtime.batch import Batch, Segment
    from dsc.runtime.bench_routing import experts_hit

    generator = torch.Generator().manual_seed(tokens)
    sequences = min(tokens, 16)
    blocks = engine.cache.pool.take(sequences)
    assert blocks is not None
    steps = []
    for _ in range(8):
        ids = torch.randint(2048, (sequences, tokens // sequences), generator=generator).tolist()
        batch = Batch.of([Segment(t, 0, [b]) for t, b in zip(ids, blocks, strict=True)], 64)
        steps.append(batch.inputs())
    engine.cache.pool.give(blocks)
    return experts_hit(engine.backend, engine.programs["main.prefill"].program, engine.cache.tensors, steps)


def test_a_rank_counts_its_own_experts(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """So independent routing reaches its share of them, counted over more steps."""
    whole = Bench(engine, None).independent(5)
    assert whole == independent_hits(engine.spec.num_experts, engine.spec.experts_per_token, 5)
    ranks = replace(engine.manifest, parallel=replace(engine.manifest.parallel, tensor=4, expert=2))
    monkeypatch.setattr(Engine, "manifest", ranks)
    assert Bench(engine, None).independent(5) == whole / 2


def test_routing_that_does_not_spread_is_told():
    assert independent_hits(256, 8, 1) == 8
    assert independent_hits(256, 8, 64) == pytest.approx(222.4, abs=0.1)
    assert spreads({"a": 220.0, "b": 200.5}, 222.4)
    assert not spreads({"a": 222.0, "b": 199.5}, 222.4)  # every layer counts, not their mean
    assert not spreads({"a": 222.0, "b": 8.0}, 120.0)
    assert spreads({}, 0.0)


def test_figures_of_experts_are_withheld_where_routing_does_not_spread():
    data = decode_data(POINT)
    assert (data["tokens_per_s"], data["host_gap"], data["floor_share"]) == (
        8.0,
        pytest.approx(0.2),
        pytest.approx(0.5),
    )
    silent = decode_data(replace(POINT, valid=False))
    assert silent["experts"] == {"a": 3.0}
    shown = {"batch", "context", "floor", "experts", "independent", "valid", "memory_bytes", "sample_seconds", "launch"}
    assert {name for name, value in silent.items() if value is not None} <= shown


def test_knee_is_where_more_sequences_gain_little():
    points = [replace(POINT, batch=b, seconds=s) for b, s in ((1, 1.0), (16, 2.0), (64, 7.0), (128, 13.0))]
    assert knee(points) == 16
    assert knee([replace(p, valid=False) for p in points]) is None


def test_the_cost_of_a_launch_is_told():
    layer = {"name": "layers.0", "seconds": 1e-4, "floor": None, "launches": 9, "moe": False}
    launch = {"launches": 80, "eager": 3.14e-6, "graph": 1.2e-7}
    point = {**decode_data(POINT), "layers": [layer], "launch": launch}
    told = "batch 4, context 64: 80 launches, each 3.1 us of the host by itself, 0.12 us in a CUDA graph"
    assert list(notes({"decode": [point], "knee": {}}))[1:] == [told]
    assert len(list(notes({"decode": [{**point, "launch": None}], "knee": {}}))) == 1


def test_experts_hit_are_told_layer_by_layer():
    hits = {f"layers.{i}.mlp.router": hit for i, hit in enumerate((15.6, 16.0, 14.2, 13.9), 3)}
    point = replace(POINT, experts=hits, independent=15.7)
    told = "batch 4, context 64: experts hit, layers.3 to layers.6: 2 x 16, 2 x 14; by independent routing: 15.7"
    assert list(notes({"decode": [decode_data(point)], "knee": {}})) == [told]
    withheld = "batch 4, context 64: no figures, since layers.6 hit under 90% of what independent routing does"
    silent = replace(point, valid=spreads(hits, 15.7))
    assert list(notes({"decode": [decode_data(silent)], "knee": {}})) == [told, withheld]
    assert list(notes({"decode": [decode_data(replace(POINT, experts={}))], "knee": {}})) == []


def test_a_prefill_that_is_withheld_says_so():
    point = PrefillPoint(
        batch=5, prompts=2, context=64, seconds=2.5, seconds_at_once=1.0, floor=0.5,
        experts={"layers.1.mlp.router": 8.0}, independent=16.0, valid=False, memory_bytes=10,
    )  # fmt: skip
    data = prefill_data(point)
    assert (data["seconds"], data["tokens_per_s"], data["floor_share"]) == (None, None, None)
    assert list(prefill_notes([data])) == [
        "2 prompts of 64 at once: experts hit, layers.1: 8; by independent routing: 16.0",
        "2 prompts of 64 at once: no figures, since layers.1 hit under 90% of what independent routing does",
    ]


def test_a_batch_of_prompts_goes_through_in_steps(engine: Engine):
    """Twice what fills a step and three more prompts take two full steps and one of three."""
    limits = engine.manifest.limits
    at_once = min(limits.sequences, limits.batch_tokens // 32)
    prompts = PrefillBench(Bench(engine, RATE), nodes=False)
    whole, rest = prompts.measure(at_once, 32), prompts.measure(3, 32)
    both = prompts.measure(2 * at_once + 3, 32)
    assert (both.batch, both.prompts, rest.prompts) == (2 * at_once + 3, at_once, 3)
    assert both.seconds_at_once == whole.seconds
    assert both.seconds == pytest.approx(2 * whole.seconds + rest.seconds)
    assert both.floor == pytest.approx(2 * whole.floor + rest.floor)
    assert both.rate == pytest.approx((2 * at_once + 3) * 32 / both.seconds)
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def test_layers_of_nodes():
    assert [layer_of(name) for name in ("layers.12.mlp.moe", "norm", "lm_head")] == ["layers.12", "norm", "lm_head"]


def test_the_command(folder: Path, tmp_path: Path):
    arguments = ["bench", str(folder), "--batch", "1,4", "--context", "128", "--steps", "2", "--nodes", "--json"]
    plot = tmp_path / "plot.png"
    done = CliRunner().invoke(main, [*arguments, "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert (data["engine"], data["target"], data["device"]) == ("random.engine", "cpu", "cpu")
    assert [(p["batch"], p["context"]) for p in data["decode"]] == [(1, 128), (4, 128)]
    first = data["decode"][0]
    assert first["experts"] == {"layers.1.mlp.router": 4.0, "layers.2.mlp.router": 4.0}
    names = [layer["name"] for layer in first["layers"]]
    assert names == ["embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "lm_head"]
    assert [layer["moe"] for layer in first["layers"]] == [False, False, True, True, False, False]
    assert sum(layer["seconds"] for layer in first["layers"]) < 3 * first["seconds"]
    nodes = {(node["name"], node["count"]): node for node in first["nodes"]}
    moe, o_proj = nodes["layers.*.mlp.moe", 2], nodes["layers.*.self_attn.o_proj", 3]
    assert (moe["op"], moe["dims"]["T"], moe["dims"]["E"], moe["experts"], moe["floor"]) == ("Moe", 1, 16, 4.0, None)
    assert (o_proj["attributes"]["w_format"], o_proj["flop"]) == (
        "fp8",
        2 * o_proj["dims"]["I"] * o_proj["dims"]["O"],
    )
    assert sum(node["count"] * node["seconds"] for node in nodes.values()) < 3 * first["seconds"]
    assert first["floor"] is None  # no measured rates of a CPU
    assert [(p["batch"], p["context"], p["prompts"]) for p in data["prefill"]] == [(1, 128, 1), (4, 128, 4)]
    assert data["prefill"][0]["tokens_per_s"] > 0
    told = io.StringIO()
    show(data, Console(file=told))
    assert f"the cache holds {data['cache_tokens']:,} tokens\n" in told.getvalue()
    assert "batch 1, context 128: experts hit, layers.1 to layers.2: 2 x 4;" in told.getvalue()
    assert "4 prompts of 128 at once: experts hit, layers.1 to layers.2: 2 x 16;" in told.getvalue()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_more_than_the_engine_was_planned_for_is_refused(folder: Path):
    refused = CliRunner().invoke(main, ["bench", str(folder), "--batch", "17", "--context", "4096"])
    assert refused.exit_code == 2
    assert "--batch up to 16, --context up to 2048" in refused.output
    nonsense = CliRunner().invoke(main, ["bench", str(folder), "--batch", "1;2"])
    assert (nonsense.exit_code, "--batch is no list of numbers" in nonsense.output) == (2, True)
