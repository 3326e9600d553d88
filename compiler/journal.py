"""What a build has done, on disk, so that the next one goes on from there: a line for each thing done, JSON and its CRC-32.

A line is written after its bytes. Against a kill that is enough, since what a process wrote outlives it; against the end of
the machine it is not, so every few seconds everything is synced and a line says how much is on the disk for certain. Lines
after that are believed only while the same system runs.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsc.compiler.quantize import Errors

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FORMAT = 3
UNREADABLE = "the journal, which is damaged or of another version of dsc"
_ERROR_TYPES = {name: type(value) for name, value in asdict(Errors()).items()}


class Journal:
    """Jobs and files that are done. Without a path nothing is kept; from any thread.

    jobs     number in the plan -> what rounding cost
    files    finished file -> its parts_sha256 and the sha256 of its tensors
    differs  what has changed since an earlier build that was cut short, whose work is of no use then; sorted
    """

    def __init__(self, path: Path | None = None, identity: Mapping[str, str] | None = None) -> None:
        self.jobs: dict[int, Errors] = {}
        self.files: dict[str, tuple[str, dict[str, str]]] = {}
        self.differs: list[str] = []
        self._path, self._identity = path, dict(identity or {})
        self._lock = threading.Lock()
        self._handle = -1
        self._lines = self._good_bytes = 0
        if path is not None and path.is_file():
            self._read(path)

    def begin(self) -> None:
        """Open the journal for writing: the old one where it can be gone on with, else a new one."""
        if self._path is None:
            return
        self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._handle, self._good_bytes if self._lines else 0)
        if not self._lines:
            self._append({"format": FORMAT, "identity": self._identity})
        self._append({"boot": _boot_id()})

    def add_job(self, number: int, errors: Errors) -> None:
        """A job's bytes are written."""
        with self._lock:
            self.jobs[number] = errors
            changed = {key: value for key, value in asdict(errors).items() if value}
            self._append({"job": number, **({"errors": changed} if changed else {})})

    def add_file(self, location: str, parts_sha256: str, tensors: dict[str, str]) -> None:
        """A file is written and hashed."""
        with self._lock:
            self.files[location] = (parts_sha256, tensors)
            self._append({"file": location, "parts_sha256": parts_sha256, "tensors": tensors})

    def forget(self, locations: Iterable[str], numbers: Iterable[int]) -> None:
        """Files and jobs that will be done again."""
        for location in list(locations):
            del self.files[location]
        for number in list(numbers):
            del self.jobs[number]

    def mark(self) -> int:
        """To be taken before syncing, for `synced` after it."""
        with self._lock:
            return self._lines

    def synced(self, mark: int) -> None:
        """All that was written before `mark` is on the disk."""
        with self._lock:
            self._append({"synced": mark})
            if self._handle >= 0:
                os.fdatasync(self._handle)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _append(self, entry: dict[str, Any]) -> None:
        self._lines += 1
        if self._handle >= 0:
            line = _with_checksum(json.dumps(entry, separators=(",", ":")).encode())
            while line:
                line = line[os.write(self._handle, line) :]

    # -- reading

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        entries, self._good_bytes = _entries(content)
        if not entries or entries[0].get("format") != FORMAT:
            self.differs = [UNREADABLE] if b"\n" in content else []  # without a whole line, nothing was done either
            return
        before = entries[0].get("identity")
        if not isinstance(before, dict) or before != self._identity:
            before = before if isinstance(before, dict) else {}
            keys = before.keys() | self._identity.keys()
            self.differs = sorted(key for key in keys if before.get(key) != self._identity.get(key))
            return
        for entry in _believed(entries):
            if "job" in entry:
                self.jobs[entry["job"]] = Errors(**entry.get("errors", {}))
            elif "file" in entry:
                self.files[entry["file"]] = (entry["parts_sha256"], entry["tensors"])
        self._lines = len(entries)

    @property
    def goes_on(self) -> bool:
        """Whether an earlier build did something that this one need not do again."""
        return bool(self.jobs)


def _entries(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The lines up to the first that is cut short or damaged, and how many bytes they are."""
    entries, good = [], 0
    for line in content.splitlines(keepends=True):
        text, _, _ = line.rpartition(b" ")
        if line != _with_checksum(text):
            break
        entries.append(json.loads(text))
        good += len(line)
    return entries, good


def _with_checksum(text: bytes) -> bytes:
    """A line as written: of a damaged one, no digit is to be taken for another."""
    return b"%s %08x\n" % (text, zlib.crc32(text))


def _believed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries whose bytes are there: those synced, and all others of the system that still runs."""
    believed: list[dict[str, Any]] = []
    recent: list[tuple[int, dict[str, Any]]] = []
    boot = ""
    for number, entry in enumerate(entries):
        if "boot" in entry:
            recent, boot = recent if entry["boot"] and entry["boot"] == boot else [], entry["boot"]
        elif "synced" in entry:
            believed += [item for place, item in recent if place < entry["synced"]]
            recent = [(place, item) for place, item in recent if place >= entry["synced"]]
        else:
            recent.append((number, entry))
    return believed + [item for _, item in recent] if boot and boot == _boot_id() else believed


def _boot_id() -> str:
    """Changes when the system starts; "" where it is not told."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
