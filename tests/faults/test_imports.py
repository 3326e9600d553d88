"""Checkpoints that other tools have quantized: zero points honoured exactly, and every fault told before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.builds import dsc, hashes, recipe, refusal
from support.engines import Sequences, load_fp32, prompt_tokens
from support.families import ABSENT, change_config, change_tensors, make_checkpoint, read_tensors
from support.oracle import Oracle, worst_row_error
from support.packed import PackedCheckpoint, pack_checkpoint, quantization_of

from dsc import runtime
from dsc.compiler.build import compile_engine
from dsc.plugins.formats import parse_format
from dsc.plugins.stored import StoredWeight
from dsc.runtime.artifact import EngineFolder

LIMIT = 1e-4  # of the worst row, in float32
Pack = Callable[..., PackedCheckpoint]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A family's packed checkpoint, by its name, the method and pack_checkpoint's options; each is made once."""

    @cache
    def source(family: str) -> Path:
        folder = tmp_path_factory.mktemp("source") / family
        return make_checkpoint(folder, family, num_hidden_layers=2, quantization_config=ABSENT)

    @cache
    def made(family: str, method: str, **options: Any) -> PackedCheckpoint:
        return pack_checkpoint(tmp_path_factory.mktemp("packed") / "model", source(family), method, **options)

    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A packed checkpoint of the test's own, asymmetric."""
    source = make_checkpoint(tmp_path / "source", "r1", num_hidden_layers=2, quantization_config=ABSENT)
    return pack_checkpoint(tmp_path / "own" / "model", source, "awq", group=64).folder


def only_experts(module: str) -> bool:
    return ".experts." in module


def all_but_kv_a(module: str) -> bool:
    return not module.endswith("kv_a_proj_with_mqa")


# -- the same model


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("r1", "awq", {"group": 64}),
        ("faults", "awq", {"group": 32}),
        ("v2-lite", "gptq", {"group": 128}),
        ("r1", "gptq", {"group": 64, "bits": 8}),
        ("faults", "gptq_v2", {"group": 64, "symmetric": True}),
        ("k2", "compressed-tensors", {"group": 32, "symmetric": True, "packs": only_experts, "floats": torch.bfloat16}),
        ("faults", "compressed-tensors", {"group": -1, "bits": 8}),
        ("r1", "compressed-tensors", {"group": 64, "packs": all_but_kv_a}),
    ],
)
def test_an_engine_equals_transformers_on_the_dequantized_weights(
    family: str, method: str, options: dict[str, Any], packs: Pack, tmp_path: Path
) -> None:
    made = packs(family, method, **options)
    mtp = any(name.endswith(".eh_proj.weight") for name in read_tensors(made.folder))
    engine = load_fp32(made.folder, tmp_path, mtp=mtp)
    (text,) = prompt_tokens(1, 70, engine.spec.vocab_size)
    wanted, hidden = (oracle := Oracle(made.twin, tmp_path / "float32")).main(text)
    assert worst_row_error(Sequences(engine, [text]).step([70], "prefill")[0], wanted) < LIMIT
    steps = Sequences(engine, [text])
    mixed = torch.cat([steps.step([66], "prefill")[0], steps.step([2], "decode")[0], steps.step([2], "decode")[0]])
    assert worst_row_error(mixed, wanted) < LIMIT
    if mtp:
        draft = engine.draft([text])[0]
        assert draft.drafts[0] == int(oracle.mtp([*text[1:], draft.token], hidden)[0][-1].argmax())


@pytest.mark.parametrize("kind", ["bf16", "fp8", "wint8", "wint4"])
def test_absorbed_from_a_packed_kv_b_equals_expanded_and_the_dequantized_values(
    kind: str, packs: Pack, tmp_path: Path
) -> None:
    """As test_weights.py has it of FP8: nothing but kv_b is not float32."""
    made = packs("r1", "awq", group=64)
    formats = {"fp8": "{format: fp8, block: [128, 128]}", "wint4": "{format: wint4, group: 64}"}
    plain = "default: {format: fp32}\nembeddings: {format: fp32}\nlm_head: {format: fp32}\n"
    text = f"{plain}kv_b: {formats.get(kind, f'{{format: {kind}}}')}"
    built = compile_engine(recipe(text), model=str(made.folder), output=tmp_path / "test.engine")
    engine, folder, oracle = (
        runtime.load(built.folder),
        EngineFolder.open(built.folder),
        Oracle(made.twin, tmp_path / "f"),
    )
    for layer, module in enumerate(oracle.model.model.layers):
        name = f"model.layers.{layer}.self_attn.kv_b_proj"
        values = stored_weight(folder, name).dequantize()
        error = worst_row_error(values, made.modules[name].values())
        assert 0 < error < {"bf16": 4e-3, "fp8": 0.05, "wint8": 0.02, "wint4": 0.2}[kind]
        module.self_attn.kv_b_proj.weight.data = values
    (tokens,) = prompt_tokens(1, 40, engine.spec.vocab_size)
    wanted, _ = oracle.main(tokens)
    steps = Sequences(engine, [tokens])
    absorbed = torch.cat([steps.step([count], "decode")[0] for count in (2, 1, 2)])
    assert worst_row_error(absorbed, wanted[:5]) < LIMIT
    assert worst_row_error(Sequences(engine, [tokens]).step([40], "prefill")[0], wanted) < LIMIT


def stored_weight(folder: EngineFolder, name: str) -> StoredWeight:
    """A weight as the engine has it."""
    entries = {n: e for n, e in folder.manifest.tensors.items() if n.rsplit(".", 1)[0] == name}
    parts = {entry.part: folder.tensor(n) for n, entry in entries.items()}
    (format_,) = {entry.format for entry in entries.values()}
    return StoredWeight(parse_format(format_), parts["data"], parts.get("scales"))


@pytest.mark.parametrize(
    "formats",
    [
        "default: {format: wint4, groups: [128, 64, 32]}",
        "default: {format: wint8}",
        "default: {format: fp8, block: [128, 128]}",
        "default: {format: bf16}",
    ],
)
@pytest.mark.parametrize(("method", "bits"), [("awq", 4), ("gptq", 4), ("gptq", 8), ("compressed-tensors", 4)])
def test_zero_points_are_honoured_exactly_in_every_format(
    method: str, bits: int, formats: str, packs: Pack, tmp_path: Path
) -> None:
    """Stored byte for byte as what the values themselves, in float32, are quantized to."""
    made = packs("r1", method, group=64, bits=bits)
    assert any(len(module.zeros.unique()) > 3 for module in made.modules.values())
    engines = []
    for name, source in (("packed", made.folder), ("floats", made.twin)):
        built = compile_engine(
            recipe(formats, activations="bf16"), model=str(source), output=tmp_path / f"{name}.engine"
        )
        engines.append(EngineFolder.open(built.folder))
    packed, floats = (
        {name: entry.sha256 for name, entry in engine.manifest.tensors.items() if entry.format not in ("", "fp32")}
        for engine in engines
    )
    assert len(packed) > 20
    assert packed == floats
    verdicts = {
        record["verdict"]
        for record in engines[0].report["weights"]
        if record["weight_class"] in ("experts", "attention", "kv_b")
    }
    assert verdicts == {"rounded" if "bf16" in formats else "requantized"}


def test_what_is_passed_is_reported_and_verified(packs: Pack, tmp_path: Path) -> None:
    """As Kimi-K2-Thinking is stored: experts of 4 bits in groups of 32, the rest in bfloat16."""
    options = {"group": 32, "symmetric": True, "packs": only_experts, "floats": torch.bfloat16}
    made = packs("k2", "compressed-tensors", scale_dtype=torch.bfloat16, **options)
    formats = "experts: {format: wint4, group: 32}\ndefault: {format: bf16}"
    built = compile_engine(
        recipe(formats, mtp=False, activations="bf16"), model=str(made.folder), output=tmp_path / "test.engine"
    )
    folder = EngineFolder.open(built.folder)
    records = {record["name"]: record for record in folder.report["weights"]}
    for part in ("gate", "up", "down"):
        name = f"model.layers.1.mlp.experts.{part}_proj"
        record = records[f"{name}.weight"]
        assert (record["verdict"], record["relative_error"]) == ("passed", 0)
        assert record["grids"] == {"of the source": 12}
        stored = stored_weight(folder, name)
        for expert in range(12):
            module = made.modules[f"model.layers.1.mlp.experts.{expert}.{part}_proj"]
            assert torch.equal(stored[expert].dequantize(), module.values())
            assert stored.scales is not None
            assert torch.equal(stored.scales[expert], module.scales)
    consumed = set(folder.report["ledger"]["consumed"]["tensors"])
    assert {f"{name}.{end}" for name in made.modules for end in ("weight_packed", "weight_scale")} <= consumed
    said = dsc("explain", built.folder, "model.layers.1.mlp.experts.up_proj.weight").stdout
    assert "passed" in said
    assert "codes of the source" in said
    result = dsc("verify", built.folder, "--against", made.folder)
    assert result.exit_code == 0, result.output


def test_codes_that_a_recipe_rounds_again_are_told(packs: Pack, tmp_path: Path) -> None:
    options = {"group": 32, "symmetric": True, "packs": only_experts, "floats": torch.bfloat16}
    made = packs("k2", "compressed-tensors", scale_dtype=torch.bfloat16, **options)
    text = recipe("experts: {format: wint4, group: 64}\ndefault: {format: bf16}", mtp=False, activations="bf16")
    built = compile_engine(text, model=str(made.folder), output=tmp_path / "test.engine")
    told = [note for note in built.notes if "symmetric 4-bit codes in groups of 32 are rounded again" in note]
    assert len(told) == 3  # gate, up, down
    assert all("groups of 32 keep them" in note for note in told)


def test_attention_of_two_schemes_is_not_joined_and_that_is_told(packs: Pack, tmp_path: Path) -> None:
    made = packs("r1", "compressed-tensors", group=64, packs=all_but_kv_a)
    built = compile_engine(recipe(), model=str(made.folder), output=tmp_path / "test.engine")
    (note,) = {note.partition(": q and")[2] for note in built.notes if note.startswith("fuse_qkv")}
    assert note == " kv_a stay two weights: q is stored as 4-bit codes in groups of 64 and kv_a as float16, 3 nodes"


# -- faults


def told(model: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool = False) -> str:
    """What `dsc compile` says; no weight was converted and nothing written."""
    monkeypatch.chdir(model.parent)
    before = hashes(model.parent)

    def work(*_: object, **__: object) -> None:
        pytest.fail("work began on a checkpoint that cannot be used")

    monkeypatch.setattr("dsc.compiler.build.emit" if graphs else "dsc.compiler.build.make_graphs", work)
    text = refusal("compile", "--recipe", "tiny-r1-wint4", "--model", model, "--output", "new/x.engine")
    assert hashes(model.parent) == before
    return text


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"bits": 3}, "quantization_config.bits is 3, wanted 4"),
        ({"version": "marlin"}, 'quantization_config.version is "marlin", wanted "gemm"'),
        ({"quant_method": "gptq", "version": None, "desc_act": True}, "desc_act is true, wanted false"),
        ({"quant_method": "gptq", "version": None, "bits": 2}, "quantization_config.bits is 2, wanted 4 or 8"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, 'wanted "pack-quantized"'),
        ({"quant_method": "awqq"}, 'quant_method "awqq" is unknown, nearest known "awq"'),
        ({"group_size": 128}, "tensors do not fit config.json"),
        ({"quant_method": "gptq", "version": None, "zero_point": None}, "tensors do not fit config.json"),
    ],
)
def test_what_is_not_built_or_does_not_fit_is_told(
    changes: dict[str, Any], wanted: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_config(model, quantization_config={**quantization_of(model), **changes})
    assert wanted in told(model, monkeypatch)


def test_a_missing_partner_and_a_cut_shard_are_named_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{name}.qzeros"]
        del tensors["model.layers.0.self_attn.kv_b_proj.scales"]
        tensors["model.layers.0.self_attn.o_proj.qweight"] = torch.zeros(3, 4, dtype=torch.int32)

    change_tensors(model, change)
    text = told(model, monkeypatch)
    for wanted in (
        f"{name}.qzeros",
        "model.layers.0.self_attn.kv_b_proj.scales",
        "model.layers.0.self_attn.o_proj.qweight does not fit config.json",
        "int32 [3, 4]",
    ):
        assert wanted in text
    shard = model / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard.name}: is cut short" in told(model, monkeypatch)


def test_an_mtp_layer_that_the_tool_left_out_is_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers does not load it, so tools do not store it, and config.json declares it all the same."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    change_tensors(model, change)
    text = told(model, monkeypatch)
    assert "config.json declares 1 MTP layer" in text
    assert "mtp: {enabled: false} in the recipe" in text


def test_columns_out_of_the_order_of_their_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "source", "r1", num_hidden_layers=2, quantization_config=ABSENT)
    model = pack_checkpoint(tmp_path / "own" / "model", source, "gptq", group=64).folder
    name = "model.layers.1.mlp.experts.3.up_proj.g_idx"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][70] = 0

    change_tensors(model, change)
    text = told(model, monkeypatch, graphs=True)
    assert f"{name}: columns are not in the order of their groups" in text
    assert "column 70 in group 1" in text


# -- plans


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("awq", {"group": 64}),
        ("gptq", {"group": 32, "bits": 8}),
        ("compressed-tensors", {"group": 32, "symmetric": True}),
    ],
)
def test_a_plan_from_config_alone(method: str, options: dict[str, Any], packs: Pack, tmp_path: Path) -> None:
    """Bytes to the byte where all is packed, and what config.json does not tell is said."""
    made = packs("r1", method, **options)
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "config.json").write_text((made.folder / "config.json").read_text())
    plan = json.loads(dsc("plan", "tiny-r1-wint4", "--model", folder / "config.json", "--json").stdout)
    stored = sum(tensor.nbytes for tensor in read_tensors(made.folder).values())
    assert plan["source"] == {"bytes": stored, "read_from": "config.json"}
    assert any("which ones are, and whether an MTP layer is there, the tensors' names tell" in n for n in plan["notes"])
    whole = json.loads(dsc("plan", "tiny-r1-wint4", "--model", made.folder, "--json").stdout)
    assert whole["source"]["read_from"] == "headers of 3 files"
    assert whole["notes"] == [note for note in plan["notes"] if "the tensors' names tell" not in note]
    assert whole["weights"] == plan["weights"]
    built = compile_engine(
        recipe("experts: {format: wint4, group: 128}\ndefault: {format: fp8, block: [128, 128]}"),
        model=str(made.folder),
        output=tmp_path / "test.engine",
    )
    assert built.folder.is_dir()


def test_random_weights_of_a_packed_models_shape(packs: Pack, tmp_path: Path) -> None:
    """Nothing is read, so nothing is packed."""
    made = packs("r1", "awq", group=64)
    result = dsc(
        "compile", "--recipe", "tiny-r1-wint4", "--model", made.folder, "--weights", "random", "--output", tmp_path / "e"
    )  # fmt: skip
    assert result.exit_code == 0, result.output
