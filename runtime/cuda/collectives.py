"""How the steps of a rank reach the other ranks: by torch's symmetric memory where the GPUs see each other's, else by NCCL."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsc.runtime.cuda import symmetric
from dsc.runtime.cuda.call import Call
from dsc.runtime.cuda.nccl import Nccl
from dsc.runtime.cuda.symmetric import SymmetricMemory
from dsc.runtime.errors import DscError
from dsc.runtime.ranks.group import Group

SYMMETRIC = True  # programs that measure NCCL change it, on every rank
END_SECONDS, LOOK_SECONDS = 60.0, 0.01  # how long, and how often, to look for what waits after the end
MEETING_SECONDS = 5.0  # how long to let go on what waits in a meeting that a rank has left
STUCK_SECONDS = 10.0  # in which letting go once must be done with
NCCL_SECONDS = 0.5  # until NCCL is ended too, which takes calls that may wait for the device


class Collectives:
    """One rank's end of what all ranks do together, and the arena of its programs, which others may read.

    Making one waits for all ranks, and tries each way once. What it is made for is decided here: no step takes another way.
    """

    def __init__(self, group: Group, device: torch.device, arena_bytes: int, where: str) -> None:
        self.ranks, self._where = group.ranks, where
        self._nccl: Nccl | None = None
        self._symmetric: SymmetricMemory | None = None
        self._stream: torch.cuda.Stream | None = None
        group.agree_least(1)  # nobody waits for a rank that has failed before
        _with_others(group, device, lambda: self._meet(group, device, arena_bytes), self._free)
        held = weakref.ref(self)
        group.on_end(lambda: _let_go(held, group))

    def on(self, stream: torch.cuda.Stream) -> None:
        """All steps will run on this stream."""
        self._stream = stream

    def release(self, nccl: bool) -> bool:
        """After the end: let go on what waits for another rank, in NCCL too if it comes to that. Whether anything runs."""
        if self._stream is None or self._stream.query():
            return False
        self._free(nccl or self._symmetric is None)
        return True

    def _free(self, nccl: bool = True) -> None:
        if self._symmetric is not None:
            self._symmetric.release()
        if nccl and self._nccl is not None:
            self._nccl.end()

    def describe(self) -> str:
        """By which ways, for people."""
        nccl = f"NCCL {self._made.version}"
        return nccl if self._symmetric is None else f"symmetric memory, {nccl}"

    def all_reduce(self, source: torch.Tensor, destination: torch.Tensor, reduce: str, spent: bool) -> Call:
        """destination = the sum (or maximum) of all ranks' sources.

        spent  nobody reads the source afterwards
        """
        shared = self._symmetric
        if shared is not None and reduce == "sum" and source.dtype in symmetric.DTYPES and shared.holds(source):
            return shared.all_reduce(source, destination, spent)
        return lambda stream: self._made.all_reduce(source, destination, reduce, stream)

    def all_gather(self, source: torch.Tensor, destination: torch.Tensor) -> Call:
        """destination = all ranks' sources one after another."""
        return lambda stream: self._made.all_gather(source, destination, stream)

    @property
    def _made(self) -> Nccl:
        assert self._nccl is not None
        return self._nccl

    def _meet(self, group: Group, device: torch.device, arena_bytes: int) -> None:
        """Find out how the ranks reach each other, and try it."""
        self._nccl = Nccl(group, self._where)
        self._symmetric = _symmetric_memory(group, device, arena_bytes)
        if self._symmetric is None:
            self.arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        else:
            self.arena = self._symmetric.memory
        self._try(group, device)

    def _try(self, group: Group, device: torch.device) -> None:
        """One sum by each way, so that memory NCCL takes at its first call is taken before the cache is sized."""
        own = torch.full((64,), float(group.rank + 1), device=device)
        want = sum(range(1, group.ranks + 1))
        found, gathered = torch.empty_like(own), torch.empty(group.ranks * 64, device=device)
        stream = torch.cuda.current_stream(device)
        self._made.all_reduce(own, found, "sum", stream.cuda_stream)
        self._made.all_gather(own, gathered, stream.cuda_stream)
        sums = {"NCCL": found, "NCCL, gathered": gathered.view(-1, 64).sum(0)}
        if self._symmetric is not None:
            (source, destination) = self.arena[:512].view(torch.float32).split(64)
            source.copy_(own)
            self._symmetric.all_reduce(source, destination, spent=True)(stream.cuda_stream)
            sums["symmetric memory"] = destination
        for way, total in sums.items():
            if not bool((total == want).all()):
                raise DscError(
                    f"rank {group.rank} gets wrong sums from the others by {way}",
                    where=self._where,
                    wanted=f"{want} of 1 to {group.ranks}",
                    got=str(total.tolist()),
                )


def _symmetric_memory(group: Group, device: torch.device, count: int) -> SymmetricMemory | None:
    """None unless all ranks can have it: they decide alike."""
    if not group.agree_least(int(SYMMETRIC and symmetric.can_share(group, device))):
        return None
    try:
        memory = symmetric.allocate(max(count, 512), device)
    except RuntimeError:  # nothing of torch's can be shared on this machine
        memory = None
    if not group.agree_least(int(memory is not None)) or memory is None:
        return None
    return SymmetricMemory(group, memory)


def _with_others(group: Group, device: torch.device, work: Callable[[], None], free: Callable[[], None]) -> None:
    """Do `work` on this thread's device and stream, in a thread of its own: NCCL and torch wait without end for a rank that
    dies meanwhile. Then `free` what waits there, and raise what ended the ranks.
    """
    ended, failed = threading.Event(), list[BaseException]()
    group.on_end(ended.set)
    stream = torch.cuda.current_stream(device)

    def run() -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failed.append(error)

    working = threading.Thread(target=run, name="dsc meeting", daemon=True)
    working.start()
    until = None
    while working.is_alive() and (until is None or time.monotonic() < until):
        working.join(LOOK_SECONDS)
        if ended.is_set() and working.is_alive():
            until = until or time.monotonic() + MEETING_SECONDS
            free()
    if ended.is_set():
        group.agree_least(1)  # raises: it knows who failed
    if failed:
        raise failed[0]


@dataclass
class _Beat:
    """When something was last known to go on."""

    at: float


def _let_go(collectives: weakref.ref[Collectives], group: Group) -> None:
    beat = _Beat(time.monotonic())
    freeing = threading.Thread(target=_end, args=(collectives, beat), name="dsc end", daemon=True)
    freeing.start()
    if group.ends.died:
        threading.Thread(target=_give_up, args=(freeing, beat, group), name="dsc give up", daemon=True).start()


def _end(collectives: weakref.ref[Collectives], beat: _Beat) -> None:
    """Free a thread that waits for the device, and that launches more before it hears of the end."""
    began = time.monotonic()
    while time.monotonic() < began + END_SECONDS:
        held = collectives()
        if held is None:
            return
        running = held.release(nccl=time.monotonic() > began + NCCL_SECONDS)
        del held
        beat.at = time.monotonic()
        if not running:
            time.sleep(LOOK_SECONDS)


def _give_up(freeing: threading.Thread, beat: _Beat, group: Group) -> None:
    """End this process where the driver holds it: it may wait for the device to be idle, say to load a kernel of torch's that
    is used for the first time, and lets nobody free the device meanwhile. Another process can be started, a hang not be ended.
    """
    while freeing.is_alive():
        freeing.join(LOOK_SECONDS)
        if freeing.is_alive() and time.monotonic() > beat.at + STUCK_SECONDS:
            try:
                group.agree_least(1)
                text = "another rank of the engine has ended"
            except DscError as fault:
                text = fault.text()
            print(
                f"{text}\nThe driver of the GPU waits for that rank, so this process ends too.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
