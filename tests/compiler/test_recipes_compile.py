"""Every packaged recipe, on the CPU, on a shrunk random model of its family: all sites found, formats as it says, it runs.

Head and latent sizes are the released ones; widths, layers and experts are few.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from support.engines import ROOT, TINY_R1
from support.families import make_checkpoint

from dsc import runtime
from dsc.compiler.build import compile_engine
from dsc.compiler.recipe import load_recipe, packaged_recipes
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.engine import Engine

FAMILIES = {
    "r1-wint4": "r1",
    "r1-fp8": "r1",
    "r1-wint4-a800": "r1",
    "r1-wint8": "r1",
    "r1-wint8-2node": "r1",
    "v2-lite-wint4": "v2-lite",
    "kimi-k2-wint4": "k2",
    "tiny-r1-fp32": "tiny-r1",
    "tiny-r1-bf16": "tiny-r1",
    "tiny-r1-fp8": "tiny-r1",
    "tiny-r1-wint8": "tiny-r1",
    "tiny-r1-wint4": "tiny-r1",
}
CLASSES = ("experts", "attention", "kv_b", "dense_mlp", "shared_experts", "embeddings", "lm_head", "eh_proj")
UNLESS_NAMED = ("embeddings", "lm_head", "eh_proj")
WITH_MTP = ("r1", "tiny-r1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(family: str) -> Path:
        return TINY_R1 if family == "tiny-r1" else make_checkpoint(tmp_path_factory.mktemp(family), family)

    return make


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint) -> tuple[str, Path]:
    name = request.param
    recipe = load_recipe(name).override("cpu", 1)
    folder = tmp_path_factory.mktemp("recipes") / f"{name}.engine"
    return name, compile_engine(recipe, model=str(checkpoint(FAMILIES[name])), output=folder).folder


@pytest.fixture(scope="module")
def engine(built: tuple[str, Path]) -> Engine:
    return runtime.load(built[1], cache_tokens=1024)


def test_every_packaged_recipe_is_here() -> None:
    assert sorted(FAMILIES) == packaged_recipes()


def test_every_site_is_found_in_every_graph(built: tuple[str, Path]) -> None:
    name, folder = built
    report = EngineFolder.open(folder).report
    models = ["main", "mtp"] if FAMILIES[name] in WITH_MTP else ["main"]
    graphs = {f"{model}.{phase}" for model in models for phase in ("prefill", "decode")}
    layers, dense = (4, 1) if FAMILIES[name] == "tiny-r1" else (3, 1)
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
    found: dict[str, set[str]] = {}
    for entry in EngineFolder.open(folder).manifest.tensors.values():
        if entry.weight_class != "exact":
            found.setdefault(entry.weight_class, set()).add(entry.format)
    classes = [c for c in CLASSES if c != "eh_proj" or FAMILIES[name] in WITH_MTP]
    assert found == {c: {wanted_format(name, c)} for c in classes}


def wanted_format(recipe: str, weight_class: str) -> str:
    """What the README says of a recipe's words, read from the file itself. All widths here divide by every group."""
    text = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text())
    options = {name: value for entry in text["passes"] if isinstance(entry, dict) for name, value in entry.items()}
    formats, plain = options["quantize_weights"], options["set_dtype"]["activations"]
    if weight_class in formats.get("skip", ()):
        return str(plain)
    entry = formats.get(weight_class) or (formats.get("attention") if weight_class == "kv_b" else None)
    if entry is None and weight_class not in UNLESS_NAMED:
        entry = formats.get("default")
    if entry is None:
        return str(plain)
    group = entry.get("group") or entry.get("groups", [0])[0]
    return f"wint4:{group}" if entry["format"] == "wint4" else str(entry["format"])


def test_what_stays_as_it_was_keeps_its_bytes(built: tuple[str, Path]) -> None:
    for record in EngineFolder.open(built[1]).report["weights"]:
        unquantized = record["weight_class"] in UNLESS_NAMED and record["format"] in ("bf16", "fp32")
        if record["weight_class"] == "exact" or unquantized:
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
