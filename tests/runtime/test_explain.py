"""`dsc explain`: what it tells agrees with the checkpoint, the recipe, the report and the programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.engines import compile_tiny

from dsc.compiler.certify.certify import verify_engine
from dsc.compiler.cli import main
from dsc.passes import quantize_weights
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.explain import UNLESS_NAMED, explain
from dsc.runtime.explain_text import text

EXPERTS = "model.layers.2.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny("tiny-r1-wint4", tmp_path_factory.mktemp("explain"))


@pytest.fixture(scope="module")
def folder(engine: Path) -> EngineFolder:
    return EngineFolder.open(engine)


@pytest.mark.parametrize("name", [f"{EXPERTS}.packed", f"{EXPERTS}.scales", f"{EXPERTS}.weight"])
def test_a_quantized_weight(name: str, folder: EngineFolder) -> None:
    found = explain(folder, name)
    assert (found["kind"], found["name"]) == ("tensor", f"{EXPERTS}.weight")
    assert (found["weight_class"], found["format"]) == ("experts", "wint4:128")
    assert found["record"]["sources"] == [
        "model.layers.2.mlp.experts.{0-15}.down_proj.weight",
        "model.layers.2.mlp.experts.{0-15}.down_proj.weight_scale_inv",
    ]
    assert found["record"]["verdict"] == "requantized"
    assert found["chosen_by"] == {"entry": "default", "value": {"format": "wint4", "groups": [128, 64, 32]}}
    assert found["notes"] == ["down wint4:128, experts"]
    assert [part["tensor"] for part in found["stored"]] == [f"{EXPERTS}.packed", f"{EXPERTS}.scales"]
    for part in found["stored"]:
        assert part["sha256"] == folder.manifest.tensors[part["tensor"]].sha256
    readers = {(reader["graph"], reader["node"], reader["slot"]) for reader in found["readers"]}
    assert readers == {
        (graph, "layers.2.mlp.moe", slot)
        for graph in ("main.prefill", "main.decode")
        for slot in ("down", "down.scales")
    }
    assert found["readers"][0]["kernels"] == ["plugins/moe/cpu.py, or reference.py where that binds nothing"]


def test_why_a_weight_is_not_quantized(folder: EngineFolder) -> None:
    for name, entry in (
        ("model.embed_tokens.weight", "skip"),
        ("model.layers.4.eh_proj.weight", "none"),
        ("model.layers.0.self_attn.kv_b_proj.weight", "kv_b"),
    ):
        assert explain(folder, name)["chosen_by"]["entry"] == entry, name
    assert explain(folder, "model.norm.weight")["chosen_by"] is None
    table = explain(folder, "rope.cos")
    assert table["record"]["sources"] == []
    assert "a table computed from config.json" in text(table)


def test_the_classes_that_have_no_default() -> None:
    assert UNLESS_NAMED == quantize_weights.UNLESS_NAMED


def test_two_projections_in_one_weight(folder: EngineFolder) -> None:
    found = explain(folder, "model.layers.1.self_attn.qkv_proj.packed")
    base = "model.layers.1.self_attn"
    assert found["record"]["sources"] == [
        f"{base}.q_a_proj.weight", f"{base}.q_a_proj.weight_scale_inv",
        f"{base}.kv_a_proj_with_mqa.weight", f"{base}.kv_a_proj_with_mqa.weight_scale_inv",
    ]  # fmt: skip


def test_a_node(folder: EngineFolder) -> None:
    found = explain(folder, "layers.2.self_attn.qkv")
    assert sorted(graph["graph"] for graph in found["graphs"]) == ["main.decode", "main.prefill"]
    passes = [touched["pass"] for touched in found["graphs"][0]["passes"]]
    assert passes == ["fuse_qkv", "set_dtype", "quantize_weights"]
    for graph in found["graphs"]:
        node = folder.program(graph["graph"]).nodes[graph["position"]]
        assert node.name == "layers.2.self_attn.qkv"
        assert graph["attributes"] == node.attributes
    assert found["declined"] == []


@pytest.mark.parametrize(
    ("source", "weight"),
    [
        ("model.layers.2.mlp.experts.7.down_proj.weight_scale_inv", f"{EXPERTS}.weight"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "model.layers.3.self_attn.qkv_proj.weight"),
        ("model.layers.4.shared_head.head.weight", None),
    ],
)
def test_a_tensor_of_the_checkpoint(source: str, weight: str | None, folder: EngineFolder) -> None:
    found = explain(folder, source)
    assert (found["kind"], found["weight"]) == ("source", weight)
    assert found["state"] == ("derived" if weight else "dropped: copy of the main model's tensor")


def test_every_name_can_be_explained(folder: EngineFolder) -> None:
    """Every stored tensor, node and source; every source that was not dropped went into a weight."""
    ledger = folder.report["ledger"]
    kept = [name for state in ("consumed", "derived") for name in ledger[state]["tensors"]]
    for source in kept[:: max(len(kept) // 40, 1)]:
        found = explain(folder, source)
        assert found["kind"] == "tensor" or found["weight"] in {r["name"] for r in folder.report["weights"]}, source
    nodes = [node.name for graph in folder.manifest.graphs for node in folder.program(graph).nodes]
    for name in [*list(folder.manifest.tensors)[::10], *nodes[::10]]:
        assert name.split(".")[0] in text(explain(folder, name))


def test_an_unknown_name_and_the_command(engine: Path, folder: EngineFolder) -> None:
    with pytest.raises(DscError) as raised:
        explain(folder, "model.layers.2.mlp.experts.down_pro.packed")
    assert raised.value.try_ == f"{EXPERTS}.packed"
    result = CliRunner().invoke(main, ["explain", str(engine), f"{EXPERTS}.scales", "--json"])
    assert json.loads(result.output) == explain(folder, f"{EXPERTS}.scales")
    shown = CliRunner().invoke(main, ["explain", str(engine), "layers.2.mlp.moe"]).output
    for part in ("dsc.Moe", "fuse_moe", "wint4:128", "plugins/moe/cpu.py"):
        assert part in shown
    assert CliRunner().invoke(main, ["explain", str(engine), "nothing"]).exit_code == 2


def test_the_certificate_of_its_layer(tmp_path: Path) -> None:
    engine = compile_tiny("tiny-r1-wint4", tmp_path)
    made = verify_engine(engine, windows=1, window_tokens=24)
    found = explain(EngineFolder.open(engine), f"{EXPERTS}.packed")
    assert found["certificate"]["alone"] == pytest.approx(made.layers[2].alone.relative_error, rel=1e-4)
    assert "layer 2  error" in text(found)
    assert explain(EngineFolder.open(engine), "model.norm.weight")["certificate"] is None
