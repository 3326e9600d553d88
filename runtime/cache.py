"""The paged latent cache: one pool of blocks for all layers, shared blocks for shared beginnings."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from dsc.runtime.errors import DscError

SHARE_OF_MEMORY = 0.5  # of what is free when an engine is loaded on the CPU
CPU = torch.device("cpu")


class BlockPool:
    """Hands out the blocks 0..num_blocks-1. A block is held by one sequence or by several that begin alike.

    A block that nobody holds keeps its key, and its content, until it is taken anew: the longest unused goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for one holder, or None, and nothing taken, when there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
            self._forget(block)
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Let go of blocks. The last of a sequence are taken anew before its first, which others may begin with."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is free already"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._holders[block]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest beginning of `keys`, now held once more."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            self._holders[block] += 1
            self._free.pop(block, None)
            found.append(block)
        return found

    def remember(self, block: int, key: bytes) -> None:
        """State what a full block holds; the first block of a key stays."""
        if key not in self._blocks:
            self._forget(block)
            self._keys[block], self._blocks[key] = key, block

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop the keys of blocks whose content is not to be used."""
        for block in blocks:
            self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a block from the key before it and the tokens its content depends on."""
    return blake2b(before + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class LatentCache:
    """The tensors `cache.{layer}`, uint8 [num_blocks, block_bytes], and the pool of their blocks.

    Block b of every layer, the MTP layer included, belongs to the same tokens.
    """

    tensors: Mapping[str, torch.Tensor]
    block_tokens: int
    pool: BlockPool

    @classmethod
    def allocate(
        cls, block_bytes: Mapping[str, int], block_tokens: int, num_blocks: int, device: torch.device = CPU
    ) -> LatentCache:
        """A cache of zeros; on the CPU, memory is touched when blocks are written. `block_bytes` by tensor name."""
        tensors = {
            name: torch.zeros(num_blocks, size, dtype=torch.uint8, device=device) for name, size in block_bytes.items()
        }
        return cls(tensors, block_tokens, BlockPool(num_blocks))

    @property
    def capacity_tokens(self) -> int:
        return self.pool.num_blocks * self.block_tokens

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens fill or begin."""
        return -(-tokens // self.block_tokens)

    def clear(self, blocks: Sequence[int]) -> None:
        """Write zeros, so that a NaN left behind cannot reach whoever gets the blocks next."""
        for tensor in self.tensors.values():
            tensor[list(blocks)] = 0


def least_blocks(sequences: int, context_tokens: int, block_tokens: int, wanted_tokens: int | None) -> int:
    """Blocks that a cache needs to be of use: for one sequence at full context, or for the wanted tokens."""
    one_sequence = -(-context_tokens // block_tokens)
    return one_sequence if wanted_tokens is None else min(-(-wanted_tokens // block_tokens), sequences * one_sequence)


def choose_num_blocks(
    sequences: int,
    context_tokens: int,
    block_tokens: int,
    block_bytes: int,
    free_bytes: int,
    wanted_tokens: int | None = None,
    *,
    weight_bytes: int = 0,
    may_swap: bool = False,
    where: str = "",
) -> int:
    """How many blocks to allocate: for all sequences at full context, or what fits into `free_bytes` if that is less.

    block_bytes    of one block over all layers
    wanted_tokens  this many tokens instead, never more than all sequences at full context
    weight_bytes   what the weights beside the cache take, for the message
    may_swap       wanted tokens may take more than is free
    where          the engine, for the message
    raises         DscError where the wanted tokens, or one sequence at full context, have no room
    """
    least = least_blocks(sequences, context_tokens, block_tokens, wanted_tokens)
    if wanted_tokens is not None and wanted_tokens < 1:
        raise DscError("the cache must hold a token", wanted="cache_tokens of 1 or more", got=str(wanted_tokens))
    affordable = free_bytes // block_bytes
    if wanted_tokens is None:
        chosen = min(sequences * least, affordable)
        asked = f"one sequence of {context_tokens:,} tokens"
    else:
        chosen = least
        asked = f"cache_tokens {wanted_tokens:,}"
    if least > affordable and not (may_swap and wanted_tokens is not None):
        raise DscError(
            "weights and cache do not fit together",
            where=where,
            details=[("weights", f"{weight_bytes:,} bytes"), ("cache", f"{least * block_bytes:,} bytes: {asked}")],
            wanted=f"{least * block_bytes:,} bytes for the cache",
            got=f"{free_bytes:,} bytes free for it beside the weights",
            try_=_smaller_cache(affordable * block_tokens),
        )
    return chosen


def _smaller_cache(tokens: int) -> str:
    return f"cache_tokens {tokens}" if tokens else "a recipe with fewer bits, or more memory"


def free_memory_bytes() -> int:
    """Memory this process may still take: what the machine has available, or its control group if that is less."""
    free = _available_bytes()
    group = Path("/sys/fs/cgroup")
    limit, used = _number_in(group / "memory.max"), _number_in(group / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used + _unused_file_pages(group / "memory.stat")))
    return free


def _unused_file_pages(path: Path) -> int:
    """Bytes of files that the group merely has read: they count as used and are given back on demand."""
    for line in path.read_text(encoding="ascii").splitlines() if path.is_file() else []:
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
