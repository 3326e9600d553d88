"""A damaged engine is caught and the damage named: by its hash, or, where hashes were made of the damage, by the checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.damage import change_tensor, double_at, flip_byte, rehash, swap_experts
from support.engines import TINY_R1, compile_tiny

from dsc.compiler.certify.certify import verify_engine
from dsc.compiler.cli import main
from dsc.runtime.errors import DscError

LAYER = "model.layers.2"
EXPERTS = f"{LAYER}.mlp.experts.down_proj"
# Recipe -> tensors whose bytes are damaged, of each kind that the recipe stores.
STORED = {
    "wint4": (f"{EXPERTS}.packed", f"{EXPERTS}.scales", f"{LAYER}.self_attn.qkv_proj.packed", "model.embed_tokens.weight"),
    "wint8": (f"{LAYER}.mlp.experts.up_proj.packed", f"{LAYER}.self_attn.o_proj.scales"),
    "fp8": (f"{LAYER}.mlp.experts.gate_proj.weight", f"{LAYER}.self_attn.qkv_proj.scales", f"{LAYER}.mlp.gate.weight"),
    "bf16": (f"{EXPERTS}.weight", "model.layers.4.eh_proj.weight", f"{LAYER}.mlp.gate.e_score_correction_bias"),
    "fp32": ("rope.cos", "lm_head.weight"),
}  # fmt: skip


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("engines")
    return cache(lambda name: compile_tiny(f"tiny-r1-{name}", folder))


@pytest.fixture
def damaged(build: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of an engine with one tensor changed; `hashed` as if that had happened while it was built."""

    def make(recipe: str, tensor: str, change: Callable[[torch.Tensor], None], hashed: bool) -> Path:
        engine = Path(shutil.copytree(build(recipe), tmp_path / "damaged"))
        change_tensor(engine, tensor, change)
        if hashed:
            rehash(engine)
        return engine

    return make


def verify(engine: Path) -> DscError:
    with pytest.raises(DscError) as raised:
        verify_engine(engine, str(TINY_R1), windows=1, window_tokens=32)
    assert not (engine / "local").exists()
    return raised.value


@pytest.mark.parametrize(("recipe", "tensor"), [(r, t) for r, tensors in STORED.items() for t in tensors])
def test_a_flipped_byte(recipe: str, tensor: str, damaged: Callable[..., Path]) -> None:
    engine = damaged(recipe, tensor, flip_byte(17), hashed=False)
    assert f"the bytes of {tensor} changed" in verify(engine).text()
    rehash(engine)
    told = verify(engine).text()
    assert "1 tensors are not what the recipe makes of the checkpoint" in told
    (line,) = [line for line in told.splitlines() if tensor in line]
    assert "1 rows differ" in line
    if "experts" in tensor:
        assert "expert 0, row " in line


def test_a_doubled_scale(damaged: Callable[..., Path]) -> None:
    tensor = f"{EXPERTS}.scales"
    engine = damaged("wint4", tensor, double_at(5, 9, 0), hashed=False)
    assert f"the bytes of {tensor} changed" in verify(engine).text()
    rehash(engine)
    assert f"{tensor}  expert 5, row 9, 1 rows differ" in verify(engine).text()


@pytest.mark.parametrize("recipe", ["wint4", "wint8", "fp8", "bf16"])
def test_swapped_experts(recipe: str, damaged: Callable[..., Path]) -> None:
    tensor = f"{EXPERTS}.{'packed' if recipe.startswith('w') else 'weight'}"
    engine = damaged(recipe, tensor, swap_experts(3, 11), hashed=False)
    assert f"the bytes of {tensor} changed" in verify(engine).text()
    rehash(engine)
    told = verify(engine).details
    assert [name for name, _ in told] == [tensor, tensor]
    assert told[0][1].startswith("expert 3, rows 0, 1")
    assert told[0][1].endswith("it holds what belongs to expert 11")
    assert told[1][1].endswith("it holds what belongs to expert 3")


def test_an_expert_in_anothers_place_too(damaged: Callable[..., Path]) -> None:
    def copy(tensor: torch.Tensor) -> None:
        tensor[7] = tensor[2]

    told = verify(damaged("wint4", f"{EXPERTS}.packed", copy, hashed=True)).details
    assert len(told) == 1
    assert told[0][1].startswith("expert 7, ")
    assert told[0][1].endswith("it holds what belongs to expert 2")


def test_several_at_once_are_all_named(damaged: Callable[..., Path]) -> None:
    engine = damaged("wint4", f"{EXPERTS}.packed", flip_byte(5), hashed=False)
    change_tensor(engine, "model.norm.weight", double_at(3))
    told = verify(engine).text()
    assert f"the bytes of {EXPERTS}.packed changed" in told
    assert "the bytes of model.norm.weight changed" in told
    rehash(engine)
    told = verify(engine).text()
    assert "2 tensors are not" in told
    assert f"{EXPERTS}.packed" in told
    assert "model.norm.weight" in told


def test_a_tensor_of_another_scheme(damaged: Callable[..., Path]) -> None:
    """The manifest says something else than its recipe."""
    engine = damaged("wint8", "model.norm.weight", double_at(0), hashed=False)
    path = engine / "manifest.json"
    manifest = json.loads(path.read_text())
    recipe = manifest["recipe"]["passes"]
    (options,) = [entry["quantize_weights"] for entry in recipe if "quantize_weights" in entry]
    options["kv_b"] = {"format": "fp8"}
    path.write_text(json.dumps(manifest))
    rehash(engine)
    told = verify(engine).text()
    assert "model.layers.0.self_attn.kv_b_proj.weight" in told
    assert "is missing" in told
    assert "is stored and not in the recipe's graphs" in told


def test_the_command(damaged: Callable[..., Path]) -> None:
    engine = damaged("wint4", f"{EXPERTS}.scales", double_at(5, 9, 0), hashed=True)
    result = CliRunner().invoke(main, ["verify", str(engine), "--against", str(TINY_R1)])
    assert result.exit_code == 2
    assert "expert 5, row 9" in result.output
