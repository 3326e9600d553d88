"""`dsc plan`: splits that are refused and why, what fits, and what the command says of models that are not here."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import ROOT, TINY_R1
from support.families import make_checkpoint

from dsc.compiler.build import RandomWeights
from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.cli import main
from dsc.compiler.config import read_config
from dsc.compiler.convert import memory_of
from dsc.compiler.emission_plan import plan_emission
from dsc.compiler.emit import gather
from dsc.compiler.graphs import make_graphs
from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.splits import EXPERT_MAP, HEAD
from dsc.compiler.lower import lower
from dsc.compiler.memory import memory_report
from dsc.compiler.model_shapes import read_shape
from dsc.compiler.pieces import THREAD_BYTES
from dsc.compiler.planning.build_cost import build_cost
from dsc.compiler.planning.capacity import fit, make_stages, step_memory
from dsc.compiler.planning.gpus import GPUS
from dsc.compiler.planning.plan import make_plan
from dsc.compiler.planning.sharding import allowed_meshes, rank_bytes, shard_faults, stage_layers
from dsc.compiler.planning.weights import planned_weights
from dsc.compiler.recipe import Recipe, load_recipe
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import Parallel
from dsc.runtime.spec import ModelSpec

R1 = read_shape("deepseek-ai/DeepSeek-R1")[0]


def with_parallel(recipe: Recipe, tensor: int, expert: int, pipeline: int = 1) -> Recipe:
    return replace(recipe, parallel=Parallel(tensor, expert, pipeline))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


@pytest.fixture
def faults_config(tmp_path: Path) -> str:
    """The small checkpoint of faults.md, of which only config.json is here; moe inter is 320 too."""
    folder = make_checkpoint(tmp_path / "whole", "faults", moe_intermediate_size=320)
    config = tmp_path / "config.json"
    config.write_text((folder / "config.json").read_text())
    return str(config)


# -- splits


def test_blocks_are_never_cut(faults_config: str) -> None:
    """moe inter 320, blocks of 128, tensor parallel 4: refused before any download, with the ways that are allowed."""
    recipe = with_parallel(load_recipe("r1-fp8"), tensor=4, expert=1)
    with pytest.raises(DscError) as raised:
        make_plan(recipe, faults_config)
    text = " ".join(raised.value.text().split())
    assert "parallel {tensor: 4, expert: 1, pipeline: 1} cannot split this model" in text
    assert "model.layers.{}.mlp.experts.gate_proj.weight 320 rows = 4 x 80, not in whole blocks of 128" in text
    assert "model.layers.{}.mlp.experts.down_proj.weight 320 columns = 4 x 80, not in whole blocks of 128" in text
    # 4 heads of 48 rows are not in blocks either.
    assert raised.value.try_ == (
        "parallel: {tensor: 1, expert: 1}; or for attention, dense_mlp, experts, kv_b, shared_experts a format without "
        "groups and blocks: wint8, bf16"
    )
    plan = make_plan(with_parallel(recipe, 1, 4), faults_config)
    assert "engines whose expert ranks do not divide their tensor ranks are not built yet" in plan.notes
    assert [stage.bytes_by_class["experts"] for stage in plan.stages] == [
        sum(w.bytes for w in plan.weights if w.weight_class == "experts") // 4
    ]


def test_the_command_refuses_with_exit_code_2(faults_config: str) -> None:
    result = run("r1-fp8", "--model", faults_config)
    assert result.exit_code == 2
    assert "heads 4 = 8 x 0 + 4" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("tensor", "expert", "told"),
    [
        (3, 1, "heads"),
        (1, 48, "experts"),
        (8, 3, "ranks"),
        (32, 32, "model.layers.{}.mlp.gate_proj.weight"),  # 18432 / 32 = 576
        (128, 128, "heads"),
    ],
)
def test_r1_cannot_be_split_so(tensor: int, expert: int, told: str) -> None:
    recipe = load_recipe("r1-fp8")
    faults = dict(shard_faults(R1, planned_weights(R1, recipe), Mesh(tensor, expert)))
    if told == "heads" and tensor == 128:
        assert any("q_b_proj" in what for what in faults)  # one head's 192 rows are a block and a half
    else:
        assert told in faults, faults


def test_a_vocabulary_is_padded() -> None:
    spec = replace(R1, vocab_size=129281)
    recipe = load_recipe("r1-fp8")
    weights = planned_weights(spec, recipe)
    assert not shard_faults(spec, weights, Mesh(8, 8))
    head = next(w for w in weights if w.name == "lm_head.weight")
    blocks = 127  # of 1,011 on eight ranks
    assert rank_bytes(spec, head, Mesh(8, 8)) == blocks * 128 * 7168 * 2


REPLICATED = ("embed_tokens", "q_a_proj", "kv_a_proj", "qkv_proj", "norm", "mlp.gate.", "rope.", "eh_proj")


@given(st.sampled_from(["r1-wint4", "r1-fp8", "r1-wint4-a800"]), st.data())
@settings(max_examples=30, deadline=None)
def test_ranks_together_hold_the_whole(name: str, data: st.DataObject) -> None:
    recipe = load_recipe(name)
    mesh = data.draw(st.sampled_from(allowed_meshes(R1, planned_weights(R1, recipe))))
    for weight in planned_weights(R1, with_parallel(recipe, mesh.tensor, mesh.expert)):
        whole, rank = weight.nbytes // weight.count, rank_bytes(R1, weight, mesh)
        ways = mesh.num_ranks if weight.weight_class == "experts" else mesh.tensor
        if any(part in weight.name for part in REPLICATED):
            ways = 1
        if weight.name == EXPERT_MAP:
            ways = mesh.expert
        if weight.name == HEAD:
            assert whole <= rank * ways <= whole + 128 * ways * 7168 * 2  # whole blocks of 128 rows
        elif (
            weight.format is not None
            and weight.format.kind == "wint8"
            and weight.name.endswith(("o_proj.weight", "down_proj.weight"))
        ):
            assert whole <= rank * ways <= whole + weight.shape[-2] * 2 * ways  # each rank has the scales of all rows
        else:
            assert rank * ways == whole, (weight.name, mesh)


@given(st.integers(1, 100), st.integers(1, 20))
def test_stages_hold_every_layer_once(layers: int, stages: int) -> None:
    ranges = stage_layers(layers, stages)
    assert [layer for stage in ranges for layer in stage] == list(range(layers))
    assert len(ranges) == stages
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_pipeline_stages() -> None:
    recipe = with_parallel(load_recipe("r1-wint4"), 8, 8, pipeline=2)
    weights = planned_weights(R1, recipe)
    first, last = make_stages(R1, recipe, weights, Mesh(8, 8))
    assert first.layers == tuple(range(31))
    assert last.layers == tuple(range(31, 62))  # the MTP layer comes after the last
    assert (first.token_bytes, last.token_bytes) == (31 * 1152, 31 * 1152)
    assert "lm_head" not in first.bytes_by_class
    assert first.bytes_by_class["embeddings"] == last.bytes_by_class["embeddings"]
    assert "eh_proj" in last.bytes_by_class
    assert "eh_proj" not in first.bytes_by_class


# -- memory


@pytest.mark.parametrize("family", ["tiny-r1", "r1", "v2-lite", "k2", "faults"])
@pytest.mark.parametrize("name", ["tiny-r1-fp32", "tiny-r1-bf16"])
def test_a_step_takes_what_plan_memory_plans(family: str, name: str, tmp_path: Path) -> None:
    folder = TINY_R1 if family == "tiny-r1" else make_checkpoint(tmp_path / family, family)
    recipe = load_recipe(name)
    spec = read_config(folder)
    if not spec.num_mtp_layers:
        kept = tuple(entry for entry in recipe.passes if entry.name != "fuse_mtp_input")
        recipe = replace(recipe, mtp=replace(recipe.mtp, enabled=False, drafts=0), passes=kept)
    checkpoint = Checkpoint.open(folder, spec, mtp=recipe.mtp.enabled)
    graphs = make_graphs(recipe, checkpoint)[0]
    arenas = [memory_report(lower(graph, ""))["arena_bytes"] for graph in graphs]
    told = step_memory(checkpoint.spec, recipe, Mesh(1, 1), recipe.limits.batch_tokens, recipe.limits.sequences)
    assert told.arena_bytes == pytest.approx(max(arenas), rel=0.02)


@pytest.mark.parametrize(
    ("family", "name", "ranks"),
    [
        ("tiny-r1", "tiny-r1-bf16", 2), ("tiny-r1", "tiny-r1-bf16", 4), ("r1", "tiny-r1-bf16", 2),
        ("r1", "tiny-r1-bf16", 4), ("v2-lite", "tiny-r1-bf16", 4), ("k2", "tiny-r1-bf16", 2), ("r1", "tiny-r1-fp8", 1),
        ("v2-lite", "tiny-r1-fp8", 1), ("k2", "tiny-r1-fp8", 1), ("tiny-r1", "tiny-r1-fp8", 1),
    ],
)  # fmt: skip
def test_what_a_step_needs_at_once(family: str, name: str, ranks: int, tmp_path: Path) -> None:
    """How well that is placed differs; norms of fp8 weights give codes besides."""
    folder = TINY_R1 if family == "tiny-r1" else make_checkpoint(tmp_path / family, family)
    spec = read_config(folder)
    recipe = load_recipe(name).override(ranks=ranks)
    if not spec.num_mtp_layers:
        kept = tuple(entry for entry in recipe.passes if entry.name != "fuse_mtp_input")
        recipe = replace(recipe, mtp=replace(recipe.mtp, enabled=False, drafts=0), passes=kept)
    checkpoint = Checkpoint.open(folder, spec, mtp=recipe.mtp.enabled)
    needed = [memory_report(lower(graph, ""))["live_bytes"] for graph in make_graphs(recipe, checkpoint)[0]]
    limits = recipe.limits
    told = step_memory(checkpoint.spec, recipe, Mesh(ranks, ranks), limits.batch_tokens, limits.sequences)
    assert told.arena_bytes == pytest.approx(max(needed), rel=0.02)


def test_ranks_that_nothing_cuts_weights_for_are_told() -> None:
    """What a build refuses, a plan says."""
    recipe = load_recipe("r1-wint4")
    told = "8 ranks, and no pass cuts weights for them"
    assert told not in make_plan(recipe, gpus=["h200"]).notes
    without = replace(recipe, passes=tuple(entry for entry in recipe.passes if entry.name != "shard"))
    assert told in make_plan(without, gpus=["h200"]).notes
    assert told not in make_plan(without.override(ranks=1), gpus=["h200"]).notes


def test_r1_on_the_gpus_of_its_recipes() -> None:
    """FP8 on eight H200 but not on eight A800; 4-bit experts on both: what the recipes promise."""
    fits = {}
    for name, gpu in (("r1-fp8", "h200"), ("r1-wint4", "h200"), ("r1-wint4-a800", "a800"), ("r1-wint8-2node", "a800")):
        fits[name] = make_plan(load_recipe(name), gpus=[gpu]).fits[0]
    assert all(found.fits for found in fits.values()), fits
    one_node = replace(load_recipe("r1-wint8-2node"), parallel=Parallel(8, 8, 1))
    assert not make_plan(one_node, gpus=["a800"]).fits[0].fits
    for found in fits.values():
        assert found.weight_bytes + found.step_bytes + found.cache_bytes == found.usable_bytes
        assert found.cache_tokens >= 32768
        for tokens, sequences in found.sequences_at.items():
            assert sequences * tokens <= found.cache_tokens < (sequences + 1) * tokens


@pytest.mark.parametrize("gpu", sorted(GPUS))
@pytest.mark.parametrize("tokens", [256, 4096, 32768])
def test_suggested_settings_fit(gpu: str, tokens: int) -> None:
    """With what is suggested for limits, the cache that is suggested fits, and holds so many sequences."""
    recipe = load_recipe("r1-wint4").override(GPUS[gpu].target)
    spec: ModelSpec = R1
    weights = planned_weights(spec, recipe)
    mesh = Mesh(8, 8)
    stages = make_stages(spec, recipe, weights, mesh)
    found = fit(spec, recipe, stages, mesh, GPUS[gpu], tokens)
    if gpu == "a100-40":
        assert not found.fits
        assert found.best is None
        return
    best = found.best
    assert best is not None
    step = step_memory(spec, recipe, mesh, best.batch_tokens, best.sequences).total
    cache = best.cache_blocks * 64 * 62 * 1152
    assert found.weight_bytes + step + cache <= found.usable_bytes
    assert best.cache_blocks * 64 >= best.sequences * tokens


# -- the build


def test_the_memory_of_a_build_is_what_it_takes(tmp_path: Path) -> None:
    """Peak memory of the whole command in a process of its own, on one thread as on two."""
    told = make_plan(load_recipe("tiny-r1-wint4"), str(TINY_R1)).build
    code = (
        "import sys; from dsc.compiler.cli import main\n"
        "main(['compile', '--recipe', 'tiny-r1-wint4', '--model', sys.argv[1], '--output', sys.argv[2]], standalone_mode=False)\n"
        # Not ru_maxrss: that of a child counts the process it was forked from.
        "line = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print('peak', int(line.split()[1]) * 1024)"
    )
    output = tmp_path / "engine"
    done = subprocess.run(
        [sys.executable, "-c", code, str(TINY_R1), str(output)], capture_output=True, text=True, check=True
    )
    peak = int(done.stdout.split("peak ")[1])
    assert told.ram_bytes / 3 < peak <= told.ram_bytes
    stored = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    assert stored <= told.disk_bytes


@pytest.mark.parametrize("name", ["r1-wint4", "r1-wint8", "r1-fp8", "v2-lite-wint4"])
def test_the_memory_of_a_thread_is_what_emission_reckons_with(name: str) -> None:
    recipe = load_recipe(name).override("cpu", 1)
    checkpoint, recipe = RandomWeights(layers=4).apply(recipe.model, recipe)
    jobs = plan_emission(gather(make_graphs(recipe, checkpoint)[0])).jobs
    one, two = (build_cost(checkpoint.spec, planned_weights(checkpoint.spec, recipe), 0, cores) for cores in (1, 2))
    assert two.ram_bytes - one.ram_bytes == max(map(memory_of, jobs)) + THREAD_BYTES


def test_passing_codes_through_costs_less_than_requantizing() -> None:
    costs = {name: make_plan(load_recipe(name)).build for name in ("r1-fp8", "r1-wint4", "r1-wint8-2node")}
    assert costs["r1-fp8"].seconds < min(costs["r1-wint8-2node"].seconds, costs["r1-wint4"].seconds)
    assert all(cost.read_bytes == costs["r1-fp8"].read_bytes for cost in costs.values())
    one, two = (build_cost(R1, planned_weights(R1, load_recipe("r1-wint4")), 0, cores) for cores in (1, 2))
    assert one.seconds == pytest.approx(2 * two.seconds)
    assert one.ram_bytes < two.ram_bytes


# -- the command


def test_exit_code_1_where_a_named_gpu_is_too_small() -> None:
    assert run("v2-lite-wint4", "--gpu", "h200").exit_code == 0
    result = run("r1-wint4", "--gpu", "h100", "--gpu", "A100-40", "--json")
    assert result.exit_code == 1
    data = json.loads(result.output)
    assert [entry["fits"] for entry in data["gpus"]] == [True, False]
    assert data["gpus"][1]["reasons"] == ["an engine for sm_90a does not run on it: --target sm_80"]


def test_an_unknown_gpu() -> None:
    result = run("r1-wint4", "--gpu", "h20o")
    assert result.exit_code == 2
    assert "unknown GPU h20o" in result.output


def test_what_it_prints() -> None:
    output = run("r1-wint4", "--gpu", "h200", "--gpu", "h100").output
    for part in (
        "362.73 GB",
        "688.57 GB",
        "71,424 bytes = 70,272 main + 1,152 mtp",
        "wint4:128",
        "256 sequences, 18,073 cache blocks, 8,192 tokens a step, kept in the engine for H200",
        "81 sequences, 5,230 cache blocks, 8,192 tokens a step",
        "try: in the recipe limits: {batch_tokens: 16384, sequences: 256, context_tokens: 32768}, which serves better "
        "with 17,590 cache blocks on H200",
        "predicted on 8 x H200, from kernels measured on ",
        "what 8 ranks exchange is left out: it was not measured among so many",
        "no rates are predicted for H100 80 GB: no kernels were measured there",
    ):
        assert part in output, output
    assert re.search(r"decode +64 of 4,096 +[\d.]+ +[\d,]+ +\d+", output), output
    assert re.search(r"prefill +2 of 4,096 +[\d.]+ +[\d,]+", output), output


def test_the_example_in_the_readme() -> None:
    """Every line of it is one that the command prints, but for the shortening."""
    example = (ROOT / "README.md").read_text(encoding="utf-8").split("$ dsc plan v2-lite-wint4 --gpu h200")[1]
    lines = [line for line in example.split("\n\nRates are")[0].splitlines()[1:] if line.strip()]
    printed = {" ".join(line.split()) for line in run("v2-lite-wint4", "--gpu", "h200").output.splitlines()}
    assert len(lines) > 8
    assert [line for line in lines if " ".join(line.split()) not in printed] == []


def test_rates_as_json() -> None:
    data = json.loads(run("v2-lite-wint4", "--gpu", "h200", "--gpu", "h20", "--json").output)
    predicted, none = data["rates"]
    assert [rate["batch"] for rate in predicted["decode"]] == [1, 16, 64, 128, 256]
    for rate in predicted["decode"]:
        assert rate["tokens_per_s"] == pytest.approx(rate["batch"] / rate["seconds"], rel=1e-3)
    seconds = [rate["seconds"] for rate in predicted["decode"]]
    assert seconds == sorted(seconds)
    assert predicted["prefill"]["tokens_per_s"] == pytest.approx(8192 / predicted["prefill"]["seconds"], rel=1e-3)
    assert (none["decode"], none["prefill"], none["why_none"]) == ([], None, "no kernels were measured there")
    assert data["serving"]["gpu"] == "h200"
    assert data["serving"] == {"gpu": "h200", **data["gpus"][0]["serving"]}


def test_a_folder_of_config_and_index_alone(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "whole", "r1")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        (bare / name).write_text((whole / name).read_text())
    recipe = load_recipe("r1-fp8").override(ranks=1)
    plan = make_plan(recipe, str(bare))
    assert plan.source.read_from == "config.json and index"
    full = make_plan(recipe, str(whole))
    assert full.source.read_from == "headers of 3 files"
    assert plan.weights == full.weights
    index = json.loads((bare / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.1.self_attn.indexer.weight"] = "model-00001-of-00003.safetensors"
    del index["weight_map"]["model.norm.weight"]
    (bare / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DscError) as raised:
        make_plan(recipe, str(bare))
    assert "model.layers.1.self_attn.indexer.weight is unknown" in raised.value.text()
    assert "1 of" in raised.value.text()
    assert "model.norm.weight" in raised.value.text()


def test_a_download_that_is_not_complete(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "whole", "r1")
    (whole / "model-00002-of-00003.safetensors").unlink()
    plan = make_plan(load_recipe("r1-fp8").override(ranks=1), str(whole))
    assert "1 of 3 files are not here yet" in plan.notes


def test_a_model_that_is_not_here() -> None:
    with pytest.raises(DscError) as raised:
        make_plan(load_recipe("kimi-k2-wint4"), "moonshotai/Kimi-K9")
    assert "hf download moonshotai/Kimi-K9 config.json model.safetensors.index.json" in raised.value.try_


def test_recipe_and_model_must_fit() -> None:
    result = run("r1-wint4", "--model", "deepseek-ai/DeepSeek-V2-Lite", "--ranks", "1")
    assert result.exit_code == 2
    assert "mtp is enabled and the checkpoint has no MTP layer" in result.output
