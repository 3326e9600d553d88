"""A rank that follows: it does what the leader tells it, until the leader closes the engine or is gone."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from dsc.runtime.batch import Batch
from dsc.runtime.bench import measure
from dsc.runtime.bench_points import Plan
from dsc.runtime.engine import Engine
from dsc.runtime.errors import DscError
from dsc.runtime.ranks.channel import Channel, Message, encode
from dsc.runtime.ranks.followers import failure_text
from dsc.runtime.ranks.loop import RankLoop
from dsc.runtime.ranks.words import read_batch, read_request
from dsc.runtime.request import Request


class Leader:
    """Rank 0 as another rank sees it. A thread listens to it, and ends this process when the leader is gone."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel, self._rank = channel, rank
        self._heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="dsc leader", daemon=True).start()

    def hear(self) -> Message:
        """What it says next."""
        return self._heard.get()

    def tell(self, kind: str, body: dict[str, Any] | None = None) -> None:
        """Answer it."""
        self._channel.send(encode(kind, body))

    def agree_least(self, number: int) -> int:
        """See `dsc.runtime.ranks.group.Group`."""
        self.tell("least", {"number": number})
        message = self.hear()
        assert message.kind == "least", message
        return int(message.body["number"])

    def close(self) -> None:
        """Leave."""
        self._channel.close()

    def _listen(self) -> None:
        while True:
            message = self._channel.receive()
            if message is None or message.kind == "refused":
                text = "rank 0 is gone" if message is None else f"rank 0 has failed: {message.body['text']}"
                print(f"rank {self._rank} ends: {text}", file=sys.stderr, flush=True)
                os._exit(1)  # whatever the main thread waits for will not come
            self._heard.put(message)
            if message.kind == "close":
                return


class Following:
    """Does on this rank what the leader does on its own."""

    def __init__(self, rank: int, engine: Engine, loop: RankLoop, leader: Leader) -> None:
        self._rank, self._engine, self._loop, self._leader = rank, engine, loop, leader
        self._requests: dict[int, Request] = {}
        self._acts: dict[str, Callable[[Message], None]] = {
            "step": self._step, "exchange": self._exchange, "forward": self._forward, "pool": self._change_pool,
            "bench": self._bench,
        }  # fmt: skip

    def serve(self) -> None:
        """Until the engine is closed. Raises DscError where this rank has not chosen the leader's tokens."""
        with self._loop.among_ranks():
            while (message := self._leader.hear()).kind != "close":
                self._check(message)
                if self._engine.backend.device.type == "cpu" and message.body["threads"] != torch.get_num_threads():
                    torch.set_num_threads(message.body["threads"])  # sums depend on it
                try:
                    self._acts[message.kind](message)
                except Exception as error:  # noqa: BLE001 - the leader judges whether all ranks met it
                    self._leader.tell("met", {"event": message.body["event"], "text": failure_text(error)})

    def _check(self, message: Message) -> None:
        if message.body["seen"] != self._loop.seen:
            raise DscError(
                f"the ranks disagree: rank {self._rank} has chosen other tokens than rank 0, or drafted others",
                where=f"before {message.kind} {message.body['event']}",
                wanted=f"checksum {message.body['seen']:08x}, as on rank 0",
                got=f"{self._loop.seen:08x}",
            )

    def _step(self, message: Message) -> None:
        try:
            self._loop.step(*self._changes(message))
        finally:
            self._requests = {number: r for number, r in self._requests.items() if not r.finished}

    def _exchange(self, message: Message) -> None:
        self._loop.exchange(*self._changes(message))

    def _changes(self, message: Message) -> tuple[list[Request], list[Request]]:
        came = [read_request(words, self._engine.decode) for words in message.body["came"]]
        self._requests |= {request.number: request for request in came}
        return came, [self._requests[number] for number in message.body["left"] if number in self._requests]

    def _forward(self, message: Message) -> None:
        batch: Batch = read_batch(message.body, message.tensors, self._engine.backend.device)
        self._loop.run(self._engine.models[message.body["model"]], batch, message.body["phase"])

    def _change_pool(self, message: Message) -> None:
        getattr(self._engine.cache.pool, message.body["method"])(message.body["argument"])

    def _bench(self, message: Message) -> None:
        measure(self._engine, Plan(**message.body["plan"]))
