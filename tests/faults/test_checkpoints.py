"""Folders that are no whole checkpoint, configs that contradict themselves: exit code 2, everything wrong at once, before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.builds import edit_json, hashes, refusal
from support.engines import TINY_R1
from support.families import YARN, change_config, change_tensors, make_checkpoint

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 5234139343\n"
Damage = Callable[[Path], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "r1", num_hidden_layers=2)


def told(model: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `dsc compile` says of a damaged checkpoint. It must have written nothing, not even an empty folder."""
    monkeypatch.chdir(model.parent)
    before = hashes(model.parent)

    def work(*_: object, **__: object) -> None:
        pytest.fail("work began on a checkpoint that cannot be used")

    monkeypatch.setattr("dsc.compiler.build.make_graphs", work)
    text = refusal("compile", "--recipe", "tiny-r1-wint4", "--model", model, "--output", "new/x.engine", "--dump", "d")
    assert hashes(model.parent) == before
    assert {path.name for path in model.parent.iterdir()} == {"model"}
    return text


def _unlink(*names: str) -> Damage:
    return lambda model: [(model / name).unlink() for name in names] and None


def _write(name: str, content: bytes) -> Damage:
    return lambda model: (model / name).write_bytes(content) and None


def _cut(name: str, keep: int) -> Damage:
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:keep]) and None


def _together(*damages: Damage) -> Damage:
    return lambda model: [damage(model) for damage in damages] and None


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (_unlink(SHARDS[1]), [f"{SHARDS[1]}: is missing", "model.layers."]),
        (_unlink(*SHARDS), [f"{name}: is missing" for name in SHARDS]),
        (_unlink(INDEX, SHARDS[2]), [f"{SHARDS[2]}: is missing", "tensors are missing"]),
        (_unlink(INDEX, *SHARDS), ["no weights"]),
        (_cut(SHARDS[0], -1), [f"{SHARDS[0]}: is cut short"]),
        (_cut(SHARDS[0], 5000), [f"{SHARDS[0]}: is cut short"]),
        (_cut(SHARDS[2], 3), [f"{SHARDS[2]}: is not a safetensors file"]),
        (_write(SHARDS[0], b""), [f"{SHARDS[0]}: ", "safetensors"]),
        (_write(SHARDS[2], POINTER), [f"{SHARDS[2]}: is a git-lfs pointer", "git lfs pull"]),
        (_write(INDEX, POINTER), [f"{INDEX}: "]),
        (_write(INDEX, b"{"), [f"{INDEX}: "]),
        (_write("config.json", POINTER), ["config.json: "]),
        (
            _together(_unlink(SHARDS[0]), _write(SHARDS[1], POINTER), _cut(SHARDS[2], -7)),
            [f"{SHARDS[0]}: is missing", f"{SHARDS[1]}: is a git-lfs pointer", f"{SHARDS[2]}: is cut short"],
        ),
        (_unlink("config.json"), ["config.json: not found"]),
    ],
)
def test_every_missing_file_and_tensor_is_named(
    damage: Damage, wanted: list[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(model)
    text = told(model, monkeypatch)
    for piece in wanted:
        assert piece in text, text


def test_unknown_tensors_are_named_with_the_nearest_known_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.3.gate_porj.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(2)

    change_tensors(model, change)
    text = told(model, monkeypatch)
    assert "model.layers.1.mlp.experts.3.gate_porj.weight" in text
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in text
    assert "model.layers.0.self_attn.q_proj.bias" in text


@pytest.mark.parametrize("method", ["bitsandbytes", "modelopt", "mxfp4", "fp6", "exl3", None])
def test_unknown_quant_methods_are_named_with_the_nearest_known_one(
    method: str | None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_config(model, quantization_config={"quant_method": method, "bits": 4})
    text = told(model, monkeypatch)
    assert f"quant_method {json.dumps(method)} is unknown" in text
    assert "nearest" in text


def test_faults_of_a_config_are_one_line_each_and_all_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yarn = {**YARN, "factor": "40"}
    del yarn["original_max_position_embeddings"]
    change_config(model, rope_scaling=yarn, first_k_dense_replace=9, topk_group=5, n_routed_experts=18)
    lines = told(model, monkeypatch).strip().splitlines()
    assert "5 faults" in lines[0]
    assert len(lines) == 6
    for piece in (
        "factor is",
        "original_max_position_embeddings is missing",
        "first_k_dense_replace 9",
        "topk_group 5",
        "18",
    ):
        assert sum(piece in line for line in lines[1:]) == 1, piece


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", POINTER, b"[]", b"\xff\xfe"])
def test_broken_files_beside_the_weights_are_told_at_the_build(
    file: str, content: bytes, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the engine is loaded, perhaps on another machine."""
    (model / file).write_bytes(content)
    assert f"{file}: " in told(model, monkeypatch)


def test_a_tokenizer_that_ends_the_process_it_is_read_in(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tokenizers 0.23.3 panics while it unwinds; the build says so and lives on."""
    tokenizer = json.loads((TINY_R1 / "tokenizer.json").read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "0"
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = told(model, monkeypatch)
    for part in ("tokenizer.json: is not a tokenizer", "it ends the process with SIGABRT", "download it again"):
        assert part in message


def test_a_config_of_another_file_type(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "config.json").write_bytes(b"\x80\x02}q\x00.")
    assert "config.json: " in told(model, monkeypatch)
    edit_index = {"weight_map": {"a": "../../etc/passwd"}}
    make_checkpoint(model, "r1", num_hidden_layers=2)
    edit_json(model / INDEX, **edit_index)
    assert "a .safetensors file beside the index" in told(model, monkeypatch)
