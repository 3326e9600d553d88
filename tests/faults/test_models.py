"""Models that other tools read wrongly: each variant of a config gives transformers' logits, in every phase."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.builds import recipe
from support.engines import Sequences, load_fp32, prompt_tokens
from support.families import ABSENT, YARN, change_config, change_tensors, make_checkpoint
from support.oracle import Oracle, worst_row_error

from dsc.compiler.build import compile_engine
from dsc.compiler.config import read_config
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError

LIMIT = 1e-4
TIED: dict[str, Any] = {"tie_word_embeddings": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "the checkpoint of faults.md": ("faults", {}),
    "the same without q_lora": ("faults", {"q_lora_rank": None}),
    "FP8 without q_lora, real heads": ("r1", {"q_lora_rank": None}),
    "q_lora in a softmax router without bias": ("v2", {}),
    "mscale as released": ("v2-lite", {}),
    "mscale squared, unlike mscale": ("r1", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "neither mscale given": ("r1", {"rope_scaling": {k: v for k, v in YARN.items() if not k.startswith("mscale")}}),
    "rope_scaling null": ("r1", {"rope_scaling": None}),
    "rope_scaling absent": ("k2", {"rope_scaling": ABSENT}),
    "tied": ("v2-lite", TIED),
    "tied, with an MTP layer": ("r1", TIED),
    "every layer dense": ("v2", {"first_k_dense_replace": 3}),
    "no layer dense": ("r1", {"first_k_dense_replace": 0}),
    "no shared expert": ("k2", {"n_shared_experts": 0}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_equals_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model = make_checkpoint(tmp_path / "model", family, **overrides)
    spec = read_config(model)
    engine = load_fp32(model, tmp_path, mtp=bool(spec.num_mtp_layers))
    (text,) = prompt_tokens(1, 70, spec.vocab_size)
    wanted, _ = Oracle(model, tmp_path / "float32").main(text)
    assert worst_row_error(Sequences(engine, [text]).step([70], "prefill")[0], wanted) < LIMIT
    steps = Sequences(engine, [text])
    mixed = torch.cat([steps.step([66], "prefill")[0], steps.step([2], "decode")[0], steps.step([2], "decode")[0]])
    assert worst_row_error(mixed, wanted) < LIMIT


def test_a_scale_without_mscale_squared_would_show(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "r1")
    spec, oracle = read_config(model), Oracle(model, tmp_path / "float32")
    (text,) = prompt_tokens(1, 40, spec.vocab_size)
    wanted, _ = oracle.main(text)
    for layer in oracle.model.model.layers:
        assert layer.self_attn.scaling == pytest.approx(spec.softmax_scale)
        layer.self_attn.scaling = 192**-0.5
    assert spec.softmax_scale * 192**0.5 == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert worst_row_error(oracle.main(text)[0], wanted) > 100 * LIMIT


# -- tied embeddings, with and without a stored head


@pytest.mark.parametrize("stored", [False, True])
def test_tied_embeddings_are_stored_once(stored: bool, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "r1", **TIED)
    if stored:
        change_tensors(model, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    engine = load_fp32(model, tmp_path, mtp=True)
    names = [name for name in engine.manifest.tensors if "embed" in name or "head.weight" in name]
    assert names == ["model.embed_tokens.weight"]
    dropped = engine.report["ledger"]["dropped"]["tensors"]
    assert dropped.get("copy of the tied embeddings") == (["lm_head.weight"] if stored else None)


def test_a_head_that_contradicts_its_tie_is_told(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "v2-lite", **TIED)
    change_tensors(model, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(DscError, match="tie_word_embeddings is true"):
        compile_engine(recipe(mtp=False), model=str(model), output=tmp_path / "e")
    assert not (tmp_path / "e").exists()


# -- MTP: declared, stored, wanted; every combination says what it does

NONE, PART, ONE, TWO = "none", "part of one", "one", "two"
FOUND = "config.json declares no MTP layer, model.layers.3 is one: it is used"


@pytest.mark.parametrize(
    ("declared", "stored", "enabled", "told"),
    [
        (1, ONE, True, ""),
        (1, ONE, False, ""),
        (0, NONE, False, ""),
        (ABSENT, NONE, False, ""),
        (0, NONE, True, "mtp is enabled and the checkpoint has no MTP layer"),
        (ABSENT, NONE, True, "mtp is enabled and the checkpoint has no MTP layer"),
        (0, ONE, True, FOUND),
        (ABSENT, ONE, True, FOUND),
        (1, NONE, True, "tensors are missing"),
        (1, NONE, False, ""),
        (1, PART, True, "1 of its"),
        (0, PART, True, "1 of its"),
        (1, PART, False, ""),
        (2, TWO, True, "num_nextn_predict_layers is 2, wanted 0 or 1"),
        (2, TWO, False, "num_nextn_predict_layers is 2, wanted 0 or 1"),
        (1, TWO, True, "model.layers.4.enorm.weight is unknown"),
    ],
)
def test_mtp_is_never_silent(declared: Any, stored: str, enabled: bool, told: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "r1")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        layer = [name for name in tensors if name.startswith("model.layers.3.")]
        for name in {NONE: layer, PART: ["model.layers.3.eh_proj.weight"]}.get(stored, []):
            del tensors[name]
        if stored == TWO:
            tensors["model.layers.4.enorm.weight"] = torch.ones(256)

    change_tensors(model, change)
    change_config(model, num_nextn_predict_layers=declared)
    made = recipe(mtp=enabled)
    if told in ("", FOUND):
        built = compile_engine(made, model=str(model), output=tmp_path / "e")
        folder = EngineFolder.open(built.folder)
        assert ("mtp" in folder.manifest.models) == enabled
        assert list(built.notes) == folder.report["notes"] == ([told] if told else [])
        dropped = folder.report["ledger"]["dropped"]["tensors"]
        assert ("MTP layer: off in the recipe" in dropped) == (not enabled and stored in (ONE, PART))
        return
    with pytest.raises(DscError) as caught:
        compile_engine(made, model=str(model), output=tmp_path / "e")
    assert told in caught.value.text()
    assert not (tmp_path / "e").exists()
