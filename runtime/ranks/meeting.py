"""How the ranks of an engine find each other: the leader waits, the others come, and all must be of one build."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError, raise_all
from dsc.runtime.ranks.channel import Channel, encode
from dsc.runtime.ranks.launch import Launch

SECONDS = 300.0  # that ranks may come apart
HOME = "127.0.0.1"
_LEADER = "leader"  # under which the store has the leader's address
_LOOK = 0.2  # seconds between looks at whether somebody died
_HELLO_BYTES, _HELLO_SECONDS = 1 << 16, 5.0  # that whoever comes may take to say who it is
_meetings = count(1)  # of this process, under torchrun: every rank's n-th load is the same one


@dataclass(frozen=True)
class Build:
    """What must be equal on all ranks: the engine, and what runs it."""

    engine: str
    dsc: str
    torch: str

    @classmethod
    def of(cls, folder: EngineFolder) -> Build:
        """Of this process."""
        return cls(folder.content_hash, importlib.metadata.version("dsc"), torch.__version__)


def home_store() -> dist.TCPStore:
    """A store for the ranks of one machine, on a port that is free and that no other machine reaches."""
    listener = socket.create_server((HOME, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(HOME, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def home_store_at(port: int) -> dist.TCPStore:
    """The same, from another process of the machine."""
    return dist.TCPStore(HOME, port, None, False, timedelta(seconds=SECONDS), wait_for_workers=False)


def torchrun_store(launch: Launch, where: str) -> dist.Store:
    """A store for the next meeting of the processes of a torchrun: a part of the one that its agent holds.

    Where another launcher sets the same variables, rank 0 holds it. Raises DscError where the store is not there in time.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    try:
        store = dist.TCPStore(
            host, port, None, holds, timedelta(seconds=SECONDS), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:  # torch's DistStoreError and DistNetworkError
        what = "rank 0 cannot hold a store" if holds else f"rank 0 did not come within {SECONDS:.0f} s"
        raise DscError(what, where=where, wanted=f"a store at {host}:{port}", got=str(error)) from error
    return dist.PrefixStore(f"dsc/{next(_meetings)}", store)


class Door:
    """Where the leader waits for the other ranks."""

    def __init__(self, store: dist.Store, launch: Launch) -> None:
        self._ranks = launch.ranks
        at_home = launch.local_ranks == launch.ranks
        self._listener = socket.create_server((HOME if at_home else "", 0), backlog=128)
        host = HOME if at_home else os.environ["MASTER_ADDR"]
        store.set(_LEADER, f"{host} {self._listener.getsockname()[1]}")

    def welcome(
        self, build: Build, words: dict[str, Any], where: str, alive: Callable[[], None] = lambda: None
    ) -> dict[int, Channel]:
        """The other ranks, once all have come; each is told `words`.

        alive   raises when a rank died that did not come yet
        raises  DscError naming every rank of another build, or every rank that did not come in time
        """
        found: dict[int, Channel] = {}
        try:
            self._wait(found, build, where, alive)
            for channel in found.values():
                with suppress(OSError):  # of a rank that has gone: whoever listens to it hears of that
                    channel.send(encode("welcome", words))
        except BaseException as error:
            for channel in found.values():
                with suppress(OSError):
                    channel.send(encode("refused", {"text": str(error)}))
                channel.close()
            raise
        finally:
            self._listener.close()
        return found

    def _wait(self, found: dict[int, Channel], build: Build, where: str, alive: Callable[[], None]) -> None:
        faults: list[DscError] = []
        until = time.monotonic() + SECONDS
        while len(found) < self._ranks - 1:
            if time.monotonic() > until:
                missing = ", ".join(str(rank) for rank in range(1, self._ranks) if rank not in found)
                came = ", ".join(map(str, [0, *sorted(found)]))
                raise_all(f"{where}: not all ranks of the engine came", [*faults, DscError(
                    f"rank {missing} did not come within {SECONDS:.0f} s", where=where,
                    wanted=f"{self._ranks} ranks, each in a process that loads this engine", got=f"rank {came}",
                )])  # fmt: skip
            self._listener.settimeout(_LOOK)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                alive()
                continue
            channel = Channel(connection)
            hello = _hello(channel)
            if hello is None:
                channel.close()  # nobody of ours
                continue
            rank, theirs = hello
            if rank in found or not 0 < rank < self._ranks:
                with suppress(OSError):
                    channel.send(encode("refused", {"text": f"rank {rank} is here already, or no rank"}))
                channel.close()
                wanted = f"ranks 1 to {self._ranks - 1}, one process each"
                faults.append(DscError(f"a second process is rank {rank}", where=where, wanted=wanted))
                break
            found[rank] = channel
            faults += _differences(rank, theirs, build, where)
        raise_all(f"{where}: the ranks do not belong together", faults)


def knock(store: dist.Store, launch: Launch, build: Build, where: str) -> tuple[Channel, dict[str, Any]]:
    """Come to the leader's door; the way to talk with it, and its words.

    Raises DscError where the leader refuses the meeting or does not come.
    """
    try:
        store.wait([_LEADER], timedelta(seconds=SECONDS))
        host, _, port = store.get(_LEADER).decode().rpartition(" ")
        connection = socket.create_connection((host, int(port)), timeout=SECONDS)
        connection.settimeout(None)
        channel = Channel(connection)
        channel.send(encode("hello", {"rank": launch.rank, "build": asdict(build)}))
    except (OSError, RuntimeError) as error:  # a RuntimeError of torch when a wait is over
        raise DscError(f"rank 0 did not come within {SECONDS:.0f} s", where=where, got=str(error)) from error
    answer = channel.receive()
    if answer is None or answer.kind != "welcome":
        text = "it is gone" if answer is None else answer.body["text"]
        channel.close()
        raise DscError(f"rank 0 does not go on with rank {launch.rank}", where=where, got=text)
    return channel, answer.body


def _hello(channel: Channel) -> tuple[int, Build] | None:
    """Which rank has come, and its build; None where it is no rank of an engine."""
    hello = channel.receive_from_anybody(_HELLO_BYTES, _HELLO_SECONDS)
    if hello is None or hello.kind != "hello":
        return None
    rank, build = hello.body.get("rank"), hello.body.get("build")
    if type(rank) is not int or not isinstance(build, dict) or build.keys() != {f.name for f in fields(Build)}:
        return None
    return rank, Build(**build)


def _differences(rank: int, theirs: Build, ours: Build, where: str) -> list[DscError]:
    named = {
        "engine": f"rank {rank} loads an engine of another build",
        "dsc": f"rank {rank} runs another version of dsc",
        "torch": f"rank {rank} runs another version of torch",
    }
    found = []
    for name, what in named.items():
        one, other = getattr(ours, name), getattr(theirs, name)
        if one != other:
            found.append(DscError(what, where=where, wanted=f"{one}, as on rank 0", got=str(other)))
    return found
