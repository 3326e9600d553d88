"""Norms that quantize change no bit of what an engine computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engines import TINY_R1, Sequences, prompt_tokens

from dsc import runtime
from dsc.compiler.build import compile_engine
from dsc.compiler.recipe import load_recipe
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.executor import Executor
from dsc.runtime.inspect import describe

PASS = "quantize_norms"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """tiny-r1-fp8 as it is, and without the pass."""
    recipe, folder = load_recipe("tiny-r1-fp8"), tmp_path_factory.mktemp("engines")
    without = replace(recipe, passes=tuple(entry for entry in recipe.passes if entry.name != PASS))
    assert len(without.passes) == len(recipe.passes) - 1
    built = [
        compile_engine(made, model=str(TINY_R1), output=folder / name)
        for name, made in (("with.engine", recipe), ("without.engine", without))
    ]
    sites = 2 * (4 + 2 + 3) + 2 * 2  # phases x (attention, dense gate and up, experts), and those of the MTP layer
    assert built[0].fusions[PASS] == (sites, sites)
    return built[0].folder, built[1].folder


def test_logits_and_drafts_are_the_same_bits(folders: tuple[Path, Path]) -> None:
    engines = [runtime.load(folder) for folder in folders]
    texts = prompt_tokens(3, 40, engines[0].spec.vocab_size)
    runs = [Sequences(engine, texts) for engine in engines]
    for counts in ([33, 20, 7], [1, 1, 1], [0, 2, 1], [4, 9, 20]):
        for one, other in zip(*(run.step(counts) for run in runs), strict=True):
            assert torch.equal(one, other)
    options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "drafts": 1}
    one, other = (engine.generate(texts, **options) for engine in engines)
    assert [o.token_ids for o in one] == [o.token_ids for o in other]


def test_codes_have_places_in_the_arena(folders: tuple[Path, Path]) -> None:
    """A step in planned memory, poisoned before it is written and after its last reader."""
    engine = EngineFolder.open(folders[0])
    program = engine.program("main.decode")
    codes = {name: operand for name, operand in program.operands.items() if name.endswith("norm.codes")}
    assert len(codes) == 2 * 4
    assert {(o.role, o.dtype) for o in codes.values()} == {("activation", "float8_e4m3fn")}
    assert all(program.operands[name.replace(".codes", ".scales")].shape == (2, "T") for name in codes)
    plain, planned = (Executor(program, engine, arena=arena) for arena in (False, True))
    tokens = torch.tensor([5, 9, 300], dtype=torch.int32)
    count = torch.arange(3, dtype=torch.int32)
    inputs = {
        "tokens": tokens, "positions": torch.zeros(3, dtype=torch.int32), "slots": count * 64, "logit_rows": count,
        "query_starts": torch.arange(4, dtype=torch.int32), "sequence_lengths": torch.ones(3, dtype=torch.int32),
        "block_table": count.unsqueeze(1),
    }  # fmt: skip
    for name in program.inputs:
        if program.operands[name].role == "state":
            inputs[name] = torch.zeros(3, int(program.operands[name].shape[1]), dtype=torch.uint8)
    first, second = (run.run({n: t.clone() for n, t in inputs.items()}) for run in (plain, planned))
    assert torch.equal(first["logits"], second["logits"])
    assert bool(first["logits"].isfinite().all())


def test_inspect_shows_who_makes_and_takes_codes(folders: tuple[Path, Path]) -> None:
    layer = describe(EngineFolder.open(folders[0]), 0)["layer"]
    nodes = {node["node"]: node for node in layer["graphs"]["main.decode"]}
    norm, gate = nodes["layers.0.post_attention_layernorm"], nodes["layers.0.mlp.gate_proj"]
    assert norm["attributes"]["quantize"] == "fp8"
    assert [o["slot"] for o in norm["outputs"]] == ["y", "sum", "codes", "scales"]
    taken = {o["slot"]: o["name"] for o in gate["inputs"]}
    assert taken["x_codes"] == norm["outputs"][2]["name"]
