"""The ranks of one engine, as one of them sees the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


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
    _ends: list[Callable[[], None]] = field(default_factory=list)

    def store_of(self, name: str) -> Store:
        """A store for one process group: `ProcessGroupNCCL(group.store_of("nccl"), group.rank, group.ranks)`."""
        from torch.distributed import PrefixStore

        return PrefixStore(name, self.store)

    def on_end(self, end: Callable[[], None]) -> None:
        """Call `end`, from any thread, when the engine is closed or another rank died: it must free whoever waits in a
        collective."""
        self._ends.append(end)

    def end(self) -> None:
        """Free whoever waits in a collective."""
        while self._ends:
            self._ends.pop()()
