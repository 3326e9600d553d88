"""What an engine's server starts with: within the recipe's limits and the GPU's memory, kept in the manifest."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.engines import ROOT, TINY_R1

from dsc.compiler import build
from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.model_shapes import read_shape
from dsc.compiler.planning.capacity import Settings, step_memory
from dsc.compiler.planning.gpus import GPUS, default_gpu
from dsc.compiler.planning.plan import limits_to_try, make_plan
from dsc.compiler.planning.serving import SEQUENCE_TOKENS, serving_settings
from dsc.compiler.recipe import load_recipe
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.manifest import Limits

R1 = read_shape("deepseek-ai/DeepSeek-R1")[0]
V2_LITE = read_shape("deepseek-ai/DeepSeek-V2-Lite")[0]
# Recipes for GPUs whose model's config comes with dsc: Kimi-K2's does not.
PACKAGED = sorted({file.stem for file in (ROOT / "recipes").glob("[!t]*.yaml")} - {"kimi-k2-wint4"})


@pytest.mark.parametrize("gpu", [None, "h200", "h100", "h20"])
def test_settings_fit_on_the_gpu_that_is_meant(gpu: str | None) -> None:
    recipe = replace(load_recipe("r1-wint4"), gpu=gpu)
    found = serving_settings(R1, recipe)
    assert found is not None
    assert found.gpu == (gpu or "h200")
    plan = make_plan(recipe, gpus=[found.gpu])
    (fit,) = plan.fits
    assert plan.serving == found
    assert fit.serving is not None
    assert (found.sequences, found.batch_tokens) == (fit.serving.sequences, recipe.limits.batch_tokens)
    held = found.cache_blocks * recipe.kv_cache.block_tokens
    assert found.sequences == min(recipe.limits.sequences, held // SEQUENCE_TOKENS)
    step = step_memory(R1, recipe, Mesh(8, 8), recipe.limits.batch_tokens, recipe.limits.sequences).total
    assert fit.weight_bytes + step + held * sum(plan.token_bytes.values()) <= GPUS[found.gpu].memory_bytes * 0.9


@pytest.mark.parametrize("name", PACKAGED)
def test_nothing_within_the_limits_is_better(name: str) -> None:
    """Every pair within the limits beside the memory that the engine takes; what `dsc plan` prints is what is kept."""
    recipe = load_recipe(name)
    plan = make_plan(recipe)
    assert plan.serving is not None
    (kept,) = (item for item in plan.fits if item.gpu.name == plan.serving.gpu)
    assert kept.serving == Settings(plan.serving.batch_tokens, plan.serving.sequences, plan.serving.cache_blocks)
    for item in plan.fits:
        if item.serving is not None:
            found = max(
                (sequences, batch_tokens)
                for batch_tokens in range(256, recipe.limits.batch_tokens + 1, 256)
                for sequences in range(1, min(batch_tokens, recipe.limits.sequences) + 1)
                if sequences * SEQUENCE_TOKENS <= item.cache_tokens
            )
            assert (item.serving.sequences, item.serving.batch_tokens) == found
            assert item.serving.cache_blocks * recipe.kv_cache.block_tokens == item.cache_tokens


@pytest.mark.parametrize("name", PACKAGED)
def test_an_engine_of_the_limits_to_try_serves_so(name: str) -> None:
    """And then nothing is left to try."""
    recipe = load_recipe(name)
    tried = 0
    for item in make_plan(recipe).fits:
        said = limits_to_try(recipe, item)
        assert (said is None) == (item.better is None)
        if item.better is None:
            continue
        tried += 1
        batch_tokens, sequences = item.better.batch_tokens, item.better.sequences
        assert said is not None
        assert said.startswith(
            f"limits: {{batch_tokens: {batch_tokens}, sequences: {sequences}, context_tokens: 32768}}"
        )
        assert (sequences == 256) == ("decode_buckets" not in said)
        limits = Limits(batch_tokens, sequences, recipe.limits.context_tokens)
        (then,) = make_plan(replace(recipe, limits=limits), gpus=[item.gpu.name]).fits
        assert then.serving == item.better
        assert then.better is None
        assert item.serving is not None
        assert (sequences, batch_tokens) > (item.serving.sequences, item.serving.batch_tokens)
    assert tried or name in ("r1-wint8-2node", "r1-wint4-a800", "r1-fp8", "r1-wint8")


def test_a_gpu_with_little_room_wants_smaller_steps() -> None:
    """R1 in FP8 on H20, contexts of 4096 tokens: steps twice as long leave room for 4 sequences, and none of 32768."""
    recipe = load_recipe("r1-fp8")
    assert not make_plan(recipe, gpus=["h20"]).fits[0].fits
    (item,) = make_plan(replace(recipe, limits=replace(recipe.limits, context_tokens=4096)), gpus=["h20"]).fits
    assert item.serving is not None
    assert item.better is not None
    assert (item.serving.sequences, item.better.sequences) == (4, 8)
    assert item.better.batch_tokens < item.serving.batch_tokens == 8192


def test_limits_bound_them() -> None:
    recipe = replace(load_recipe("v2-lite-wint4"), limits=Limits(512, 8, 2048))
    found = serving_settings(V2_LITE, recipe)
    assert found is not None
    assert (found.gpu, found.sequences, found.batch_tokens) == ("h200", 8, 512)


def test_nothing_is_suggested_for_cpus_and_where_it_does_not_fit() -> None:
    assert serving_settings(R1, load_recipe("r1-wint4").override("cpu")) is None
    assert serving_settings(R1, load_recipe("r1-wint4").override(ranks=1)) is None  # 363 GB
    assert default_gpu("cpu") is None
    assert [default_gpu(target) for target in ("sm_90a", "sm_80", "sm_100a")] == [
        GPUS["h200"],
        GPUS["a100"],
        GPUS["b200"],
    ]


def test_the_manifest_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("tiny-r1-wint4")
    plain = build.compile_engine(recipe, model=str(TINY_R1), output=tmp_path / "plain.engine")
    assert EngineFolder.open(plain.folder).manifest.serving is None
    for_gpu = recipe.override("sm_90a")  # whose kernels take minutes to build
    monkeypatch.setattr(build, "serving_settings", lambda spec, _: serving_settings(spec, for_gpu))
    told = build.compile_engine(recipe, model=str(TINY_R1), output=tmp_path / "told.engine")
    planned = make_plan(for_gpu, str(TINY_R1), gpus=["h200"])
    kept = EngineFolder.open(told.folder).manifest.serving
    assert kept is not None
    assert kept == planned.serving
    assert asdict(kept) == {"gpu": "h200", **planned.to_json()["gpus"][0]["serving"]}
