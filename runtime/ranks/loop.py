"""The loop of an engine on several ranks: on each of them the same steps, of the same requests."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from dsc.plugins.communicator import Communicator, communicating
from dsc.runtime.batch import Batch
from dsc.runtime.errors import DscError
from dsc.runtime.loop import STEPS_WATCHED, Loop
from dsc.runtime.model import CompiledModel
from dsc.runtime.proposer import Computed
from dsc.runtime.ranks.followers import Followers
from dsc.runtime.ranks.interrupts import held_interrupts
from dsc.runtime.ranks.words import batch_words, request_words
from dsc.runtime.request import Request


class RankLoop(Loop):
    """One rank's. What is in a step follows from the steps before and from the requests that came and left.

    communicator  by which ops on a CPU reach the other ranks; set before the first step
    seen          checksum of all that the ranks chose since loading: equal on all of them after every step
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.communicator: Communicator | None = None
        self.seen = 0

    def among_ranks(self) -> Any:
        """The calling thread is this rank meanwhile."""
        return nullcontext() if self.communicator is None else communicating(self.communicator)

    def _longest_burst(self, requests: Sequence[Request]) -> int:
        return STEPS_WATCHED  # whoever comes is told of after the burst

    def _awaited(self) -> bool:
        return False  # the leader alone would know

    def _advance(self, item: Computed, drafted: bool) -> None:
        request = item.request
        chosen = request.tokens[max(item.start + 1, len(request.prompt)) :]
        words = [request.number, len(request.tokens), len(chosen), *chosen, *request.drafts]
        self.seen = zlib.crc32(np.array(words, np.int64).tobytes(), self.seen)
        super()._advance(item, drafted)


class LeadingLoop(RankLoop):
    """Rank 0's, which users drive: it tells the others of every step before it takes it.

    When it goes, and nobody holds the engine or one of its streams any more, the other ranks end.
    """

    def __init__(self, followers: Followers, **parts: Any) -> None:
        super().__init__(**parts)
        self._followers = followers
        self._count = 0
        self._failed: list[Request] = []  # in this step
        self._acting = 0  # the thread that does something together with the other ranks
        weakref.finalize(self, followers.close)

    def step(self, came: Sequence[Request], left: Sequence[Request]) -> None:
        """See Loop. Raises DscError, and ever after, where another rank failed or chose other tokens."""
        try:
            with self._together("step", self._words(came, left)):
                super().step(came, left)
        except DscError as error:
            if self._followers.ended:  # what they were told of it was only its consequence
                for request in self._failed:
                    request.error = str(error)
            raise
        finally:
            self._failed = []

    def settle(self) -> None:
        """See Loop. Once the engine has ended, requests are let go without the others."""
        with self.lock:
            came, left = self._changes()
            if not came and not left:
                return
            if self._followers.ended:
                self.exchange(came, left)
                return
            with self._together("exchange", self._words(came, left)):
                self.exchange(came, left)

    def run(self, model: CompiledModel, batch: Batch, phase: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        """See Loop."""
        words, tensors = batch_words(batch)
        with self.lock:
            self.check_open()
            with self._together("forward", {"model": model.name, "phase": phase, **words}, tensors):
                return model.run(batch, phase)

    def on_pool(self, method: str, argument: Any, act: Callable[[], Any]) -> Any:
        """Change the pool of blocks from outside of a step, on all ranks."""
        if self._acting == threading.get_ident():  # in what all ranks do together
            return act()
        with self.together("pool", {"method": method, "argument": argument}):
            return act()

    @contextmanager
    def together(self, kind: str, words: dict[str, Any]) -> Iterator[None]:
        """See Loop."""
        with super().together(kind, words), self._together(kind, words):
            yield

    def close(self) -> None:
        """See Loop. The other ranks end."""
        super().close()
        self._followers.close()

    def check_open(self) -> None:
        """See Loop. Raises DscError, too, where a rank failed."""
        super().check_open()
        self._followers.check()

    def _fail(self, request: Request, error: str) -> None:
        self._failed.append(request)
        super()._fail(request, error)

    def _words(self, came: Sequence[Request], left: Sequence[Request]) -> dict[str, Any]:
        for request in came:
            self._count += 1
            request.number = self._count
        return {"came": [request_words(request) for request in came], "left": [request.number for request in left]}

    @contextmanager
    def _together(self, kind: str, words: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """The others do the same meanwhile. An exception that all of them meet goes on to the caller."""
        state = {"seen": self.seen, "threads": torch.get_num_threads()}
        with held_interrupts(), self.among_ranks():
            event = self._followers.event(kind, {**state, **words}, tensors)
            self._acting = threading.get_ident()
            try:
                self._followers.begin(event)
                yield
            except BaseException as error:
                self._followers.fail(error)
                raise
            finally:
                self._acting = 0
            self._followers.succeed()
