"""Write safetensors files whose layout is known: pieces arrive in any order, from any thread, and go to their place.

A file has a hidden name until it is whole and on the disk.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

from dsc.compiler.safetensors_layout import FileLayout, Slot
from dsc.compiler.staging import sync

_HASHED_BYTES = 1 << 24  # at a time


class SafetensorsWriter:
    """`with SafetensorsWriter(folder, layouts) as files: files.write(...); files.finish()`.

    Without `finish` nothing is left behind.
    """

    def __init__(self, folder: Path, layouts: Sequence[FileLayout]) -> None:
        self._folder, self._layouts = folder, layouts
        self._handles: dict[str, int] = {}
        self._slots: dict[str, tuple[str, Slot]] = {
            slot.name: (layout.location, slot) for layout in layouts for slot in layout.slots
        }

    def __enter__(self) -> SafetensorsWriter:
        for layout in self._layouts:
            path = self._partial(layout)
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            self._handles[layout.location] = handle
            os.ftruncate(handle, layout.nbytes)
            _write(handle, memoryview(layout.header), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        for layout in self._layouts:
            self._partial(layout).unlink(missing_ok=True)

    def write(self, name: str, offset: int, values: torch.Tensor) -> int:
        """Put values at a byte of a tensor; returns how many bytes that were."""
        location, slot = self._slots[name]
        data = values.contiguous().view(-1).view(torch.uint8).numpy().data
        assert offset + data.nbytes <= slot.nbytes, (name, offset, data.nbytes, slot.nbytes)
        _write(self._handles[location], data, slot.offset + offset)
        return data.nbytes

    def finish(self, threads: int = 1) -> tuple[dict[str, str], dict[str, str]]:
        """Have everything on the disk under its final name; returns sha256 of tensors by name and of files by location."""
        tensors: dict[str, str] = {}
        files: dict[str, str] = {}
        with ThreadPoolExecutor(threads) as pool:
            for layout, (whole, parts) in zip(self._layouts, pool.map(self._finish_file, self._layouts), strict=True):
                files[layout.location] = whole
                tensors |= parts
        for folder in sorted({(self._folder / layout.location).parent for layout in self._layouts}):
            sync(folder)
        return tensors, files

    def _finish_file(self, layout: FileLayout) -> tuple[str, dict[str, str]]:
        handle = self._handles[layout.location]
        os.fsync(handle)
        hashes = _hash(handle, layout)
        os.rename(self._partial(layout), self._folder / layout.location)
        return hashes

    def _partial(self, layout: FileLayout) -> Path:
        path = self._folder / layout.location
        return path.with_name(f".{path.name}.partial")


def _write(handle: int, data: memoryview, offset: int) -> None:
    """All of it: one call of the system writes no more than 2 GiB."""
    while data.nbytes:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def _hash(handle: int, layout: FileLayout) -> tuple[str, dict[str, str]]:
    """sha256 of a file and of each of its tensors, read back in one pass."""
    whole, parts, done = hashlib.sha256(), {}, 0
    with mmap.mmap(handle, layout.nbytes, access=mmap.ACCESS_READ) as pages, memoryview(pages) as content:
        for slot in layout.slots:
            whole.update(content[done : slot.offset])
            part, done = hashlib.sha256(), slot.offset + slot.nbytes
            for start in range(slot.offset, done, _HASHED_BYTES):
                with content[start : min(start + _HASHED_BYTES, done)] as piece:  # else the mapping cannot close
                    whole.update(piece)
                    part.update(piece)
            parts[slot.name] = part.hexdigest()
    return whole.hexdigest(), parts
