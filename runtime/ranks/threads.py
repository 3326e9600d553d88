"""Several ranks in one process, each a thread with a communicator of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from dsc.plugins.communicator import communicating

Result = TypeVar("Result")
SECONDS = 1800.0  # that a rank waits for the others; one that fails lets them go at once


def run_ranks(ranks: int, function: Callable[[int], Result], seconds: float = SECONDS) -> list[Result]:
    """`function(rank)` on a thread for each rank, all at a time; their results in the order of the ranks.

    seconds  that a rank may wait for the others
    raises   what the first rank to fail raised; the others, which wait for it, are let go
    """
    meeting, failures = Meeting(ranks, seconds), list[BaseException]()

    def run(rank: int) -> Result:
        with communicating(ThreadRank(rank, ranks, meeting)):
            return function(rank)

    def done(rank: Future[Result]) -> None:
        error = rank.exception()
        if error is not None:
            failures.append(error)
            meeting.barrier.abort()  # whoever this lets go comes later

    with ThreadPoolExecutor(ranks) as threads:
        running = [threads.submit(run, rank) for rank in range(ranks)]
        for rank in running:
            rank.add_done_callback(done)
    if failures:
        raise failures[0]
    return [rank.result() for rank in running]


class Meeting:
    """Where ranks put their tensors and wait for each other."""

    def __init__(self, ranks: int, seconds: float) -> None:
        self.barrier = threading.Barrier(ranks, timeout=seconds)
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
