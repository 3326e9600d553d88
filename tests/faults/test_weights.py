"""Weights that other tools spoil: absorbed from packed bytes, groups that do not divide, groups of zeros, a rounded router bias."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from support.builds import recipe
from support.engines import Sequences, prompt_tokens
from support.families import change_tensors, make_checkpoint
from support.oracle import Oracle, worst_row_error

from dsc import runtime
from dsc.compiler.build import Built, compile_engine
from dsc.plugins.formats import GROUPS, parse_format
from dsc.plugins.stored import StoredWeight
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.engine import Engine

LIMIT = 1e-4  # of the worst row, in float32
FORMATS = {
    "bf16": "default: {format: bf16}",
    "fp8": "default: {format: fp8, block: [128, 128]}",
    "wint8": "default: {format: wint8}",
    "wint4": "default: {format: wint4, groups: [128, 64, 32]}",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp(family), family))


def build(formats: str, model: Path, folder: Path, activations: str = "fp32") -> Built:
    made = recipe(formats, activations=activations)
    return compile_engine(made, model=str(model), output=folder / "test.engine")


def stored_weight(folder: EngineFolder, name: str) -> StoredWeight:
    """A weight as the engine has it."""
    entries = {n: e for n, e in folder.manifest.tensors.items() if n.rsplit(".", 1)[0] == name}
    parts = {entry.part: folder.tensor(n) for n, entry in entries.items()}
    (format_,) = {entry.format for entry in entries.values()}
    return StoredWeight(parse_format(format_), parts["data"], parts.get("scales"))


# -- kv_b_proj stored packed or in FP8, then absorbed


@pytest.mark.parametrize("family", ["r1", "faults"])
@pytest.mark.parametrize("kind", FORMATS)
def test_absorbed_from_stored_kv_b_equals_expanded_and_the_dequantized_values(
    kind: str, family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Everything else is float32, so that nothing but kv_b may differ. The faults family has groups of 64: its latent is 64."""
    plain = "default: {format: fp32}\nembeddings: {format: fp32}\nlm_head: {format: fp32}\n"
    built = build(plain + FORMATS[kind].replace("default", "kv_b"), checkpoint(family), tmp_path)
    engine, folder = runtime.load(built.folder), EngineFolder.open(built.folder)
    oracle = Oracle(checkpoint(family), tmp_path / "float32")
    changed = 0.0
    for layer, module in enumerate(oracle.model.model.layers):
        weight = stored_weight(folder, f"model.layers.{layer}.self_attn.kv_b_proj")
        assert weight.format.kind == kind
        values = weight.dequantize().view_as(module.self_attn.kv_b_proj.weight)
        changed = max(changed, float((module.self_attn.kv_b_proj.weight.detach() - values).abs().max()))
        module.self_attn.kv_b_proj.weight.data = values
    assert (changed > 0) == (kind != "fp8")  # the release's FP8 passes through
    (text,) = prompt_tokens(1, 40, engine.spec.vocab_size)
    wanted, _ = oracle.main(text)
    steps = Sequences(engine, [text])
    absorbed = torch.cat([steps.step([count], "decode")[0] for count in (2, 1, 2)])
    assert worst_row_error(absorbed, wanted[:5]) < LIMIT
    assert worst_row_error(Sequences(engine, [text]).step([40], "prefill")[0], wanted) < LIMIT


# -- widths that a group does not divide


@pytest.mark.parametrize("groups", [[128], [128, 64], [128, 64, 32], [32]])
def test_a_dividing_group_or_unquantized_by_rule_and_printed(
    groups: list[int], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Widths of the faults family: 256, 320, 128, 96, 64. No weight is far from its values, whatever its width."""
    built = build(f"default: {{format: wint4, groups: {groups}}}", checkpoint("faults"), tmp_path, "bf16")
    report = EngineFolder.open(built.folder).report
    widths = set()
    for record in report["weights"]:
        if record["weight_class"] in ("exact", "embeddings", "lm_head", "eh_proj"):
            continue
        width = record["shape"][-1]
        widths.add(width)
        wanted = next((f"wint4:{group}" for group in groups if width % group == 0), "bf16")
        assert record["format"] == wanted, record
        assert record["worst_row_error"] < 0.3, record
    assert widths == {256, 320, 128, 96, 64}
    second_choice = {width for width in widths if width % groups[0]}
    told = [note for note in built.notes if note.startswith("quantize_weights: ")]
    assert {int(note.split(": ")[2].split(" ")[0]) for note in told} == second_choice
    assert list(built.notes) == report["notes"]
    assert all(note in built.text() for note in told)


def test_every_group_that_recipes_may_name_is_tried() -> None:
    assert GROUPS == (128, 64, 32)


# -- groups of zeros, experts of zeros, an expert that no token reaches


def _spoil(tensors: dict[str, torch.Tensor]) -> None:
    """An expert of zeros with a scale of zero, one whole FP8 block of zeros, a zero row, and an expert never chosen."""
    name = "model.layers.1.mlp.experts.{}.{}_proj.weight"
    for part in ("gate", "up", "down"):
        tensors[name.format(3, part)].zero_()
        tensors[name.format(3, part) + "_scale_inv"].zero_()
        tensors[name.format(4, part)].zero_()
    tensors[name.format(5, "up")][:, :128] = 0
    tensors["model.layers.0.self_attn.o_proj.weight"][7] = 0
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"][2] = -100


@pytest.mark.parametrize("activations", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", FORMATS)
def test_zeros_have_finite_scales_and_zero_codes_and_are_counted(kind: str, activations: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "r1", "r1")
    change_tensors(model, _spoil)
    built = build(FORMATS[kind], model, tmp_path, activations)
    folder = EngineFolder.open(built.folder)
    for name, entry in folder.manifest.tensors.items():
        if entry.part == "scales":
            assert torch.isfinite(folder.tensor(name).float()).all(), name
    experts = stored_weight(folder, "model.layers.1.mlp.experts.down_proj")
    codes = experts.data.view(torch.uint8)
    assert not codes[3:5].any()
    assert codes[0].any()
    assert not experts.dequantize()[3:5].any()
    records = {record["name"]: record for record in folder.report["weights"]}
    if kind in ("wint8", "wint4"):
        assert records["model.layers.1.mlp.experts.down_proj.weight"]["zero_groups"] >= 2 * 256
        assert records["model.layers.0.self_attn.o_proj.weight"]["zero_groups"] >= 1
    engine = runtime.load(built.folder)
    text = prompt_tokens(1, 40, engine.spec.vocab_size)[0]
    logits = Sequences(engine, [text]).step([40], "prefill")[0]
    assert torch.isfinite(logits).all()
    (output,) = engine.generate([text], max_tokens=4, temperature=0, ignore_eos=True)
    assert (output.finish_reason, len(output.token_ids)) == ("length", 4)


# -- the router's bias


def _close_biases(tensors: dict[str, torch.Tensor]) -> None:
    """Biases that differ less than bfloat16 can tell, on top of equal scores: rounding would choose other experts."""
    for layer in (1, 2, 3):
        name = f"model.layers.{layer}.mlp.gate"
        if f"{name}.weight" in tensors:
            tensors[f"{name}.weight"].mul_(1e-3)
            order = torch.randperm(16, generator=torch.Generator().manual_seed(layer))
            tensors[f"{name}.e_score_correction_bias"] = 100 + order.float() * 2e-3


@pytest.mark.parametrize("activations", ["fp32", "bf16"])
def test_the_routers_bias_stays_float32_and_only_selects(activations: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "r1", "r1")
    change_tensors(model, _close_biases)
    oracle = Oracle(model, tmp_path / "float32")
    engine: Engine = runtime.load(build("", model, tmp_path, activations).folder)
    folder = EngineFolder.open(tmp_path / "test.engine")
    text = prompt_tokens(1, 40, engine.spec.vocab_size)[0]
    got, (wanted, _) = Sequences(engine, [text]).step([40], "prefill")[0], oracle.main(text)
    spoiled = Oracle(model, tmp_path / "spoiled")
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        assert folder.manifest.tensors[name].dtype == "float32"
        assert torch.equal(folder.tensor(name), oracle.tensors[name])
        gate = spoiled.model.model.layers[layer].mlp.gate
        gate.e_score_correction_bias.data = gate.e_score_correction_bias.bfloat16().float()
    rounded, _ = spoiled.main(text)
    limit = LIMIT if activations == "fp32" else 0.05
    assert worst_row_error(rounded, wanted) > 2 * limit  # so this would show
    assert worst_row_error(got, wanted) < limit
