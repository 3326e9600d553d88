"""Every packaged recipe, on the CPU, on a shrunk random model of its family: all sites found, formats as it says, it runs.

Head and latent sizes are the released ones; widths, layers and experts are few.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.engines import TINY_R1
from support.families import make_checkpoint

from dsc import runtime
from dsc.compiler.build import compile_engine
from dsc.compiler.recipe import load_recipe, packaged_recipes
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.engine import Engine

CLASSES = ("experts", "attention", "kv_b", "dense_mlp", "shared_experts", "embeddings", "lm_head", "eh_proj")
_PLAIN = {"embeddings": "bf16", "lm_head": "bf16", "eh_proj": "bf16"}


def _formats(default: str, **classes: str) -> dict[str, str]:
    return {**dict.fromkeys(CLASSES, default), **_PLAIN, **classes}


# Recipe -> the shrunk family, and what each class of weight must be stored as: the recipe's own words, written out.
RECIPES: dict[str, tuple[str, dict[str, str]]] = {
    "r1-wint4": ("r1", _formats("fp8", experts="wint4:128")),
    "r1-fp8": ("r1", _formats("fp8")),
    "r1-wint4-a800": ("r1", _formats("wint8", experts="wint4:128")),
    "r1-wint8-2node": ("r1", _formats("wint8")),
    "v2-lite-wint4": ("v2-lite", _formats("wint4:128", kv_b="bf16")),
    "kimi-k2-wint4": ("k2", _formats("fp8", experts="wint4:128")),
    "tiny-r1-fp32": ("tiny-r1", dict.fromkeys(CLASSES, "fp32")),
    "tiny-r1-bf16": ("tiny-r1", _formats("bf16")),
    "tiny-r1-fp8": ("tiny-r1", _formats("fp8")),
    "tiny-r1-wint8": ("tiny-r1", _formats("wint8", kv_b="bf16")),
    "tiny-r1-wint4": ("tiny-r1", _formats("wint4:128", kv_b="bf16")),
}
WITH_MTP = ("r1", "tiny-r1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(family: str) -> Path:
        return TINY_R1 if family == "tiny-r1" else make_checkpoint(tmp_path_factory.mktemp(family), family)

    return make


@pytest.fixture(scope="module", params=sorted(RECIPES))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint) -> tuple[str, Path]:
    name = request.param
    recipe = load_recipe(name).override("cpu", 1)
    folder = tmp_path_factory.mktemp("recipes") / f"{name}.engine"
    return name, compile_engine(recipe, model=str(checkpoint(RECIPES[name][0])), output=folder).folder


@pytest.fixture(scope="module")
def engine(built: tuple[str, Path]) -> Engine:
    return runtime.load(built[1], cache_tokens=1024)


def test_every_packaged_recipe_is_here() -> None:
    assert sorted(RECIPES) == packaged_recipes()


def test_every_site_is_found_in_every_graph(built: tuple[str, Path]) -> None:
    name, folder = built
    report = EngineFolder.open(folder).report
    models = ["main", "mtp"] if RECIPES[name][0] in WITH_MTP else ["main"]
    graphs = {f"{model}.{phase}" for model in models for phase in ("prefill", "decode")}
    layers, dense = (4, 1) if RECIPES[name][0] == "tiny-r1" else (3, 1)
    wanted = {  # by hand, in main and in mtp
        "insert_embedding": (1, 1),
        "fuse_mtp_input": (0, 1),
        "fuse_lm_head": (1, 1),
        "fuse_add_rms_norm": (2 * layers, 2),
        "fuse_qkv": (layers, 1),
        "insert_mla_attention": (layers, 1),
        "fuse_moe": (layers - dense, 1),
        "fuse_swiglu": (dense, 0),
    }
    assert [entry["name"] for entry in report["passes"]] == [entry.name for entry in load_recipe(name).passes]
    for entry in report["passes"]:
        assert {run["graph"] for run in entry["graphs"]} == graphs
        for run in entry["graphs"]:
            assert run["found"] == run["expected"], (entry["name"], run)
            if entry["name"] in wanted:
                assert run["found"] == wanted[entry["name"]][run["model"] == "mtp"], (entry["name"], run)
        assert entry["allowed"] is None
    assert {node["op"].split(".")[0] for nodes in report["nodes"].values() for node in nodes} == {"dsc"}


def test_every_class_of_weight_is_stored_as_the_recipe_says(built: tuple[str, Path]) -> None:
    name, folder = built
    wanted = RECIPES[name][1]
    found: dict[str, set[str]] = {}
    for entry in EngineFolder.open(folder).manifest.tensors.values():
        if entry.weight_class != "exact":
            found.setdefault(entry.weight_class, set()).add(entry.format)
    classes = [c for c in CLASSES if c != "eh_proj" or RECIPES[name][0] in WITH_MTP]
    assert found == {c: {wanted[c]} for c in classes}


def test_fp8_weights_keep_the_bytes_of_the_checkpoint(built: tuple[str, Path]) -> None:
    for record in EngineFolder.open(built[1]).report["weights"]:
        if record["weight_class"] in ("exact", "embeddings", "lm_head", "eh_proj"):
            assert record["verdict"] == "exact", record
        elif record["format"] == "fp8":
            assert (record["verdict"], record["relative_error"]) == ("passed", 0.0), record
        else:
            assert record["verdict"] != "passed", record
            assert record["relative_error"] < 0.2, record


def test_it_loads_and_generates(built: tuple[str, Path], engine: Engine) -> None:
    """Two prompts, one longer than a block of the cache; every node of every graph ran."""
    prompts = [[5, 9, 300], [7, 11] * 40]
    outputs = engine.generate(prompts, max_tokens=4, temperature=0, ignore_eos=True)
    assert [len(output.token_ids) for output in outputs] == [4, 4]
    assert {output.finish_reason for output in outputs} == {"length"}
    again = engine.generate(prompts, max_tokens=4, temperature=0, ignore_eos=True)
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
    for graph, executed in engine.executed.items():
        assert executed == tuple(node["node"] for node in engine.report["nodes"][graph]), (built[0], graph)
