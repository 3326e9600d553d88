"""The other ranks as the leader sees them: what it tells them, what they answer, and that one of them failed."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from dsc.runtime.errors import DscError
from dsc.runtime.ranks.channel import Channel, Message, encode
from dsc.runtime.ranks.group import Ends
from dsc.runtime.ranks.processes import END_SECONDS, Children

PATIENCE = 10.0  # seconds until a failure that some ranks met and others did not ends the engine
HEARING = 1.0  # seconds within which a rank's end is heard of by those who fail because of it


def failure_text(error: BaseException) -> str:
    """What a rank tells the others of an exception; equal where the same thing happened."""
    return str(error) if isinstance(error, DscError) else f"{type(error).__name__}: {error}"


class Followers:
    """Ranks 1 and up. What all do together is an event: all succeed in it, or all fail alike, or the engine ends.

    A thread listens to them. The first rank that fails alone, or dies, ends all; `check` says so from then on.

    ends   what frees this process from a collective that the others will not come to
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        children: Children | None,
        ends: Ends,
        where: str,
    ) -> None:
        self._channels, self._children, self._ends, self._where = dict(channels), children, ends, where
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._answers: dict[int, deque[Message]] = {rank: deque() for rank in channels}
        self._event = 0
        self._in_event = False
        self._failures: dict[int, str] = {}  # of this event, by rank
        self._failed_at = 0.0
        self._fault: DscError | None = None
        self._closing = False
        self._left: set[int] = set()
        self._released = False
        self._thread = threading.Thread(target=self._listen, name="dsc ranks", daemon=True)
        self._thread.start()

    # -- what the leader says

    def check(self) -> None:
        """Raise what ended the engine, if something did."""
        fault = self._fault
        if fault is not None:
            raise DscError(
                fault.what,
                where=fault.where,
                details=fault.details,
                wanted=fault.wanted,
                got=fault.got,
                try_=fault.try_,
            )

    @property
    def ended(self) -> bool:
        """Whether nothing is done together any more: one failed, or the engine is closed."""
        return self._fault is not None

    def event(self, kind: str, body: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> bytes:
        """What tells of the next event. Where it cannot be told, the exception is the leader's alone: nothing has begun."""
        return encode(kind, {"event": self._event + 1, **body}, tensors)

    def begin(self, event: bytes) -> None:
        """Tell all ranks of the next event; `succeed` or `fail` must follow."""
        self.check()
        with self._changed:
            self._event += 1
            self._in_event, self._failures = True, {}
        self._send(event)

    def succeed(self) -> None:
        """The leader has done its part. Raises DscError where another rank has failed in its own."""
        with self._changed:
            self._in_event = False
        if self._failures:
            self._end(self._failed_alone())
        self.check()

    def fail(self, error: BaseException) -> None:
        """The leader's part has failed. Returns if all ranks failed alike, so that they go on; else raises DscError.

        An interrupt ends the engine, and stays what it is.
        """
        text = failure_text(error)
        patience = PATIENCE if isinstance(error, Exception) else 0.0  # others are not interrupted
        with self._changed:
            self._failures[0] = text
            self._changed.wait_for(lambda: self._fault or len(self._failures) > len(self._channels), patience)
            self._in_event = False
            alike = len(self._failures) > len(self._channels) and set(self._failures.values()) == {text}
        if not alike:
            self._end(self._failed_alone())
        if not isinstance(error, Exception):
            return
        try:
            self.check()
        except DscError as fault:
            raise fault from error

    def answers(self, kind: str) -> dict[int, Message]:
        """The next answer of every rank, which must be of this kind. Raises DscError where a rank failed instead."""
        found: dict[int, Message] = {}
        for rank, answers in self._answers.items():
            with self._changed:
                self._changed.wait_for(lambda answers=answers: answers or self._fault)  # type: ignore[misc]
            self.check()
            found[rank] = answers.popleft()
            assert found[rank].kind == kind, (rank, kind, found[rank])
        return found

    def agree_least(self, number: int) -> int:
        """See `dsc.runtime.ranks.group.Group`."""
        least: int = min([number, *(answer.body["number"] for answer in self.answers("least").values())])
        self._send(encode("least", {"number": least}))
        return least

    def refuse(self, error: BaseException) -> None:
        """The leader cannot go on: tell the others why, and end them. Raises DscError where another rank ended before, of
        which the leader's error tells only the consequence."""
        if isinstance(error, Exception) and not isinstance(error, DscError):
            with self._changed:
                self._changed.wait_for(lambda: self._fault, HEARING)
            try:
                self.check()
            except DscError as fault:
                raise fault from error
        with suppress(DscError):
            self._send(encode("refused", {"text": failure_text(error)}))
        self._end(DscError("rank 0 of the engine has failed", where=self._where, got=failure_text(error)))

    def close(self) -> None:
        """Let the others end, and wait for that. Without effect in a process that the leader forked."""
        with self._changed:
            if os.getpid() != self._owner or self._closing:
                return
            self._closing = True
            ended, self._fault = self._fault, DscError("the engine is closed", try_="load it again")
        listening = threading.current_thread() is self._thread
        if ended is None:
            for channel in self._channels.values():
                with suppress(OSError):
                    channel.send(encode("close"))
            with self._changed:
                seconds = 0.0 if listening else END_SECONDS
                self._changed.wait_for(lambda: len(self._left) == len(self._channels), seconds)
            self._let_go(kill=False)
        if not listening:
            self._thread.join()

    # -- what it hears

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel.fileno(), selectors.EVENT_READ, rank)
            while selector.get_map() and not self._released:
                for key, _ in selector.select(1.0):
                    message = self._channels[key.data].receive()
                    if message is None:
                        selector.unregister(key.fileobj)
                    self._hear(key.data, message)
                self._lose_patience()

    def _hear(self, rank: int, message: Message | None) -> None:
        if message is None:
            with self._changed:
                self._left.add(rank)
                self._changed.notify_all()
            if not self._closing:
                self._end(self._gone(rank))
        elif message.kind == "failed":
            self._end(DscError(f"rank {rank} of the engine has failed", where=self._where, got=message.body["text"]))
        elif message.kind == "met":
            self._note_failure(rank, message)
        else:
            with self._changed:
                self._answers[rank].append(message)
                self._changed.notify_all()

    def _note_failure(self, rank: int, message: Message) -> None:
        with self._changed:
            late = message.body["event"] != self._event or not self._in_event
            if late:  # the leader has succeeded in that event
                self._failures = {}
            self._failed_at = time.monotonic()
            self._failures[rank] = message.body["text"]
            alone = self._failed_alone()
            self._changed.notify_all()
        if late:
            self._end(alone)

    def _lose_patience(self) -> None:
        """End the engine where another rank failed and the leader waits for it in vain."""
        with self._changed:
            others = self._failures and 0 not in self._failures
            vain = self._in_event and others and time.monotonic() - self._failed_at > PATIENCE
        if vain:
            self._end(self._failed_alone())

    # -- the end

    def _send(self, message: bytes) -> None:
        for rank, channel in self._channels.items():
            try:
                channel.send(message)
            except OSError:
                self._end(self._gone(rank))
        self.check()

    def _gone(self, rank: int) -> DscError:
        got = "its connection is closed" if self._children is None else self._children.of(rank).how_it_ended()
        return DscError(f"rank {rank} of the engine has ended", where=self._where, got=got)

    def _failed_alone(self) -> DscError:
        failed = sorted(self._failures.items())
        ranks = ", ".join(str(rank) for rank, _ in failed)
        if len(failed) > len(self._channels):
            what = "the ranks of the engine have failed, each in its own way"
        else:
            what = f"rank {ranks} of the engine has failed, the others have not"
        return DscError(what, where=self._where, details=[(f"rank {rank}", text) for rank, text in failed])

    def _end(self, fault: DscError) -> None:
        with self._changed:
            if self._fault is not None:
                return
            self._fault = fault
            self._changed.notify_all()
        self._let_go(kill=True)

    def _let_go(self, kill: bool) -> None:
        self._released = True
        for channel in self._channels.values():
            channel.close()
        if self._children is not None:
            (self._children.kill if kill else self._children.wait)()
        self._ends.run(died=kill)  # not before the others end: that is what gloo's threads wait for
        if self._children is not None:
            self._children.wait()
