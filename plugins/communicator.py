"""How the ranks of an engine exchange tensors, as ops on a CPU see it.

Each thread has one communicator: that of its rank. Without one a thread is the only rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch


class Communicator(Protocol):
    """One rank of several. All of them make the same calls in the same order, with tensors of one shape."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Every rank's tensor, in the order of the ranks."""
        ...


class _Alone:
    rank, ranks = 0, 1

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (x,)


_threads = threading.local()


def communicator() -> Communicator:
    """The calling thread's."""
    found: Communicator = getattr(_threads, "communicator", _Alone())
    return found


@contextmanager
def communicating(by: Communicator) -> Iterator[None]:
    """The calling thread is one of several ranks meanwhile."""
    before = communicator()
    _threads.communicator = by
    try:
        yield
    finally:
        _threads.communicator = before


def gather(x: torch.Tensor, ranks: int) -> Sequence[torch.Tensor]:
    """Every rank's `x`, in the order of the ranks; `ranks` is how many the graph was built for."""
    by = communicator()
    assert by.ranks == ranks, f"a graph for {ranks} ranks runs on {by.ranks}"
    return by.all_gather(x)
