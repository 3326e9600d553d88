"""A memory cgroup of its own for one command: a limit that the system holds, page cache counted. Needs root."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryCgroup:
    """`subprocess.Popen(..., preexec_fn=cgroup.enter)`."""

    folder: Path

    def enter(self) -> None:
        """Put this process into it."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int:
        """The most it ever held, page cache included."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (self.folder / name).is_file():
                return int((self.folder / name).read_text())
        return 0

    def kills(self) -> int:
        """Processes that the system killed because of the limit."""
        for name in ("memory.oom_control", "memory.events"):
            if (self.folder / name).is_file():
                lines = (line.split() for line in (self.folder / name).read_text().splitlines())
                return int(dict(lines).get("oom_kill", 0))
        return 0


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A cgroup of version 1 or 2; OSError where the machine does not let one be made."""
    version1 = ROOT / "memory"
    folder = (version1 if version1.is_dir() else ROOT) / f"dsc-{os.getpid()}"
    folder.mkdir()
    try:
        name = "memory.limit_in_bytes" if version1.is_dir() else "memory.max"
        (folder / name).write_text(str(limit_bytes))
        yield MemoryCgroup(folder)
    finally:
        for _ in range(50):  # it is busy until its last process is gone altogether
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)
