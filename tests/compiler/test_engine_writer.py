"""Engines are written whole or not at all, with the same bytes each time, and every common tool opens them."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import pytest
import torch
from safetensors import safe_open
from support.small_engine import RECIPE, SPEC, make_graphs, make_small_engine

from dsc.compiler import staging
from dsc.compiler.engine_writer import weight_bytes
from dsc.compiler.staging import Staging
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import CacheLayout, Model

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tiny-r1"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return make_small_engine(tmp_path_factory.mktemp("engines") / "small.engine", CHECKPOINT)


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- what is written


def test_the_folder(engine):
    assert set(files_of(engine)) == {
        "manifest.json", "report.json", "main.decode.rank0.onnx", "sample.rank0.onnx",
        "program/main.decode.rank0.json", "program/sample.rank0.json", "weights/rank0-00001.safetensors",
        "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "tokenizer/generation_config.json",
    }  # fmt: skip
    assert not list(engine.parent.glob(".*"))
    EngineFolder.open(engine).verify_hashes()


def test_the_manifest(engine):
    manifest = EngineFolder.open(engine).manifest
    assert manifest.spec == SPEC
    assert manifest.recipe == json.loads(json.dumps(RECIPE.to_json()))
    assert manifest.kv_cache == CacheLayout("bfloat16", 16, 32, 8, 16 * 40 * 2, "interleaved")
    assert manifest.models == {"main": Model((0,), {"decode": "main.decode"}), "sample": Model((), {"": "sample"})}
    packed, scales = manifest.tensors["linear.packed"], manifest.tensors["linear.scales"]
    assert (packed.weight_class, packed.format, packed.part, packed.dtype) == ("attention", "wint8", "data", "int8")
    assert (scales.weight_class, scales.format, scales.part, scales.dtype) == (
        "attention",
        "wint8",
        "scales",
        "bfloat16",
    )
    assert manifest.tensors["norm.weight"].format == "float32"
    assert manifest.tensors["embed.weight"].models == ("main",)
    assert set(manifest.toolchain) == {"dsc", "numpy", "onnx", "onnx-graphsurgeon", "torch"}
    assert "+" not in manifest.toolchain["torch"]


def test_the_report(engine):
    report = EngineFolder.open(engine).report
    assert set(report) == {"notes", "passes", "nodes", "weights", "ledger", "memory", "kernels"}
    assert [run["found"] for run in report["passes"][0]["graphs"]] == [1, 1]
    assert [node["op"] for node in report["nodes"]["sample"]] == ["dsc.Sample"]
    assert {record["name"] for record in report["weights"]} == {"embed.weight", "linear.weight", "norm.weight"}
    assert report["memory"]["main.decode"]["arena_bytes"] >= report["memory"]["main.decode"]["live_bytes"] > 0


def test_onnx_loads_with_its_weights(engine):
    path = str(engine / "main.decode.rank0.onnx")
    onnx.checker.check_model(path)
    model = onnx.load(path)
    folder = EngineFolder.open(engine)
    loaded = {tensor.name: tensor for tensor in model.graph.initializer}
    assert set(loaded) == {n for n, t in folder.manifest.tensors.items()}
    for name, tensor in loaded.items():
        stored = folder.tensor(name)
        assert tuple(tensor.dims) == tuple(stored.shape)
        assert tensor.raw_data == bytes(stored.view(-1).view(torch.uint8).numpy())
    graph = gs.import_onnx(onnx.load(path, load_external_data=False))
    assert [node.name for node in graph.nodes] == [node.name for node in folder.program("main.decode").nodes]
    assert {info.name for info in model.graph.value_info} == {"embed_tokens.y", "layers.0.norm.y", "layers.0.linear.y"}


def test_safetensors_opens_the_weights(engine):
    with safe_open(engine / "weights" / "rank0-00001.safetensors", "pt") as file:
        assert set(EngineFolder.open(engine).manifest.tensors) <= set(file.keys())


def test_same_bytes_from_another_folder(engine, tmp_path):
    other = make_small_engine(tmp_path / "elsewhere" / "other-name.engine", CHECKPOINT)
    assert files_of(other) == files_of(engine)


def test_nothing_of_this_machine_is_written(engine):
    import platform
    import socket

    told = [
        str(engine),
        str(Path.cwd()),
        str(Path.home()),
        socket.gethostname(),
        platform.release(),
        time.strftime("%Y-%m"),
    ]
    for path, content in files_of(engine).items():
        if not path.startswith(("tokenizer/", "weights/")):
            assert not [word for word in told if len(word) > 2 and word.encode() in content], path


def test_a_checkpoint_without_tokenizer(tmp_path):
    engine = make_small_engine(tmp_path / "small.engine")
    assert not list((engine / "tokenizer").iterdir())
    EngineFolder.open(engine).verify_hashes()


def test_weight_bytes_are_what_is_stored(engine):
    stored = sum(tensor.bytes for tensor in EngineFolder.open(engine).manifest.tensors.values())
    assert stored <= weight_bytes(make_graphs()) <= stored + 64 * 4


# -- how it gets into place


def fail(target, error):
    """A build that writes half and fails."""
    with Staging(target, 0) as stage:
        (stage.folder / "manifest.json").write_text("half")
        raise error


def test_an_engine_is_replaced_when_the_new_one_is_whole(tmp_path):
    target = make_small_engine(tmp_path / "small.engine")
    (target / "local").mkdir()
    before = files_of(target)
    with pytest.raises(RuntimeError):
        fail(target, RuntimeError("the build fails"))
    assert files_of(target) == before
    with Staging(target, 0) as stage:
        (stage.folder / "manifest.json").write_text("new")
        stage.commit()
    assert files_of(target) == {"manifest.json": b"new"}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("target", "a file"),
        ("target/thesis.tex", ""),
        ("target/manifest.json", '{"manifest_version": 3, "name": "an extension of a browser"}'),
        ("target/manifest.json", "[1]"),
    ],
)
def test_what_is_no_engine_is_never_replaced(tmp_path, name, content):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    before = files_of(tmp_path)
    with pytest.raises(DscError, match=f"{tmp_path}/target: "), Staging(tmp_path / "target", 0):
        pass
    assert files_of(tmp_path) == before


def test_an_empty_folder_and_a_missing_parent_are_fine(tmp_path):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        with Staging(target, 0) as stage:
            (stage.folder / "manifest.json").write_text("{}")
            stage.commit()
        assert files_of(target) == {"manifest.json": b"{}"}


def test_two_builds_of_one_engine(tmp_path):
    target = tmp_path / "small.engine"
    with Staging(target, 0) as stage:
        (stage.folder / "x").write_text("x")
        with pytest.raises(DscError, match="another build is writing this engine"), Staging(target, 0):
            pass
        assert (stage.folder / "x").exists()


def test_no_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage._replace(free=1 << 30))
    with pytest.raises(DscError) as caught, Staging(tmp_path / "small.engine", 1 << 30):
        pass
    text = str(caught.value)
    assert f"{tmp_path}: not enough disk space" in text
    assert "wanted  1,090,519,040 bytes, 1,073,741,824 of them weights" in text
    assert "got     1,073,741,824 bytes free" in text
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_told_and_leaves_nothing(tmp_path):
    with pytest.raises(DscError, match=r"small\.engine: the build cannot be written\n  got  No space left"):
        fail(tmp_path / "small.engine", OSError(28, "No space left on device"))
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DscError, match=r"cannot be written\n  got  (Not a directory|File exists)"):
        fail(tmp_path / "file" / "small.engine", RuntimeError("must not come here"))


def build_and_wait(target, at, ready):
    """In a process of its own: build, and hang at one point until killed."""

    def stop(*args, **options):
        ready.set()
        time.sleep(60)

    if at == "weights":
        import dsc.compiler.emit as module

        module.convert = stop
    elif at == "manifest":
        import dsc.compiler.engine_writer as module

        module._write_synced = stop
    else:
        staging.os.rename = _instead_of_folder(0 if at == "move" else 1, staging.os.rename, stop)
    make_small_engine(target)


def _instead_of_folder(number, rename, stop):
    """Rename as ever, but stop at the folder of that number."""
    folders = []

    def call(source, target):
        if Path(source).is_dir():
            folders.append(source)
            if len(folders) > number:
                stop()
        rename(source, target)

    return call


KILLS = [(at, existing) for at in ("weights", "manifest", "move", "between") for existing in (False, True)]
KILLS.remove(("between", False))  # one move only


@pytest.mark.parametrize(("at", "existing"), KILLS)
def test_a_killed_build(tmp_path, at, existing):
    target = tmp_path / "small.engine"
    before = files_of(make_small_engine(target, CHECKPOINT)) if existing else {}
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=build_and_wait, args=(target, at, ready))
    process.start()
    assert ready.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()

    # What stands at the target is whole; what was cut short is not taken for an engine before its manifest is written.
    if at != "between":
        assert (files_of(target) if target.exists() else {}) == before
    partial = tmp_path / ".small.engine.partial"
    assert partial.exists()
    if at in ("weights", "manifest"):
        with pytest.raises(DscError, match="is no engine, or a build that was cut short"):
            EngineFolder.open(partial)
    else:
        EngineFolder.open(partial).verify_hashes()

    # The next build finds the leftovers, removes them, and ends in the same bytes as an undisturbed one.
    with Staging(target, 0) as stage:
        assert stage.leftover
        assert not list(stage.folder.iterdir())
        assert (files_of(target) if target.exists() else {}) == before
    make_small_engine(target)
    assert files_of(target) == files_of(make_small_engine(tmp_path / "undisturbed.engine"))
    assert {path.name for path in tmp_path.iterdir()} == {"small.engine", "undisturbed.engine"}
