"""Bring an engine of an older schema version to the one this program reads, without its checkpoint.

A step takes a manifest's JSON of one version to the next; then all is hashed. Weights are never touched, and nothing but manifest.json is
replaced, in one rename: whatever ends a migration, the engine is either old or new. A step that must change another file,
a program for instance, has to write it under a new name, which only the new manifest lists.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsc.runtime import codec
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.disk import sync
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import NAME, SCHEMA_VERSION, FileEntry, Manifest, other_version, version_of


def _from_1(manifest: dict[str, Any]) -> dict[str, Any]:
    """Version 2 has `serving`, which the compiler of version 1 did not suggest."""
    return {**manifest, "serving": None}


def _from_2(manifest: dict[str, Any]) -> dict[str, Any]:
    """Version 3 hashes files of tensors by their parts, which follows when the sha256 they have is found right."""
    return manifest


STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1, 2: _from_2}  # from each version to the next


@dataclass(frozen=True)
class Migration:
    """What became of an engine: its schema version before and now, and the bytes that were checked."""

    engine: Path
    before: int
    now: int
    checked_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The same as JSON data."""
        return {**vars(self), "engine": str(self.engine)}

    def text(self) -> str:
        """In a line."""
        if self.before == self.now:
            return f"{self.engine}: schema version {self.now} is the current one, nothing to do"
        return f"{self.engine}: schema version {self.before} is now {self.now}, {self.checked_bytes:,} bytes checked"


def migrate(
    path: Path,
    begin: Callable[[int], None] = lambda nbytes: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Migration:
    """Migrate an engine in place. Every file is hashed before; `begin` is told the bytes of all tensors, `advance` those done.

    Raises DscError, the engine being as it was: no engine, one of a newer version, a damaged one, a folder that cannot be
    written, another migration under way.
    """
    with _locked(path):
        where = str(path / NAME)
        old = codec.read_json(path / NAME, where)
        version = version_of(old, where)
        if version == SCHEMA_VERSION:
            EngineFolder.open(path)
            return Migration(path, version, version, 0)
        if version not in STEPS:
            raise other_version(version, where)
        manifest = Manifest.from_json(_stepped(old), where)
        with _written_beside(path) as write:
            engine = EngineFolder(path, manifest)
            engine.check_files()
            begin(sum(tensor.bytes for tensor in manifest.tensors.values()))
            engine.verify_hashes(advance)
            manifest = _hashed_by_parts(engine)
            write(codec.dump_json(manifest.to_json()))
        assert EngineFolder.open(path).manifest == manifest, where
    return Migration(path, version, SCHEMA_VERSION, sum(entry.bytes for entry in manifest.files.values()))


def _stepped(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest's JSON through all steps. It keeps the content hash it had: what was measured names the engine by that."""
    first, before = manifest["schema_version"], manifest.get("migrated", [])
    content = codec.dump_json({key: value for key, value in manifest.items() if key != "migrated"})
    for version in range(first, SCHEMA_VERSION):
        manifest = {**STEPS[version](manifest), "schema_version": version + 1}
    earlier = {"schema_version": first, "content_hash": hashlib.sha256(content).hexdigest()}
    # Of another kind it is a fault, which reading the manifest tells.
    return {**manifest, "migrated": [*before, earlier] if isinstance(before, list) else before}


def _hashed_by_parts(engine: EngineFolder) -> Manifest:
    """The manifest of an engine whose hashes are right, with `parts_sha256` for every file that tensors lie in."""
    files = {
        path: FileEntry(engine.manifest.files[path].bytes, parts_sha256=engine.parts_sha256(path))
        for path in {tensor.file for tensor in engine.manifest.tensors.values()}
    }
    return replace(engine.manifest, files={**engine.manifest.files, **files})


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One migration of an engine at a time; the lock ends with its process."""
    if not (path / NAME).is_file():
        EngineFolder.open(path)  # says what is wrong
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise DscError("cannot be read", where=str(path), got=error.strerror or str(error)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DscError("another program is migrating this engine", where=str(path)) from None
    finally:
        os.close(lock)


@contextmanager
def _written_beside(path: Path) -> Iterator[Callable[[bytes], None]]:
    """A function that replaces the manifest at once. That the folder can be written is found out on entering."""
    beside = path / f"{NAME}.partial"
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise _not_written(path, error) from error

    def write(content: bytes) -> None:
        try:
            while content:
                content = content[os.write(handle, content) :]
            os.fsync(handle)
            os.rename(beside, path / NAME)
            sync(path)
        except OSError as error:
            raise _not_written(path, error) from error

    try:
        yield write
    finally:
        os.close(handle)
        beside.unlink(missing_ok=True)  # there only where it went wrong


def _not_written(path: Path, error: OSError) -> DscError:
    return DscError(
        "the engine cannot be migrated in its place: the folder cannot be written",
        where=str(path),
        got=error.strerror or str(error),
        try_="a copy of the engine that may be written",
    )
