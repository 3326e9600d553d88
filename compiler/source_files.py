"""Read files that must not change meanwhile: by position, into memory of one's own, from any thread.

Nothing is mapped: a file that shrinks or a disk that fails is an error then, not the death of the process, and what counts
as the process's memory is what was asked for.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dsc.runtime.errors import DscError, raise_all

READ_BYTES_MAX = 1 << 30  # one call of the system reads no more than 2 GiB


class Stamp(NamedTuple):
    """What tells that a file is not the one it was."""

    nbytes: int
    changed_ns: int


class SourceFiles:
    """Files by path, as they are now. Handles stay open until `close` or the end of the object."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.stamps = {path: _stamp(os.stat(path)) for path in sorted(set(paths))}
        self._handles: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, out: memoryview) -> None:
        """Fill `out`, which is of bytes, from a byte of a file; raises DscError where the file changed, else OSError."""
        handle = self._handle(path)
        while out.nbytes:
            try:
                count = os.preadv(handle, [out[:READ_BYTES_MAX]], offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error
            if not count:
                raise DscError("changed while it was read", where=str(path), got=f"it ends at byte {offset}")
            out, offset = out[count:], offset + count

    def expect(self, path: Path, offset: int, nbytes: int) -> None:
        """Have the system fetch bytes that will be read soon."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle(path), offset, nbytes, os.POSIX_FADV_WILLNEED)

    def release(self, path: Path, offset: int, nbytes: int) -> None:
        """Have the system forget bytes that will not be read again: its cache has room for others then."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle(path), offset, nbytes, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """Raise DscError with every file that is not as it was."""
        raise_all("the source", [fault for path in self.stamps if (fault := self._fault(path))])

    def identity(self, path: Path, content: str) -> str:
        """Differs where a file does; `content` is what is known of what is in it."""
        stamp = self.stamps[path]
        return f"{stamp.nbytes} bytes, {stamp.changed_ns} ns, {hashlib.sha256(content.encode()).hexdigest()}"

    def close(self) -> None:
        """Close the handles; reading opens them again."""
        with self._lock:
            for handle in self._handles.values():
                os.close(handle)
            self._handles.clear()

    def __del__(self) -> None:
        self.close()

    def _handle(self, path: Path) -> int:
        with self._lock:
            if path not in self._handles:
                if fault := self._fault(path):
                    raise fault
                self._handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._handles[path]

    def _fault(self, path: Path) -> DscError | None:
        try:
            if _stamp(os.stat(path)) == self.stamps[path]:
                return None
            got = "another size or time of change"
        except OSError as error:
            got = error.strerror or str(error)
        return DscError("changed while it was read", where=str(path), got=got)


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns)
