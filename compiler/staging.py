"""A folder is built beside its place, under a hidden name, and moved there when it is whole."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from dsc.compiler.journal import Journal
from dsc.runtime.artifact import looks_like_engine
from dsc.runtime.disk import sync
from dsc.runtime.errors import DscError

JOURNAL, WEIGHTS = ".journal", "weights"
_SPARE_BYTES = 16 << 20  # graphs, programs, tokenizer and manifest, beside the weights

# A disk, quota or file that can take no more, or a place that never could; other errors may be the source's.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


class Staging:
    """`with Staging(target, weight_bytes, identity) as stage:` fill `stage.folder`, then `stage.commit()`.

    target     a new path, an empty folder, or an engine, which is replaced at the end; anything else is refused
    identity   what an earlier build of this target must have been made of, to be gone on with; None never goes on
    journal    what is done, by that build too: its weights lie in `folder`, and nothing else of it
    leftover   whether an earlier build of this target was cut short
    kept       after a failure, whether what was done is kept for the next build

    One build of a target runs at a time: the folder being built is locked, and the lock ends with its process. A build
    that is killed leaves only the hidden folder, in which the manifest comes last; one that fails leaves it too when some
    weights are done, unless it was told that they are of no use.
    """

    def __init__(self, target: Path, weight_bytes: int, identity: Mapping[str, str] | None = None) -> None:
        self.target = target.resolve()
        self.weight_bytes = weight_bytes
        self.folder = self.target.with_name(f".{self.target.name}.partial")
        self.journal = Journal()
        self.leftover = self.kept = False
        self._identity = identity
        self._replaced = self.target.with_name(f".{self.target.name}.replaced")
        self._lock, self._committed, self._useless = -1, False, identity is None

    def __enter__(self) -> Staging:
        self.check_target()
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            if self._identity is not None:
                self.journal = Journal(self.folder / JOURNAL, self._identity)
            self._clean_up()
            self._check_space()
            self.journal.begin()
        except OSError as error:
            self._leave()
            raise DscError("cannot be written", where=str(self.target), got=error.strerror or str(error)) from error
        except DscError:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if isinstance(error, OSError) and error.errno in _NOT_WRITTEN:
            got = error.strerror or str(error)
            try_ = "the same command, once there is room: it goes on from what is done" if self.kept else ""
            raise DscError("the build cannot be written", where=str(self.target), got=got, try_=try_) from error

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """In here a DscError says that the checkpoint or the recipe is at fault: nothing done is of use to another build."""
        try:
            yield
        except DscError:
            self._useless = True
            raise

    def resumed(self) -> str:
        """What to tell of an earlier build that was cut short; "" where there was none."""
        if self.journal.goes_on:
            return "goes on with a build that was cut short"
        if self.journal.differs:
            changed = [key for key in self.journal.differs if key != "weights"] or ["weights"]
            return f"starts anew: changed since the build that was cut short: {', '.join(changed)}"
        return ""

    def commit(self) -> None:
        """Move the folder to its target, an engine there going away only then."""
        sync(self.folder)
        if self.target.exists():
            os.rename(self.target, self._replaced)
        os.rename(self.folder, self.target)
        self._committed = True
        sync(self.target.parent)
        if self._identity is not None:
            os.unlink(JOURNAL, dir_fd=self._lock)  # the lock is the folder, whatever its name is by now
        shutil.rmtree(self._replaced, ignore_errors=True)

    def check_target(self) -> None:
        """Raise DscError where something stands at the target that a build must not replace."""
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

    def _leave(self) -> None:
        """Remove what is of no use to the next build, then let it begin."""
        self.journal.close()
        if self._lock >= 0:
            if not self._committed:  # afterwards the name may be another build's
                self.kept = bool(self.journal.jobs) and not self._useless
                if not self.kept:
                    shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def _clean_up(self) -> None:
        """Remove what an earlier build left, but for what can be gone on with; put back an engine about to be replaced."""
        kept = (JOURNAL, WEIGHTS) if self.journal.goes_on else ()
        for item in self.folder.iterdir():
            self.leftover = True
            if item.name not in kept:
                shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
        if self._replaced.exists():
            self.leftover = True
            if self.target.exists():
                shutil.rmtree(self._replaced)
            else:
                os.rename(self._replaced, self.target)

    def missing_bytes(self) -> int:
        """Bytes that the build will still write, beside what an earlier one left in the folder."""
        there = sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())
        return max(self.weight_bytes - there, 0) + _SPARE_BYTES

    def _check_space(self) -> None:
        need, free = self.missing_bytes(), shutil.disk_usage(self.folder).free
        if free < need:
            raise DscError(
                "not enough disk space",
                where=str(self.target.parent),
                wanted=f"{need:,} bytes, {need - _SPARE_BYTES:,} of them weights",
                got=f"{free:,} bytes free",
                try_="--output on another disk",
            )
