"""Engines of older versions are brought to this one: the same tokens, nothing but the manifest replaced, old or new at any time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.builds import dsc, hashes, refusal
from support.damage import change_tensor, flip_byte, parts_sha256
from support.small_engine import make_small_engine

from dsc import runtime
from dsc.runtime import certificate, codec
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import SCHEMA_VERSION
from dsc.runtime.migrate import STEPS, migrate

# Engines that compilers of older versions wrote, certificate included, and what each made of two prompts then.
PROMPTS = [[5, 6, 7, 8], [9, 10]]
TOKENS = {
    1: [
        [207, 170, 41, 86, 219, 44, 137, 205, 232, 19, 41, 86, 219, 44, 91, 214],
        [17, 240, 205, 248, 170, 69, 103, 256, 118, 135, 41, 86, 219, 246, 64, 90],
    ],
    2: [
        [38, 4, 113, 25, 108, 148, 98, 139, 101, 256, 220, 149, 31, 121, 194, 241],
        [252, 93, 234, 184, 116, 79, 60, 131, 195, 254, 225, 149, 168, 71, 111, 104],
    ],
}
WEIGHTS = "weights/rank0-00001.safetensors"


def unpacked(version: int, folder: Path) -> Path:
    with tarfile.open(Path(__file__).parent / f"version{version}.engine.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"version{version}.engine"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The oldest: it goes through every step."""
    return unpacked(1, tmp_path)


def as_version(version: int, engine: Path) -> Path:
    """An engine of today as version 1 or 2 would have written it."""
    path = engine / "manifest.json"
    manifest = json.loads(path.read_text())
    if version == 1:
        manifest.pop("serving")
    for name, entry in manifest["files"].items():
        if entry.pop("parts_sha256", None):
            entry["sha256"] = hashlib.sha256((engine / name).read_bytes()).hexdigest()
    path.write_bytes(codec.dump_json({**manifest, "schema_version": version}))
    return engine


def greedy(engine: Path, prompts: list[Any], count: int) -> list[list[int]]:
    outputs = runtime.load(engine).generate(prompts, max_tokens=count, temperature=0, ignore_eos=True)
    return [list(output.token_ids) for output in outputs]


def test_there_is_a_step_from_every_older_version():
    assert list(STEPS) == list(range(1, SCHEMA_VERSION))


@pytest.mark.parametrize("version", TOKENS)
def test_an_engine_that_an_older_version_wrote(version, tmp_path):
    old = unpacked(version, tmp_path)
    before = hashes(old)
    text = refusal("generate", old, "--prompt", "x")
    assert f"{old}/manifest.json: the engine has another schema version" in text
    assert f"try     dsc migrate {old}" in text
    result = dsc("migrate", old)
    assert result.exit_code == 0
    assert f"{old}: schema version {version} is now {SCHEMA_VERSION}, " in result.stdout
    after = hashes(old)
    assert {name for name in before if before[name] != after.get(name)} == {"manifest.json"}
    assert after.keys() == before.keys()
    assert dsc("inspect", old, "--verify").exit_code == 0
    assert greedy(old, PROMPTS, 16) == TOKENS[version]
    assert EngineFolder.open(old).manifest.serving is None


@pytest.mark.parametrize("version", TOKENS)
def test_files_of_tensors_are_hashed_by_their_parts_then(version, tmp_path):
    old = unpacked(version, tmp_path)
    before = json.loads((old / "manifest.json").read_text())
    migrate(old)
    after = json.loads((old / "manifest.json").read_text())
    places = [(tensor["offset"], tensor["bytes"]) for tensor in after["tensors"].values()]
    content = (old / WEIGHTS).read_bytes()
    wanted = {"bytes": len(content), "parts_sha256": parts_sha256(content, places)}
    assert after["files"] == {**before["files"], WEIGHTS: wanted}
    assert after["tensors"] == before["tensors"]


def test_what_was_measured_still_holds(old):
    migrate(old)
    folder = EngineFolder.open(old)
    measured = certificate.read(folder)
    assert measured is not None
    assert measured.engine == folder.manifest.migrated[0].content_hash != folder.content_hash
    change_manifest(old, lambda m: m["migrated"][0].update(content_hash="0" * 64))
    with pytest.raises(DscError, match="belongs to another engine"):
        certificate.read(EngineFolder.open(old))


@pytest.mark.parametrize("version", TOKENS)
def test_the_same_engine_as_one_built_anew(version, tmp_path, wint4_folder, wint4):
    """Also its hash, which tells engines apart: how it came to be is no part of it."""
    engine = as_version(version, shutil.copytree(wint4_folder, tmp_path / "x.engine"))
    assert migrate(engine).before == version
    assert EngineFolder.open(engine).content_hash == EngineFolder.open(wint4_folder).content_hash
    prompts = ["def main(", "import "]
    wanted = wint4.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True)
    assert greedy(engine, prompts, 12) == [list(output.token_ids) for output in wanted]
    assert dsc("diff", wint4_folder, engine).exit_code == 0


def test_a_current_engine_is_left_alone(tmp_path):
    engine = make_small_engine(tmp_path / "x.engine")
    before = hashes(engine)
    for _ in range(2):
        result = dsc("migrate", engine)
        assert (result.exit_code, "nothing to do" in result.stdout) == (0, True)
    data = json.loads(dsc("migrate", engine, "--json").stdout)
    assert data == {"engine": str(engine), "before": SCHEMA_VERSION, "now": SCHEMA_VERSION, "checked_bytes": 0}
    assert hashes(engine) == before


# -- what cannot be migrated: one message, and nothing is changed


def change_manifest(engine: Path, change: Any) -> None:
    path = engine / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_bytes(codec.dump_json(manifest))


def refused(engine: Path) -> str:
    before = hashes(engine)
    text = refusal("migrate", engine)
    assert hashes(engine) == before
    return text


def test_a_newer_engine(old):
    change_manifest(old, lambda m: m.update(schema_version=SCHEMA_VERSION + 1, novelty=1))
    text = refused(old)
    assert "another schema version" in text
    assert "try     a newer dsc" in text
    assert "novelty" not in text
    change_manifest(old, lambda m: m.update(schema_version=0))
    assert "try     build it again" in refused(old)


def test_a_damaged_engine(old):
    name = min(EngineFolder.open(migrated_copy(old)).manifest.tensors)
    change_tensor(old, name, flip_byte(0))
    text = refused(old)
    assert f"the bytes of {name} changed" in text
    change_tensor(old, name, flip_byte(0))
    weights = old / WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(content[:4000] + b"!" + content[4001:])  # between the header's text and the first tensor
    assert f"{WEIGHTS}: its bytes changed" in refused(old)
    weights.write_bytes(content)
    report = old / "report.json"
    report.write_bytes(report.read_bytes().replace(b"1", b"2", 1))
    assert "report.json: its bytes changed" in refused(old)
    report.unlink()
    assert "report.json: is missing" in refused(old)


def migrated_copy(engine: Path) -> Path:
    copy = shutil.copytree(engine, engine.with_name("copy.engine"), dirs_exist_ok=True)
    migrate(copy)
    return copy


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.pop("spec"), "spec is missing"),
        (lambda m: m.update(serving={"gpu": "h200"}), None),  # no version 1 engine has the key: it is replaced
        (lambda m: m.update(migrated=5), "migrated"),
        (lambda m: m.update(surprise=1), "surprise is unknown"),
        (lambda m: m.pop("schema_version"), "is not the manifest of an engine"),
    ],
)
def test_a_manifest_that_does_not_fit_its_version(change, told, old):
    change_manifest(old, change)
    if told is None:
        assert migrate(old).before == 1
    else:
        text = refused(old)
        assert "manifest.json" in text
        assert told in text


def test_what_is_no_engine(tmp_path):
    assert "no such engine" in refusal("migrate", tmp_path / "nowhere")
    assert "is no engine" in refused(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    assert "is not valid JSON" in refused(tmp_path)


def test_a_folder_that_cannot_be_written(old):
    """By a user whom permissions hold, in a folder that all may read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        engine = shutil.copytree(old, folder / "x.engine")
        engine.chmod(0o555)
        before = hashes(engine)
        command = [sys.executable, "-c", CHILD, str(engine), "-1", "0", "as nobody"]
        process = subprocess.run(command, capture_output=True)
        assert process.returncode == 2, process.stderr
        text = process.stdout.decode()
        assert f"{engine}: the engine cannot be migrated in its place: the folder cannot be written" in text
        assert "Permission denied" in text
        assert hashes(engine) == before
        engine.chmod(0o755)


def test_a_link_is_not_written_through(old, tmp_path):
    (tmp_path / "thesis").write_text("words")
    (old / "manifest.json.partial").symlink_to(tmp_path / "thesis")
    assert "cannot be written" in refusal("migrate", old)
    assert (tmp_path / "thesis").read_text() == "words"


def test_two_at_a_time(old):
    lock = os.open(old, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "another program is migrating this engine" in refused(old)
    os.close(lock)
    migrate(old)


# -- killed between any two calls that change the disk

# Arguments: the engine, the number of the call before which the process ends, 1 to do half of that call if it writes, and
# one more to be no longer root, who may write anywhere.
CHILD = """
import os, sys
from pathlib import Path
from dsc.runtime.errors import DscError
from dsc.runtime.migrate import migrate

left, half = int(sys.argv[2]), sys.argv[3] == "1"

def ending(call, name):
    def run(*arguments, **options):
        global left
        if left == 0:
            if half and name == "write":
                call(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os._exit(9)
        left -= 1
        return call(*arguments, **options)
    return run

for name in ("open", "write", "fsync", "rename", "unlink", "close"):
    setattr(os, name, ending(getattr(os, name), name))
if sys.argv[4:] and os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    migrate(Path(sys.argv[1]))
except DscError as error:
    print(error.text())
    sys.exit(2)
"""


def test_killed_at_any_moment_it_is_old_or_new(old, tmp_path):
    before, after = hashes(old), hashes(migrated_copy(old))
    seen = []
    for half in ("0", "1"):
        for number in range(40):
            engine = tmp_path / "killed.engine"
            shutil.rmtree(engine, ignore_errors=True)
            shutil.copytree(old, engine)
            code = subprocess.run([sys.executable, "-c", CHILD, str(engine), str(number), half], timeout=60).returncode
            found = hashes(engine)
            found.pop("manifest.json.partial", None)
            assert found in (before, after), (number, half)
            seen.append((code, found == after))
            migrate(engine)  # whatever there is, the next one ends in the same bytes and leaves nothing
            assert hashes(engine) == after
            if code == 0:
                break
        assert code == 0
    assert set(seen) == {(9, False), (9, True), (0, True)}
