"""The processes of the ranks on the leader's machine: started with it, watched, and ended with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO

from dsc.runtime.errors import DscError

END_SECONDS = 10.0  # that a rank has to end by itself
_TAIL = 4000  # characters of what a process wrote last


@dataclass(frozen=True)
class Child:
    """A rank's process and what it writes."""

    rank: int
    process: subprocess.Popen[bytes]
    written: IO[bytes]

    def how_it_ended(self) -> str:
        """For example "killed by SIGKILL", then the last it wrote."""
        try:
            code = self.process.wait(1.0)  # its connection is gone before it is
        except subprocess.TimeoutExpired:
            return "it left"
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"exit code {code}"
        if self.written.closed:
            return how
        self.written.seek(0)
        text = self.written.read().decode(errors="replace").strip()
        return f"{how}: {text[-_TAIL:]}" if text else how


class Children:
    """The ranks from 1 on, as processes of this one. Each ends when its standard input does: when this process is gone."""

    def __init__(self, folder: str, ranks: int, port: int) -> None:
        self._children: list[Child] = []
        try:
            for rank in range(1, ranks):
                self._children.append(_start(rank, folder, ranks, port))
        except BaseException:
            self.kill()
            self.wait()
            raise

    def check(self) -> None:
        """Raise DscError naming a rank whose process has ended."""
        for child in self._children:
            if child.process.poll() is not None:
                raise DscError(f"rank {child.rank} of the engine has ended", got=child.how_it_ended())

    def of(self, rank: int) -> Child:
        """One rank's process."""
        return self._children[rank - 1]

    def kill(self) -> None:
        """End all at once; `wait` must follow."""
        for child in self._children:
            child.process.kill()

    def wait(self) -> None:
        """Until all have ended; whoever takes long is killed."""
        until = time.monotonic() + END_SECONDS
        for child in self._children:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            if child.process.stdin is not None:
                child.process.stdin.close()
            child.written.close()


def _start(rank: int, folder: str, ranks: int, port: int) -> Child:
    written = tempfile.TemporaryFile()  # noqa: SIM115 - the child's end is read when it died
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", "dsc.runtime.ranks.follow"]
    arguments = ["--rank", str(rank), "--ranks", str(ranks), "--port", str(port), "--parent", str(os.getpid()), folder]
    process = subprocess.Popen(
        command + arguments,
        stdin=subprocess.PIPE,
        stdout=written,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C in a terminal is for the leader
    )
    return Child(rank, process, written)


def end_with(parent: int) -> None:
    """End this process when `parent`, which started it, is gone; from now on, whatever it is doing."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    read = threading.Thread(target=os.read, args=(sys.stdin.fileno(), 1), daemon=True)
    read.start()  # ends with the parent's end of the pipe
    while read.is_alive() and os.getppid() == parent:  # a process that the parent forked may hold the pipe open
        read.join(1.0)
    os._exit(1)
