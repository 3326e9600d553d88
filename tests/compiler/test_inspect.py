"""What `dsc inspect` tells: every number agrees with the engine, and nothing that was missed or declined is left out."""

import io
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.small_engine import SPEC, make_small_engine

from dsc.compiler.cli import main
from dsc.compiler.ir.rewrite import Changed, Declined, Report
from dsc.compiler.pipeline import PassRuns, PipelineReport, Run
from dsc.compiler.recipe import Allowance
from dsc.runtime import inspect, inspect_tables
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import SCHEMA_VERSION

MISSED = Declined("layers.0.mlp", "the activation has a second reader", "one reader", "Cast [tokens]")
PIPELINE = PipelineReport(
    passes=[
        PassRuns("fuse_swiglu", {}, (Run("main.decode", "main", "decode", 2, Report([Changed("a")], [MISSED])),), Allowance(1, "for the test")),
        PassRuns("set_dtype", {}, (Run("main.decode", "main", "decode", None, Report([Changed("b"), Changed("c")])),), None),
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return make_small_engine(tmp_path_factory.mktemp("inspect") / "small.engine", pipeline=PIPELINE)


@pytest.fixture(scope="module")
def data(engine):
    return inspect.describe(EngineFolder.open(engine))


def printed(engine, width=160, **options):
    out = io.StringIO()
    inspect.show(EngineFolder.open(engine), console=Console(file=out, width=width), **options)
    return out.getvalue()


def test_the_keys(data):
    assert list(data) == [
        "engine", "model", "limits", "serving", "cache", "graphs", "fusion", "declined", "notes", "weights", "tensors", "ledger",
        "memory", "files", "kernels", "steps", "layer",
    ]  # fmt: skip
    assert json.loads(json.dumps(data))["model"]["spec"]["softmax_scale"] == SPEC.softmax_scale
    assert data["layer"] is None


def test_what_it_serves_with(data):
    rows = "\n".join(inspect_tables.facts_table(data).columns[1].cells)
    assert (data["serving"], "what its server is told" in rows) == (None, True)
    told = {**data, "serving": {"gpu": "h200", "sequences": 3, "cache_blocks": 5000, "batch_tokens": 7}}
    rows = "\n".join(inspect_tables.facts_table(told).columns[1].cells)
    assert "3 sequences, 5,000 cache blocks, 7 tokens a step on h200" in rows


def test_sizes_agree_with_the_files(engine, data):
    assert data["engine"]["bytes"] == sum(f["bytes"] for f in data["files"])
    for file in data["files"]:
        assert (engine / file["path"]).stat().st_size == file["bytes"]
    stored = sum(tensor.bytes for tensor in EngineFolder.open(engine).manifest.tensors.values())
    assert data["engine"]["weight_bytes"] == stored == sum(entry["bytes"] for entry in data["weights"])


def test_weights_by_class_and_format(data):
    kinds = {(entry["weight_class"], entry["format"]): entry for entry in data["weights"]}
    assert set(kinds) == {("embeddings", "bfloat16"), ("exact", "float32"), ("attention", "wint8")}
    packed = kinds["attention", "wint8"]
    assert (packed["count"], packed["bytes"]) == (1, 64 * 64 + 64 * 2)
    assert 0 < packed["worst_relative_error"] < 0.02
    assert kinds["exact", "float32"]["worst_relative_error"] == 0


def test_cache_bytes_a_token(data):
    assert data["cache"]["token_bytes_per_layer"] == (32 + 8) * 2
    assert data["cache"]["token_bytes"] == {"main": 80, "total": 80}


def test_fusion_and_what_was_declined(data):
    runs = {entry["pass"]: entry for entry in data["fusion"]}
    assert (runs["fuse_swiglu"]["expected"], runs["fuse_swiglu"]["found"]) == (2, 1)
    assert runs["fuse_swiglu"]["allowed"] == {"count": 1, "reason": "for the test"}
    assert (runs["set_dtype"]["expected"], runs["set_dtype"]["found"]) == (None, 2)
    site = {"node": MISSED.node, "reason": MISSED.reason, "wanted": MISSED.wanted, "got": MISSED.got}
    assert data["declined"] == [{"pass": "fuse_swiglu", "graph": "main.decode", **site}]


def test_ledger_and_memory(data):
    assert data["ledger"] == {
        "consumed": {"count": 1, "bytes": 8},
        "derived": {"count": 1, "bytes": 16},
        "dropped": {"count": 1, "bytes": 32},
        "rules": {"MTP is off": 1},
    }
    assert list(data["memory"]) == list(data["graphs"]) == ["main.decode", "sample"]
    assert data["graphs"]["main.decode"]["ops"] == {"Embedding": 1, "Linear": 1, "LmHead": 1, "RmsNorm": 2}


def test_a_layer_node_by_node(engine):
    layer = inspect.describe(EngineFolder.open(engine), layer=0)["layer"]
    assert [node["node"] for node in layer["graphs"]["main.decode"]] == ["layers.0.norm", "layers.0.linear"]
    linear = layer["graphs"]["main.decode"][1]
    assert (linear["op"], linear["attributes"]) == ("dsc.Linear", {"w_format": "wint8"})
    x, packed, scales = linear["inputs"]
    assert (x["slot"], x["role"], x["shape"]) == ("x", "activation", ["T", 64])
    assert (packed["slot"], packed["format"], packed["weight_class"]) == ("w", "wint8", "attention")
    assert (scales["slot"], scales["dtype"], scales["bytes"]) == ("w.scales", "bfloat16", 128)
    with pytest.raises(DscError, match=r"the engine has no layer 7\n  wanted  0\n  got     7"):
        inspect.describe(EngineFolder.open(engine), layer=7)


def test_the_tables_say_what_counts(engine):
    text = printed(engine)
    for told in (
        "small.engine", f"cpu, 1 rank, schema version {SCHEMA_VERSION}", "80 bytes = 80 main", "1 / 2", "2 / -", "1 may be missed: for the test",
        "1 of 2 sites found in 1 pass, 1 site declined", "the activation has a second reader, wanted one reader, got Cast [tokens]",
        "attention", "wint8", "MTP is off: 1", "main.decode.rank0.onnx", "needed",
    ):  # fmt: skip
        assert told in text, told


def test_narrow_terminals_lose_nothing(engine):
    text = printed(engine, width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    for told in ("fuse_swiglu", "1 / 2", "wint8", "embeddings", "main.decode.rank0.onnx"):
        assert told in text, told


def test_the_layer_as_text(engine):
    text = printed(engine, layer=0)
    assert "layer 0 in main.decode" in text
    assert "w_format wint8" in text
    assert "< w         int8 [64, 64]    linear.packed: attention as wint8, 4,096 bytes" in text
    assert "> y         float32 [T, 64]  layers.0.linear.y: activation at 0" in text
    assert "small.engine" not in text


def test_fusion_alone(engine):
    text = printed(engine, fusion=True)
    assert "fusion sites" in text
    assert "memory plan" not in text


def test_the_command(engine):
    runner = CliRunner()
    told = runner.invoke(main, ["inspect", str(engine), "--json", "--verify"])
    assert told.exit_code == 0
    assert json.loads(told.output)["engine"]["name"] == "small.engine"
    assert "fuse_swiglu" in runner.invoke(main, ["inspect", str(engine)]).output
    missing = runner.invoke(main, ["inspect", str(engine / "nowhere")])
    assert missing.exit_code == 2
    assert "no such engine" in missing.output


def test_looking_takes_neither_torch_nor_the_compiler(engine):
    code = (
        "import sys; from dsc.runtime import inspect; from dsc.runtime.artifact import EngineFolder\n"
        f"inspect.show(EngineFolder.open({str(engine)!r}))\n"
        "print([m for m in sys.modules if m in ('torch', 'onnx', 'transformers') or m.startswith('dsc.compiler')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"
