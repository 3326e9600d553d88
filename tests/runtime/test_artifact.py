"""An engine folder is opened whole or refused: what is missing, changed, out of range or of another version is named."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.small_engine import make_small_engine

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import SCHEMA_VERSION
from dsc.runtime.migrate import migrate

WEIGHTS = "weights/rank0-00001.safetensors"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make_small_engine(tmp_path_factory.mktemp("built") / "small.engine")


@pytest.fixture
def engine(built, tmp_path):
    return shutil.copytree(built, tmp_path / "small.engine")


def refusal(path, action=lambda folder: folder.verify_hashes()):
    with pytest.raises(DscError) as caught:
        action(EngineFolder.open(path))
    return str(caught.value)


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_whole_engine(engine):
    folder = EngineFolder.open(engine)
    seen = []
    folder.verify_hashes(seen.append)
    assert sum(seen) == sum(tensor.bytes for tensor in folder.manifest.tensors.values())
    assert folder.spec.hidden_size == 64
    assert folder.program("main.decode").nodes[2].op == "Linear"
    assert folder.report["memory"]["main.decode"]["arena_bytes"] > 0
    assert folder.tokenizer_dir == engine / "tokenizer"
    assert {p.name for p in engine.iterdir()} >= {"manifest.json", "main.decode.rank0.onnx", "sample.rank0.onnx"}


def test_shares_of_the_hashes_are_the_whole(engine):
    """A changed file is found by one of the ranks that hash it together, whichever it is; no tensor is hashed twice."""
    shares = [(which, 3) for which in range(3)]
    folder, seen = EngineFolder.open(engine), []
    for share in shares:
        folder.verify_hashes(seen.append, share)
    assert sum(seen) == sum(tensor.bytes for tensor in folder.manifest.tensors.values())
    for path in folder.manifest.files:
        file = engine / path
        kept = file.read_bytes()
        file.write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
        found = []
        for share in shares:
            try:
                folder.verify_hashes(share=share)
            except DscError as error:
                found.append(str(error))
        assert len(found) == 1, path
        assert str(file) in found[0]
        file.write_bytes(kept)


def test_tensors_are_mapped_not_read_and_writes_stay_private(engine):
    from safetensors.torch import load_file

    folder = EngineFolder.open(engine)
    stored = load_file(engine / WEIGHTS)
    assert set(stored) == set(folder.manifest.tensors)
    for name, tensor in stored.items():
        assert folder.tensor(name).dtype == tensor.dtype
        assert torch.equal(folder.tensor(name).view(torch.uint8), tensor.view(torch.uint8))
    first = folder.tensor("linear.packed")
    assert first.data_ptr() == folder.tensor("linear.packed").data_ptr()
    first.fill_(1)
    folder.close()
    EngineFolder.open(engine).verify_hashes()


def test_content_hash_is_of_content(engine, built):
    assert EngineFolder.open(engine).content_hash == EngineFolder.open(built).content_hash
    (engine / "local").mkdir()
    (engine / "local" / "tuning.json").write_text("{}")
    folder = EngineFolder.open(engine)
    folder.verify_hashes()
    assert folder.content_hash == EngineFolder.open(built).content_hash
    edit(engine / "manifest.json", lambda m: m["recipe"].update(name="other"))
    assert EngineFolder.open(engine).content_hash != EngineFolder.open(built).content_hash


def test_another_schema_version_is_named(engine):
    edit(engine / "manifest.json", lambda m: m.update(schema_version=SCHEMA_VERSION + 1, novelty=1))
    text = refusal(engine)
    assert f"{engine}/manifest.json: the engine has another schema version" in text
    assert f"schema version {SCHEMA_VERSION + 1}" in text
    assert "novelty" not in text


@pytest.mark.parametrize("name", ["embed.weight", "linear.scales", "norm.weight"])
def test_a_changed_byte_names_file_and_tensor(engine, name):
    entry = EngineFolder.open(engine).manifest.tensors[name]
    with open(engine / WEIGHTS, "r+b") as file:
        file.seek(entry.offset + entry.bytes - 1)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert f"{WEIGHTS}: the bytes of {name} changed" in refusal(engine)
    assert name in refusal(engine, lambda folder: folder.verify_tensor(name))
    others = set(EngineFolder.open(engine).manifest.tensors) - {name}
    for other in others:
        EngineFolder.open(engine).verify_tensor(other)


def test_a_changed_byte_outside_the_tensors_names_the_file(engine):
    content = bytearray((engine / WEIGHTS).read_bytes())
    content[9] ^= 1
    (engine / WEIGHTS).write_bytes(content)
    assert f"{WEIGHTS}: its bytes changed" in refusal(engine)


def test_every_byte_of_a_file_of_tensors_is_hashed(tmp_path):
    """Once: inside a tensor as the tensor's, else as the file's; and where both changed, both are told."""
    with tarfile.open(Path(__file__).parent / "version2.engine.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    engine = tmp_path / "version2.engine"
    migrate(engine)
    content = (engine / WEIGHTS).read_bytes()
    tensors = EngineFolder.open(engine).manifest.tensors
    owners = [""] * len(content)
    for name, tensor in tensors.items():
        owners[tensor.offset : tensor.offset + tensor.bytes] = [name] * tensor.bytes
    edges = [at for at in range(1, len(content)) if owners[at] != owners[at - 1]]
    assert "" in [owners[at] for at in edges]  # there is padding between tensors
    for at in {0, 8, *edges[:30], *(at - 1 for at in edges[:30]), len(content) - 1}:
        (engine / WEIGHTS).write_bytes(content[:at] + bytes([content[at] ^ 128]) + content[at + 1 :])
        told = f"the bytes of {owners[at]} changed" if owners[at] else "its bytes changed, outside of its tensors"
        text = refusal(engine)
        assert f"{WEIGHTS}: {told}" in text
        assert "faults" not in text
    both = bytearray(content)
    both[9] ^= 1
    both[-1] ^= 1
    (engine / WEIGHTS).write_bytes(both)
    text = refusal(engine)
    assert f"the bytes of {owners[-1]} changed" in text
    assert "its bytes changed, outside of its tensors" in text


def test_a_hash_by_parts_is_not_to_be_taken_for_that_of_the_file(engine):
    files = EngineFolder.open(engine).manifest.files
    assert {name for name, entry in files.items() if entry.parts_sha256} == {WEIGHTS}
    assert not files[WEIGHTS].sha256
    edit(engine / "manifest.json", lambda m: m["files"][WEIGHTS].update(parts_sha256="0" * 64))
    text = refusal(engine)
    assert f"wanted  parts_sha256 {'0' * 64}" in text
    assert f"got     parts_sha256 {files[WEIGHTS].parts_sha256}" in text


@pytest.mark.parametrize("path", ["program/main.decode.rank0.json", "report.json"])
def test_a_changed_text_is_not_read(engine, path):
    content = (engine / path).read_bytes()
    (engine / path).write_bytes(content.replace(b"1", b"2", 1))
    reading = {"report.json": lambda folder: folder.report}.get(path, lambda folder: folder.program("main.decode"))
    assert f"{path}: its bytes changed" in refusal(engine, reading)


def test_a_program_of_another_build_names_its_rank(engine):
    program = engine / "program/main.decode.rank0.json"
    edit(program, lambda p: p.update(onnx_sha256="1" * 64))
    content = program.read_bytes()
    import hashlib

    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit(engine / "manifest.json", lambda m: m["files"].update({"program/main.decode.rank0.json": entry}))
    text = refusal(engine, lambda folder: folder.program("main.decode"))
    assert "does not belong to main.decode.rank0.onnx: files of different builds, rank 0" in text


def test_missing_truncated_and_linked_files_are_all_named(engine, tmp_path):
    (engine / "main.decode.rank0.onnx").unlink()
    (engine / "report.json").write_text("{}")
    outside = tmp_path / "outside.json"
    shutil.move(engine / "program" / "sample.rank0.json", outside)
    (engine / "program" / "sample.rank0.json").symlink_to(outside)
    text = refusal(engine)
    assert "3 faults" in text
    assert "main.decode.rank0.onnx: is missing: a file of rank 0" in text
    assert "report.json: has another size" in text
    assert "sample.rank0.json: leads out of the engine" in text


def test_what_is_no_engine(tmp_path, engine):
    assert "no such engine" in refusal(tmp_path / "nowhere")
    assert "is no engine" in refusal(tmp_path)
    (engine / "manifest.json").write_text("[]")
    assert "is not the manifest of an engine" in refusal(engine)
    (engine / "manifest.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION}))
    assert "spec is missing" in refusal(engine)
    (engine / "manifest.json").write_text("{")
    assert "manifest.json: is not valid JSON" in refusal(engine)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("target",), 70, "target is of the wrong kind"),
        (("ranks",), 2, "graphs['main.decode'] has not one entry per rank"),
        (("parallel", "tensor"), 2, "ranks is not the number of ranks of parallel"),
        (("parallel", "expert"), 0, "parallel.expert is not positive"),
        (("parallel", "expert"), 3, "groups of ranks for experts that do not come out even"),
        (("limits", "sequences"), 0, "limits.sequences is not positive"),
        (("tensors", "embed.weight", "offset"), 1 << 40, "tensors['embed.weight'].offset is out of range"),
        (("tensors", "embed.weight", "offset"), -8, "tensors['embed.weight'].offset is out of range"),
        (("tensors", "embed.weight", "offset"), 1, "a multiple of 2"),
        (("tensors", "linear.packed", "offset"), 4096, "overlap in weights/"),
        (("tensors", "embed.weight", "bytes"), 5, "tensors['embed.weight'].bytes does not follow"),
        (("tensors", "embed.weight", "shape"), [-96, -64], "no dtype, shape and sha256 that can be"),
        (("tensors", "embed.weight", "shape"), [1 << 70], "tensors['embed.weight'].bytes does not follow"),
        (("tensors", "embed.weight", "dtype"), "complex64", "no dtype, shape and sha256 that can be"),
        (("tensors", "embed.weight", "file"), "weights/none", "tensors['embed.weight'].file is not in files"),
        (("files", WEIGHTS, "sha256"), "0" * 64, "has no size and hash"),
        (("files", WEIGHTS, "parts_sha256"), "0" * 63, "has no size and hash"),
        (("files", WEIGHTS, "parts_sha256"), "", "has no size and hash"),
        (("files", "report.json", "parts_sha256"), "0" * 64, "has no size and hash"),
        (("files", "report.json", "sha256"), "", "has no size and hash"),
        (("graphs", "sample", 0, "program"), "program/x.json", "names program/x.json for rank 0"),
        (("models", "main", "phases", "decode"), "main.decod", "main.decod, which is no graph"),
        (("kv_cache", "block_bytes"), 7, "kv_cache.block_bytes does not follow from its widths"),
        (("spec", "yarn", "factor"), "40", "spec.yarn.factor is of the wrong kind"),
    ],
)
def test_a_damaged_manifest(engine, path, value, message):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    edit(engine / "manifest.json", change)
    text = refusal(engine)
    assert message in text
    assert "manifest.json" in text


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/etc/passwd",
        "weights/../../x",
        "a\\b",
        "",
        ".",
        "weights//x",
        "./x",
        "manifest.json",
        "local/x",
        "a\0b",
    ],
)
def test_paths_that_leave_the_engine(engine, path):
    entry = {"bytes": 0, "sha256": "0" * 64}
    edit(engine / "manifest.json", lambda m: m["files"].update({path: entry}))
    assert "which is no path inside the engine" in refusal(engine)


def test_unknown_names_get_the_nearest(engine):
    folder = EngineFolder.open(engine)
    with pytest.raises(DscError, match=r"no tensor embed\.weigth\n  try  embed\.weight"):
        folder.tensor("embed.weigth")
    with pytest.raises(DscError, match="no graph main"):
        folder.program("main.decod")
    with pytest.raises(DscError, match="no rank 1"):
        folder.program("main.decode", rank=1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_a_fuzzed_manifest_is_read_or_refused(built, tmp_path_factory, data):
    engine = tmp_path_factory.mktemp("fuzz") / "e"
    shutil.copytree(built, engine)

    def change(tree):
        at, parent, key = tree, tree, "spec"
        while isinstance(at, dict | list) and at:
            keys = sorted(at) if isinstance(at, dict) else range(len(at))
            parent, key = at, data.draw(st.sampled_from(keys))
            at = at[key]
            if data.draw(st.integers(0, 3)) == 0:
                break
        if isinstance(parent, dict) and data.draw(st.booleans()):
            del parent[key]
        else:
            parent[key] = data.draw(JSON)

    edit(engine / "manifest.json", change)
    told = str(engine)
    try:
        EngineFolder.open(engine).verify_hashes()
    except DscError as error:
        told = str(error)
    assert str(engine) in told
    shutil.rmtree(engine)


@settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.binary(max_size=40), st.integers(0, 5000))
def test_fuzzed_bytes_of_a_manifest(built, tmp_path_factory, noise, at):
    content = (built / "manifest.json").read_bytes()
    engine = tmp_path_factory.mktemp("fuzz") / "e"
    shutil.copytree(built, engine)
    (engine / "manifest.json").write_bytes(content[:at] + noise + content[at + len(noise) :])
    told = str(engine)
    try:
        EngineFolder.open(engine)
    except DscError as error:
        told = str(error)
    assert str(engine) in told
    shutil.rmtree(engine)
