"""docs/targets.md, proved: a target that is in no list of dsc's compiles, loads and generates what the CPU does."""

from pathlib import Path

import pytest
from support.engines import TINY_R1, compile_tiny
from support.toy_target import CUBIN, ToyTarget

from dsc import runtime
from dsc.compiler.build import compile_engine
from dsc.compiler.recipe import load_recipe
from dsc.compiler.targets import TARGETS
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.backends import BACKENDS
from dsc.runtime.errors import DscError


def test_a_target_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "toy", ToyTarget)
    recipe = load_recipe("tiny-r1-fp32").override("toy")
    folder = compile_engine(recipe, model=str(TINY_R1), output=tmp_path / "toy.engine").folder
    engine = EngineFolder.open(folder)
    assert engine.manifest.target == "toy"
    assert CUBIN in engine.manifest.files
    assert {kernel["entry"] for kernel in engine.report["kernels"]} >= {"Qkv", "MlaAttention", "Moe", "Sample"}
    with pytest.raises(DscError, match="engines for toy cannot be run by this version"):
        runtime.load(folder)

    monkeypatch.setitem(BACKENDS, "toy", "support.toy_target:ToyBackend")
    options = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    prompts = [[5, 6, 7], [9] * 70]
    toy = runtime.load(folder)
    wanted = runtime.load(compile_tiny("tiny-r1-fp32", tmp_path)).generate(prompts, **options)
    assert [o.token_ids for o in toy.generate(prompts, **options)] == [o.token_ids for o in wanted]
    for graph, executed in toy.executed.items():
        nodes = tuple(node["node"] for node in toy.report["nodes"][graph])
        assert executed == (() if graph == "advance" else nodes)  # the backend runs nothing ahead
