"""Memory that the GPUs of all ranks read and write, and sums over it by torch's kernels (torch.ops.symm_mem).

Every rank gets the same bits of a sum: two-shot adds up each element on one rank and copies it to the others, one-shot on
each rank in the order of the ranks. (With multicast the order would be the switch's own; these kernels do without.)
"""

from __future__ import annotations

import os
import re
import uuid
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import _symmetric_memory  # noqa: F401 - defines torch.ops.symm_mem

from dsc.runtime.cuda.call import Call
from dsc.runtime.ranks.group import Group

RANKS = (2, 4, 8)  # that torch's two-shot kernel is made for
DTYPES = (torch.bfloat16, torch.float32)
BLOCKS = 32  # of a kernel, at most: each has its own signals


class SymmetricMemory:
    """`count` bytes on the current device, and as many at the same place of every other rank's. Making one waits for all."""

    def __init__(self, group: Group, memory: torch.Tensor) -> None:
        self.memory, self._rank, self._ranks = memory, group.rank, group.ranks
        self._name = f"dsc.{uuid.uuid4().hex}"
        # The allocator asks this group only for its store; c10d and torch keep no hold of either.
        self._store = Renumbered(group.store_of("symmetric"))
        self._group = dist.ProcessGroup(self._store, group.rank, group.ranks)
        c10d._register_process_group(self._name, self._group)  # type: ignore[arg-type]
        weakref.finalize(self, c10d._unregister_process_group, self._name)  # type: ignore[arg-type]
        # Multicast takes the switch's room, and nothing here uses it.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._handle = c10d._SymmetricMemory.rendezvous(memory, self._name)
        self._side = torch.cuda.Stream(memory.device)
        with torch.cuda.stream(self._side):  # a kernel that is first used while another waits might wait for that one
            torch.zeros(BLOCKS, self._ranks, dtype=torch.int32, device=memory.device)[:, 0].fill_(1)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory."""
        return tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()

    def all_reduce(self, source: torch.Tensor, destination: torch.Tensor, spent: bool) -> Call:
        """destination = the sum of all ranks' sources, which lie at one place of the memory.

        spent  nobody reads the source afterwards
        """
        ops, name = torch.ops.symm_mem, self._name
        if source.data_ptr() == destination.data_ptr():
            return lambda stream: ops.two_shot_all_reduce_(source, "sum", name)
        if spent:
            return lambda stream: ops.two_shot_all_reduce_out(source, "sum", name, destination)
        return lambda stream: ops.one_shot_all_reduce_out(source, "sum", name, destination)

    def release(self) -> None:
        """Let go on what waits here for a rank that does not come, by one step: a kernel waits several times. What is
        summed up then is worth nothing. On a stream of its own, whatever others do."""
        own, others = self._signals(self._rank), [rank for rank in range(self._ranks) if rank != self._rank]
        with torch.cuda.device(self.memory.device), torch.cuda.stream(self._side):
            for other in others:
                own[:, other].fill_(1)
                self._signals(other)[:, self._rank].fill_(0)
            self._side.synchronize()

    def _signals(self, rank: int) -> torch.Tensor:
        """int32 [blocks, ranks] of a rank: rank r sets column r, and the rank itself clears what it has seen set."""
        return self._handle.get_signal_pad(rank, (BLOCKS, self._ranks), torch.int32)


def allocate(count: int, device: torch.device) -> torch.Tensor:
    """Bytes that can be made symmetric memory. Raises RuntimeError where there is no room or no way to share it."""
    # Not by torch.distributed._symmetric_memory.empty: that may give a piece of an allocation.
    return c10d._SymmetricMemory.empty_strided_p2p((count,), (1,), torch.uint8, device)


def can_share(group: Group, device: torch.device) -> bool:
    """Whether this rank's GPU reaches those of all others directly. Ranks of several machines do not."""
    if group.ranks not in RANKS or group.local_rank != group.rank or torch.cuda.device_count() < group.ranks:
        return False
    others = [rank for rank in range(group.ranks) if rank != device.index]
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


class Renumbered(dist.Store):
    """A store under whose keys every rank counts from 0.

    torch numbers its exchanges from the start of a process, as NAME/NUMBER/RANK: the leader may have loaded engines before
    this one's other ranks were started.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}

    def _key(self, key: str) -> str:
        found = re.fullmatch(r"(.*)/(\d+)/(\d+)", key)
        if found is None:
            return key
        name, number, rank = found[1], int(found[2]), found[3]
        return f"{name}/{number - self._first.setdefault(name, number)}/{rank}"

    def set(self, key: str, value: str) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        renamed = [self._key(key) for key in keys]
        if timeout is None:
            self._store.wait(renamed)
        else:
            self._store.wait(renamed, timeout)
