"""The leader's pool of cache blocks as its users see it: what they take and give, all ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from dsc.runtime.cache import BlockPool
from dsc.runtime.errors import DscError
from dsc.runtime.ranks.loop import LeadingLoop


class LedPool(BlockPool):
    """For those who bring their own scheduler. The loop of the engine has the pool itself."""

    def __init__(self, pool: BlockPool, loop: LeadingLoop) -> None:
        self._pool, self._loop = pool, loop
        self.num_blocks = pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def take(self, count: int) -> list[int] | None:
        """See BlockPool."""
        count = index(count)
        taken: list[int] | None = self._loop.on_pool("take", count, lambda: self._pool.take(count))
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """See BlockPool."""
        given = [index(block) for block in blocks]
        self._loop.on_pool("give", given, lambda: self._pool.give(given))

    def holders(self, block: int) -> int:
        """See BlockPool."""
        return self._pool.holders(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """See BlockPool."""
        given = [index(block) for block in blocks]
        self._loop.on_pool("forget", given, lambda: self._pool.forget(given))

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Not for users: what blocks hold, the loop states on every rank."""
        raise DscError("only the engine's own loop shares blocks", got=f"{len(keys)} keys to find")

    def remember(self, block: int, key: bytes) -> None:
        """Not for users: what blocks hold, the loop states on every rank."""
        raise DscError("only the engine's own loop shares blocks", got=f"block {block} to remember")
