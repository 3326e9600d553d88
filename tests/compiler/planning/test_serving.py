"""What an engine's server starts with: within the recipe's limits and the GPU's memory, kept in the manifest."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import TINY_R1

from dsc.compiler import build
from dsc.compiler.model_shapes import read_shape
from dsc.compiler.planning.capacity import step_memory
from dsc.compiler.planning.gpus import GPUS, default_gpu
from dsc.compiler.planning.plan import make_plan
from dsc.compiler.planning.serving import SEQUENCE_TOKENS, serving_settings
from dsc.compiler.planning.sharding import Mesh
from dsc.compiler.recipe import load_recipe
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.manifest import Limits, Serving

R1 = read_shape("deepseek-ai/DeepSeek-R1")[0]
V2_LITE = read_shape("deepseek-ai/DeepSeek-V2-Lite")[0]


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
    wanted = Serving("h200", 3, 5, 7)
    monkeypatch.setattr(build, "serving_settings", lambda spec, recipe: wanted)
    told = build.compile_engine(recipe, model=str(TINY_R1), output=tmp_path / "told.engine")
    assert EngineFolder.open(told.folder).manifest.serving == wanted
