"""Write safetensors files whose layout is known: pieces arrive in any order, from any thread, and go to their place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from dsc.compiler.hashed_file import HashedFile, as_bytes
from dsc.compiler.journal import Journal
from dsc.compiler.safetensors_layout import FileLayout, Slot
from dsc.compiler.workers import work_through
from dsc.runtime.disk import sync


class SafetensorsWriter:
    """`with SafetensorsWriter(folder, layouts, journal) as files: files.write(...); files.finish()`.

    journal   files it knows as finished are left as they are; the others are opened as they lie there
    released  what is on the disk leaves the system's cache
    """

    def __init__(self, folder: Path, layouts: Sequence[FileLayout], journal: Journal, released: bool = False) -> None:
        self._folder, self._layouts, self._journal, self._released = folder, layouts, journal, released
        self._files: dict[str, HashedFile] = {}
        self._slots: dict[str, tuple[str, Slot]] = {
            slot.name: (layout.location, slot) for layout in layouts for slot in layout.slots
        }

    def __enter__(self) -> SafetensorsWriter:
        for layout in self._layouts:
            path = self._folder / layout.location
            path.parent.mkdir(parents=True, exist_ok=True)
            if layout.location not in self._journal.files:
                self._files[layout.location] = HashedFile(path, layout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def write(self, name: str, offset: int, values: torch.Tensor) -> None:
        """Put values at a byte of a tensor, and hash what can be hashed of its file."""
        location, slot = self._slots[name]
        data = as_bytes(values)
        assert offset + data.nbytes <= slot.nbytes, (name, offset, data.nbytes, slot.nbytes)
        self._files[location].write(data, slot.offset + offset)
        self._hash(location, data, slot.offset + offset)

    def done(self, name: str, offset: int, nbytes: int) -> None:
        """Some bytes of a tensor lie there since an earlier build."""
        location, slot = self._slots[name]
        if location in self._files:
            self._files[location].done(slot.offset + offset, slot.offset + offset + nbytes)

    def sync(self) -> None:
        """Have what is written so far on the disk, and say so in the journal."""
        mark = self._journal.mark()
        for file in list(self._files.values()):
            file.sync()
            if self._released:
                file.release()
        for folder in sorted({(self._folder / layout.location).parent for layout in self._layouts}):
            sync(folder)
        self._journal.synced(mark)

    def finish(self, threads: int = 1) -> tuple[dict[str, str], dict[str, str]]:
        """Have everything hashed and on the disk; returns sha256 of tensors by name, parts_sha256 of files by location."""
        work_through(self._files, self._hash, threads)
        self.sync()
        tensors: dict[str, str] = {}
        for layout in self._layouts:
            tensors |= self._journal.files[layout.location][1]
        return tensors, {layout.location: self._journal.files[layout.location][0] for layout in self._layouts}

    def _hash(self, location: str, data: memoryview | None = None, offset: int = 0) -> None:
        file = self._files[location]
        if file.hash(data, offset):
            self._journal.add_file(location, file.parts_sha256, file.tensors)
