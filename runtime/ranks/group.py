"""The ranks of one engine, as one of them sees the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


def alone(number: int) -> int:
    """The least of the ranks' numbers where there is one rank."""
    return number


class Ends:
    """What frees this process from a collective that another rank will not come to, the last one first. It is run once; what
    is added later is run at once.

    died  whether it was another rank's death, and not the engine's being closed
    """

    def __init__(self) -> None:
        self.died = False
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] | None = []

    def add(self, call: Callable[[], None]) -> None:
        """From any thread."""
        with self._lock:
            if self._calls is not None:
                self._calls.append(call)
                return
        call()

    def run(self, died: bool = False) -> None:
        """From any thread."""
        with self._lock:
            self.died = self.died or died
            calls, self._calls = self._calls or [], None
        for call in reversed(calls):
            call()


@dataclass(frozen=True)
class Group:
    """What a backend needs to reach the other ranks.

    rank         0 is the leader
    local_rank   the rank's number on its own machine: which of the devices there it takes
    address      by which other ranks reach this machine
    store        where process groups of torch.distributed meet; make it by `store_of`
    agree_least  the smallest of the ranks' numbers, once all of them have come here; DscError if one of them failed
    local_ranks  how many ranks share the machine
    """

    rank: int
    ranks: int
    local_rank: int
    address: str
    store: Store
    agree_least: Callable[[int], int]
    local_ranks: int = 1
    ends: Ends = field(default_factory=lambda: Ends())

    def store_of(self, name: str) -> Store:
        """A store for one process group: `ProcessGroupNCCL(group.store_of("nccl"), group.rank, group.ranks)`."""
        from torch.distributed import PrefixStore

        return PrefixStore(name, self.store)

    def on_end(self, end: Callable[[], None]) -> None:
        """Call `end`, from any thread, when the engine is closed or another rank died, and at once where that has been: it
        must free whoever waits in a collective."""
        self.ends.add(end)

    def end(self) -> None:
        """Free whoever waits in a collective."""
        self.ends.run()
