"""A file that is hashed while it is written: the sha256 of its tensors, and its own by them, follow behind the writers."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from dsc.compiler.safetensors_layout import FileLayout, Slot

_READ_BYTES = 1 << 19  # read back at a time


class HashedFile:
    """A file of a known layout. Pieces are written in any order, from any thread; hashing goes from the start to the end.

    What was just written is hashed where it is; what was written early waits its turn and is read back.
    What lies in the file from an earlier build stays, and is told by `done`.

    tensors       sha256 of each, once it is complete
    parts_sha256  of the whole file (dsc.runtime.manifest.FileEntry), "" until it is complete: no byte is hashed twice
    """

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self.layout = layout
        self.parts_sha256 = ""
        self.tensors: dict[str, str] = {}
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._parts, self._hashed = hashlib.sha256(), 0
        self._written: dict[int, int] = {}  # ranges behind `_limit`: first byte -> one past the last
        self._limit = 0  # everything before it is written
        self._lock, self._hashing = threading.Lock(), threading.Lock()
        self._spans = _spans(layout)
        self._span = next(self._spans)
        self._tensor = hashlib.sha256()
        os.ftruncate(self._handle, layout.nbytes)
        write_all(self._handle, memoryview(layout.header), 0)
        self.done(0, len(layout.header))
        for before, after in zip(layout.slots, layout.slots[1:], strict=False):
            self.done(before.offset + before.nbytes, after.offset)  # gaps are zeros

    def write(self, data: memoryview, offset: int) -> None:
        """Put bytes into place, for good."""
        write_all(self._handle, data, offset)
        self.done(offset, offset + data.nbytes)

    def done(self, first: int, last: int) -> None:
        """Some bytes are what they shall be."""
        if first < last:
            with self._lock:
                self._written[first] = last
                while (end := self._written.pop(self._limit, None)) is not None:
                    self._limit = end

    def hash(self, data: memoryview | None = None, offset: int = 0) -> bool:
        """Hash what can be; True for the one call that comes to the end. Returns at once where another thread is at it.

        data  bytes that were written at `offset`, which need not be read back
        """
        if self._hashed == self.layout.nbytes or not self._hashing.acquire(blocking=False):
            return False
        try:
            if data is not None and offset <= self._hashed < offset + data.nbytes <= self._limit:
                self._hash_to(offset + data.nbytes, lambda first, last: data[first - offset : last - offset])
            if self._limit > self._hashed:
                read_back = partial(self._read_back, memoryview(bytearray(min(_READ_BYTES, self.layout.nbytes))))
                while (limit := self._limit) > self._hashed:
                    self._hash_to(limit, read_back)
            if self._hashed == self.layout.nbytes and not self.parts_sha256:
                self.parts_sha256 = self._parts.hexdigest()
                return True
            return False
        finally:
            self._hashing.release()

    def sync(self) -> None:
        """Have the written bytes reach the disk."""
        os.fdatasync(self._handle)

    def release(self) -> None:
        """Have the system forget what is on the disk and will not be read back."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, 0, self._hashed, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._handle)

    def _read_back(self, buffer: memoryview, first: int, last: int) -> memoryview:
        _read_all(self._handle, buffer[: last - first], first)
        return buffer[: last - first]

    def _hash_to(self, limit: int, bytes_of: Callable[[int, int], memoryview]) -> None:
        """Hash up to a byte of the file; `bytes_of` gives what lies from one byte to another."""
        while self._hashed < limit:
            end, slot = self._span
            last = min(limit, end, self._hashed + _READ_BYTES)
            (self._tensor if slot else self._parts).update(bytes_of(self._hashed, last))
            self._hashed = last
            if self._hashed == end:
                if slot:
                    self._parts.update(self._tensor.digest())
                    self.tensors[slot.name] = self._tensor.hexdigest()
                self._span, self._tensor = next(self._spans, (end, None)), hashlib.sha256()


def _spans(layout: FileLayout) -> Iterator[tuple[int, Slot | None]]:
    """(one past the last byte, the tensor or None for what lies between tensors), from the start to the end of a file."""
    for slot in layout.slots:
        yield slot.offset, None
        yield slot.offset + slot.nbytes, slot


def write_all(handle: int, data: memoryview, offset: int) -> None:
    """All of it: one call of the system writes no more than 2 GiB."""
    while data.nbytes:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def _read_all(handle: int, out: memoryview, offset: int) -> None:
    while out.nbytes:
        count = os.preadv(handle, [out], offset)
        assert count, (handle, offset, "a file being written became shorter")
        out, offset = out[count:], offset + count


def as_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a tensor, in row-major order."""
    return values.contiguous().view(-1).view(torch.uint8).numpy().data
