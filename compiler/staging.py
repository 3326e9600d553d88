"""A folder is built beside its place, under a hidden name, and moved there when it is whole."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from dsc.runtime.artifact import looks_like_engine
from dsc.runtime.errors import DscError

_SPARE_BYTES = 16 << 20  # graphs, programs, tokenizer and manifest, beside the weights

# A disk, quota or file that can take no more, or a place that never could; other errors may be the source's.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


class Staging:
    """`with Staging(target, weight_bytes) as stage:` fill `stage.folder`, then `stage.commit()`.

    target     a new path, an empty folder, or an engine, which is replaced at the end; anything else is refused
    leftover   whether an earlier build of this target was cut short; what it left is removed

    One build of a target runs at a time: the folder being built is locked, and the lock ends with its process. A build
    that fails removes what it wrote; one that is killed leaves only the hidden folder, which has no manifest.
    """

    def __init__(self, target: Path, weight_bytes: int) -> None:
        self.target = target.resolve()
        self.weight_bytes = weight_bytes
        self.folder = self.target.with_name(f".{self.target.name}.partial")
        self._replaced = self.target.with_name(f".{self.target.name}.replaced")
        self.leftover = False
        self._lock, self._committed = -1, False

    def __enter__(self) -> Staging:
        self._check_target()
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._clean_up()
        except OSError as error:
            self._release()
            raise DscError("cannot be written", where=str(self.target), got=error.strerror or str(error)) from error
        self._check_space()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:  # afterwards the name may be another build's
            shutil.rmtree(self.folder, ignore_errors=True)
        self._release()
        if isinstance(error, OSError) and error.errno in _NOT_WRITTEN:
            got = error.strerror or str(error)
            raise DscError("the build cannot be written", where=str(self.target), got=got) from error

    def commit(self) -> None:
        """Move the folder to its target, an engine there going away only then."""
        sync(self.folder)
        if self.target.exists():
            os.rename(self.target, self._replaced)
        os.rename(self.folder, self.target)
        self._committed = True
        sync(self.target.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _check_target(self) -> None:
        target = self.target
        if not target.name or (target.exists() and not target.is_dir()):
            raise DscError("cannot become an engine", where=str(target), wanted="a folder, or a path that is free")
        if target.is_dir() and any(target.iterdir()) and not looks_like_engine(target):
            raise DscError(
                "is a folder that holds something else than an engine",
                where=str(target),
                wanted="an engine to replace, an empty folder or a path that is free",
                try_="--output with another path",
            )

    def _take_lock(self) -> int:
        """Make the folder and lock it. A folder that its owner moved away meanwhile is not it: look again."""
        while True:
            self.folder.mkdir(exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.folder.exists() and os.path.samestat(os.fstat(lock), self.folder.stat()):
                    return lock
            except BlockingIOError:
                os.close(lock)
                raise DscError("another build is writing this engine", where=str(self.target)) from None
            except OSError:
                os.close(lock)
                raise
            os.close(lock)

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _clean_up(self) -> None:
        """Remove what a killed build left; put back an engine that was about to be replaced."""
        for item in self.folder.iterdir():
            self.leftover = True
            shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
        if self._replaced.exists():
            self.leftover = True
            if self.target.exists():
                shutil.rmtree(self._replaced)
            else:
                os.rename(self._replaced, self.target)

    def _check_space(self) -> None:
        need, free = self.weight_bytes + _SPARE_BYTES, shutil.disk_usage(self.folder).free
        if free < need:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._release()
            raise DscError(
                "not enough disk space",
                where=str(self.target.parent),
                wanted=f"{need:,} bytes, {self.weight_bytes:,} of them weights",
                got=f"{free:,} bytes free",
                try_="--output on another disk",
            )


def sync(path: Path) -> None:
    """Have a file or folder reach the disk, so that a manifest never outlives what it lists."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
