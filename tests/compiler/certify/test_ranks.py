"""`dsc verify` of an engine of several ranks: all of them run, as threads, a layer at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.damage import change_tensor, double_at, rehash
from support.engines import TINY_R1

from dsc.compiler.build import compile_engine
from dsc.compiler.certify.certify import open_checkpoint, verify_engine
from dsc.compiler.certify.device import open_device
from dsc.compiler.certify.numerics import measure
from dsc.compiler.certify.text import read_windows
from dsc.compiler.recipe import load_recipe, recipe_from_json
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.certificate import Certificate
from dsc.runtime.errors import DscError

WINDOWS = {"windows": 1, "window_tokens": 96}
SCALES = "model.layers.2.mlp.experts.down_proj.scales"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    folder = tmp_path_factory.mktemp("engines")

    def compile_for(name: str, ranks: int) -> Path:
        recipe = load_recipe(f"tiny-r1-{name}").override(ranks=ranks)
        return compile_engine(recipe, model=str(TINY_R1), output=folder / f"{name}-{ranks}.engine").folder

    return cache(compile_for)


@pytest.fixture(scope="module")
def certify(build: Callable[[str, int], Path]) -> Callable[[str, int], Certificate]:
    return cache(lambda name, ranks: verify_engine(build(name, ranks), str(TINY_R1), **WINDOWS))


@pytest.mark.parametrize(("name", "ranks", "ratio"), [("fp32", 2, 1.5), ("fp32", 4, 1.5), ("wint8", 2, 1.1)])
def test_layers_are_as_near_as_on_one_rank(
    name: str, ranks: int, ratio: float, certify: Callable[[str, int], Certificate]
) -> None:
    # Partial sums are rounded to bf16 before they are added up: a little more than on one rank.
    alone, together = certify(name, 1), certify(name, ranks)
    assert together.end_to_end.top1 >= alone.end_to_end.top1 - 0.02
    for one, several in zip(alone.layers, together.layers, strict=True):
        assert (several.model, several.layer) == (one.model, one.layer)
        assert 0 < several.alone.relative_error < ratio * one.alone.relative_error + 1e-6, several.layer


def test_damage_shows_in_its_layer(build: Callable[[str, int], Path], tmp_path: Path) -> None:
    """Scales of the second rank's experts, told as if they had been built so: the checkpoint names them, numerics the layer."""
    path = Path(shutil.copytree(build("wint8", 2), tmp_path / "damaged"))
    half = EngineFolder.open(path).manifest.tensors[SCALES].shape[0] // 2
    change_tensor(path, SCALES, double_at(half))
    rehash(path)
    with pytest.raises(DscError, match="1 tensors are not what the recipe makes") as raised:
        verify_engine(path, str(TINY_R1), **WINDOWS)
    assert SCALES in raised.value.text()
    errors = {}
    for name, engine in (("whole", build("wint8", 2)), ("damaged", path)):
        folder = EngineFolder.open(engine)
        recipe = recipe_from_json(folder.manifest.recipe, str(engine))
        checkpoint = open_checkpoint(folder, recipe, str(TINY_R1))
        tokens, _ = read_windows(folder, None, 1, 96)
        layers = measure(folder, recipe, checkpoint, tokens, *open_device(folder, None)).layers
        errors[name] = {layer.layer: layer.alone.relative_error for layer in layers}
    worse = [layer for layer in errors["whole"] if errors["damaged"][layer] > 1.5 * errors["whole"][layer]]
    assert worse == [2]


def test_one_gpu_is_not_all_ranks(build: Callable[[str, int], Path]) -> None:
    with pytest.raises(DscError, match="ranks of an engine are verified on the CPU"):
        verify_engine(build("fp32", 2), str(TINY_R1), device="cuda")
