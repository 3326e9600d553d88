"""Several ranks in one process, each a thread with a communicator of its own.

sums = run_ranks(4, lambda rank: CpuOp("reference", "AllReduce", {"x": parts[rank]}, {"ranks": 4})()["y"])
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch

from dsc.plugins.communicator import communicating

Result = TypeVar("Result")
SECONDS = 60.0  # that a rank waits for the others


def run_ranks(ranks: int, function: Callable[[int], Result]) -> list[Result]:
    """`function(rank)` on a thread for each rank, all at a time; their results in the order of the ranks.

    Raises what the first rank to fail raised; the others, which wait for it, are let go.
    """
    meeting, failures = Meeting(ranks), list[BaseException]()

    def run(rank: int) -> Result:
        with communicating(ThreadRank(rank, ranks, meeting)):
            return function(rank)

    def done(rank: Future[Result]) -> None:
        error = rank.exception()
        if error is not None:
            failures.append(error)
            meeting.barrier.abort()  # whoever this lets go comes later

    with one_parser(), ThreadPoolExecutor(ranks) as threads:
        running = [threads.submit(run, rank) for rank in range(ranks)]
        for rank in running:
            rank.add_done_callback(done)
    if failures:
        raise failures[0]
    return [rank.result() for rank in running]


@contextmanager
def one_parser() -> Iterator[None]:
    """Meanwhile one thread parses at a time: CPython 3.11 counts how deep all of them are together, and stops where that does
    not add up.
    """
    lock, parse = threading.Lock(), ast.parse

    def locked(*arguments: Any, **options: Any) -> Any:
        with lock:
            return parse(*arguments, **options)

    with mock.patch.object(ast, "parse", locked):
        yield


class Meeting:
    """Where ranks put their tensors and wait for each other."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=SECONDS)
        self.parts: dict[int, torch.Tensor] = {}


@dataclass(frozen=True)
class ThreadRank:
    """A communicator among the threads of `run_ranks`."""

    rank: int
    ranks: int
    meeting: Meeting

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Every rank's tensor; raises threading.BrokenBarrierError where a rank failed or did not come."""
        self.meeting.parts[self.rank] = x.clone()
        self.meeting.barrier.wait()
        parts = [self.meeting.parts[rank] for rank in range(self.ranks)]
        self.meeting.barrier.wait()  # nobody puts down its next one before all have these
        kinds = {(part.dtype, part.shape) for part in parts}
        assert len(kinds) == 1, f"ranks gather tensors of several kinds: {kinds}"
        return parts
