"""`dsc diff`: nothing of the same engine, everything of two that are not, and the exit code for CI."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.damage import change_tensor, double_at, rehash
from support.engines import ROOT, TINY_R1, compile_tiny

from dsc.compiler.build import compile_engine
from dsc.compiler.certify.certify import verify_engine
from dsc.compiler.cli import main
from dsc.compiler.recipe import parse_recipe
from dsc.plugins.formats import parse_format
from dsc.plugins.stored import StoredWeight
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.diff import diff, weights_of

EXPERTS = "model.layers.2.mlp.experts.down_proj"
LISTS = ("spec", "recipe", "toolchain", "fusion", "tensors", "kernels", "files", "certificate")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("engines")
    return cache(lambda name: compile_tiny(f"tiny-r1-{name}", folder))


def compare(a: Path, b: Path) -> dict:
    return diff(EngineFolder.open(a), EngineFolder.open(b))


def test_an_engine_and_its_copy(build: Callable[[str], Path], tmp_path: Path) -> None:
    copy = shutil.copytree(build("wint4"), tmp_path / "copy")
    found = compare(build("wint4"), copy)
    assert found["same"]
    assert {key: found[key] for key in LISTS} == {key: [] for key in LISTS}
    result = CliRunner().invoke(main, ["diff", str(build("wint4")), str(copy)])
    assert result.exit_code == 0
    assert result.output.startswith("the same engine")


def test_one_doubled_scale(build: Callable[[str], Path], tmp_path: Path) -> None:
    """The weight, its formats, the change and where it is."""
    other = Path(shutil.copytree(build("wint4"), tmp_path / "other"))
    change_tensor(other, f"{EXPERTS}.scales", double_at(5, 9, 0))
    rehash(other)
    found = compare(build("wint4"), other)
    assert not found["same"]
    assert {key: found[key] for key in LISTS if key not in ("tensors",)} == {k: [] for k in LISTS if k != "tensors"}
    (row,) = found["tensors"]
    folder = EngineFolder.open(build("wint4"))
    values = StoredWeight(
        parse_format("wint4:128"), folder.tensor(f"{EXPERTS}.packed"), folder.tensor(f"{EXPERTS}.scales")
    )
    whole = values.dequantize().double()
    changed = whole[5, 9, :128]
    column = int(changed.abs().argmax())
    assert row["weight"] == f"{EXPERTS}.weight"
    assert (row["a"], row["b"]) == ("wint4:128", "wint4:128")
    assert row["largest"] == pytest.approx(float(changed.abs().max()), rel=1e-5)
    assert row["relative"] == pytest.approx(float((changed.square().sum() / whole.square().sum()).sqrt()), rel=1e-5)
    assert row["at"] == str([5, 9, column])
    result = CliRunner().invoke(main, ["diff", str(build("wint4")), str(other), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["tensors"] == [row]


def test_two_recipes(build: Callable[[str], Path]) -> None:
    found = compare(build("wint4"), build("wint8"))
    assert found["spec"] == found["toolchain"] == found["fusion"] == []
    keys = {row["key"]: (row["a"], row["b"]) for row in found["recipe"]}
    assert keys["name"] == ("tiny-r1-wint4", "tiny-r1-wint8")
    assert any(
        key.endswith("quantize_weights.default.format") and pair == ("wint4", "wint8") for key, pair in keys.items()
    )
    rows = {row["weight"]: row for row in found["tensors"]}
    experts = rows[f"{EXPERTS}.weight"]
    assert (experts["a"], experts["b"]) == ("wint4:128", "wint8")
    assert 0.01 < experts["relative"] < 0.2
    assert experts["bytes_a"] < experts["bytes_b"]
    assert "model.norm.weight" not in rows
    assert "main.prefill.rank0.onnx" in found["files"]


@pytest.mark.parametrize(("a", "b"), [("fp32", "fp8"), ("fp8", "bf16"), ("bf16", "wint4")])
def test_the_change_of_every_format(a: str, b: str, build: Callable[[str], Path]) -> None:
    """Against the values of both weights as a whole, for a matrix, a stack and a matrix whose blocks are partial."""
    folders = [EngineFolder.open(build(name)) for name in (a, b)]
    rows = {row["weight"]: row for row in diff(*folders)["tensors"]}
    for name in (
        f"{EXPERTS}.weight",
        "model.layers.1.self_attn.qkv_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ):
        before, after = (weights_of(folder)[name].stored().dequantize().double() for folder in folders)
        change = (after - before).abs()
        if not change.any():
            assert rows[name]["largest"] == 0
            continue
        assert rows[name]["largest"] == pytest.approx(float(change.max()), rel=1e-5)
        relative = float((change.square().sum() / before.square().sum()).sqrt())
        assert rows[name]["relative"] == pytest.approx(relative, rel=1e-5)


def test_a_model_without_mtp(build: Callable[[str], Path], tmp_path: Path) -> None:
    text = (ROOT / "recipes" / "tiny-r1-wint4.yaml").read_text()
    text = text.replace("{enabled: true, drafts: 1}", "{enabled: false, drafts: 0}").replace("  - fuse_mtp_input\n", "")
    recipe = parse_recipe(text, "no-mtp.yaml", "tiny-r1-wint4")
    other = compile_engine(recipe, model=str(TINY_R1), output=tmp_path / "other").folder
    found = compare(build("wint4"), other)
    assert {"key": "num_mtp_layers", "a": 1, "b": 0} in found["spec"]
    assert {"pass": "fuse_mtp_input", "graph": "mtp.prefill", "a": 1, "b": None} in found["fusion"]
    rows = {row["weight"]: row for row in found["tensors"]}
    assert (rows["model.layers.4.eh_proj.weight"]["a"], rows["model.layers.4.eh_proj.weight"]["b"]) == ("bf16", "-")
    assert all(name.startswith("model.layers.4.") for name in rows)
    output = CliRunner().invoke(main, ["diff", str(build("wint4")), str(other)]).output
    assert "num_mtp_layers" in output


def test_certificates(tmp_path: Path) -> None:
    a, b = (compile_tiny("tiny-r1-wint8", tmp_path / name) for name in ("a", "b"))
    made = verify_engine(a, windows=1, window_tokens=24)
    found = compare(a, b)
    assert found["same"]
    rows = {row["key"]: row for row in found["certificate"]}
    assert rows["end_to_end.kl"] == {"key": "end_to_end.kl", "a": made.to_json()["end_to_end"]["kl"], "b": "-"}
    verify_engine(b, windows=1, window_tokens=24)
    assert compare(a, b)["certificate"] == []
    assert made.mtp is not None
    other = replace(
        made,
        end_to_end=replace(made.end_to_end, non_finite=7),
        stored=replace(made.stored, saturated=made.stored.saturated + 3),
        mtp=replace(made.mtp, reference=0.25),
    )
    other.write(b)
    assert compare(a, b)["certificate"] == [
        {"key": "end_to_end.non_finite", "a": 0, "b": 7},
        {"key": "stored.saturated", "a": made.stored.saturated, "b": made.stored.saturated + 3},
        {"key": "mtp.reference", "a": made.to_json()["mtp"]["reference"], "b": 0.25},
    ]
    replace(made, mtp=None).write(b)
    assert {row["key"]: row["b"] for row in compare(a, b)["certificate"]} == {"mtp.engine": "-", "mtp.reference": "-"}
    shown = CliRunner().invoke(main, ["diff", str(a), str(b)])
    assert shown.exit_code == 0  # the same engine, measured with and without its drafts
    assert "mtp.reference" in shown.output


def test_nan_is_the_largest_change(build: Callable[[str], Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(build("bf16"), tmp_path / "other"))

    def spoil(tensor: torch.Tensor) -> None:
        tensor[3, 4] = torch.nan

    change_tensor(other, "lm_head.weight", spoil)
    rehash(other)
    (row,) = compare(build("bf16"), other)["tensors"]
    assert row["at"] == "[3, 4]"
    assert row["largest"] != row["largest"]
