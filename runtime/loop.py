"""The engine's loop: one step plans, computes, chooses tokens, lets the MTP layer draft, and retires who is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dsc.runtime.backends import Ahead
from dsc.runtime.batch import Batch, BatchBuilder, Segment
from dsc.runtime.cache import LatentCache
from dsc.runtime.errors import DscError
from dsc.runtime.model import CompiledModel
from dsc.runtime.proposer import Computed, Proposer
from dsc.runtime.request import Request
from dsc.runtime.sampler import Choice, Sampler
from dsc.runtime.scheduler import Scheduled, Scheduler

STEPS_AHEAD = 64  # decode steps of one burst
STEPS_WATCHED = 8  # where somebody waits for a place or watches the text


class Loop:
    """Serves requests from any number of threads: whoever waits for a request drives the steps for all."""

    def __init__(
        self,
        main: CompiledModel,
        sampler: Sampler,
        proposer: Proposer | None,
        cache: LatentCache,
        scheduler: Scheduler,
        builder: BatchBuilder,
        ahead: Ahead | None = None,
    ) -> None:
        self._main, self._sampler, self._proposer = main, sampler, proposer
        self.scheduler = scheduler
        self._cache, self._builder, self._ahead = cache, builder, ahead
        self._arriving: deque[Request] = deque()
        self._leaving: deque[Request] = deque()
        self.lock = threading.Lock()
        self.drafted = 0
        self.accepted = 0
        self._closed = False

    def submit(self, request: Request) -> None:
        """Queue a request; never waits for a step. Raises DscError once the engine is closed."""
        self.check_open()
        self._arriving.append(request)

    def cancel(self, request: Request) -> None:
        """Let a request go; its blocks come back at the next step."""
        if not request.finished:
            self._leaving.append(request)

    def drive(self, request: Request) -> None:
        """Take part in one step, unless another thread's step finishes the request meanwhile."""
        with self.lock:
            if not request.finished:
                self.check_open()
                self.step(*self._changes())

    def settle(self) -> None:
        """Take back the blocks of cancelled requests."""
        with self.lock:
            self.exchange(*self._changes())

    def run(self, model: CompiledModel, batch: Batch, phase: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        """A step of somebody who brings his own scheduler, between two of ours: logits [R, V] and hidden [T, D]."""
        with self.lock:
            self.check_open()
            return model.run(batch, phase)

    @contextmanager
    def together(self, kind: str, words: dict[str, Any]) -> Iterator[None]:
        """Nobody steps meanwhile. On several ranks all of them do what `kind` and `words` tell."""
        with self.lock:
            self.check_open()
            yield

    def close(self) -> None:
        """Serve nobody any more; a step that runs is waited for."""
        with self.lock:
            self._closed = True

    def check_open(self) -> None:
        """Raise DscError once the engine is closed."""
        if self._closed:
            raise DscError("the engine is closed", try_="load it again")

    def _changes(self) -> tuple[list[Request], list[Request]]:
        """Requests that came and that left since the last time."""
        left = [self._leaving.popleft() for _ in range(len(self._leaving))]  # first: each of them came before
        came = [self._arriving.popleft() for _ in range(len(self._arriving))]
        return came, left

    def exchange(self, came: Sequence[Request], left: Sequence[Request]) -> None:
        """Take requests in and let others go."""
        for request in came:
            self.scheduler.add(request)
        for request in left:
            if not request.finished:
                request.finish("cancelled")
                self.scheduler.release(request)

    def step(self, came: Sequence[Request], left: Sequence[Request]) -> None:
        """One step after an exchange. What is in it follows from these requests and those before, and from nothing else."""
        self.exchange(came, left)
        plan = self.scheduler.plan()
        if not plan and self.scheduler.waiting:
            # Every request fits the cache alone, so somebody outside the loop holds its blocks.
            held = self._cache.pool.num_blocks - self._cache.pool.num_free
            self._fail(self.scheduler.waiting[0], f"no cache blocks are left: {held} are held outside generate")
        try:
            if plan:
                # A seventh faster than without on tiny-r1: torch then keeps no versions and views.
                with torch.inference_mode():
                    steps = self._steps_ahead(plan)
                    if steps > 1:
                        self._run_ahead(plan, steps)
                    else:
                        self._compute(plan)
        except BaseException as error:
            # Half a step is in the caches: nobody in it can go on, everybody else can.
            for scheduled in plan:
                self._fail(scheduled.request, f"the step failed: {type(error).__name__}: {error}")
            raise

    def _compute(self, plan: Sequence[Scheduled]) -> None:
        segments = [
            Segment(s.tokens, s.request.computed, s.request.blocks, 1 + len(s.request.drafts) if s.samples else 0)
            for s in plan
        ]
        batch = self._builder.build(segments)
        logits, hidden = self._main.run(batch)
        computed = [Computed(s.request, t.start, len(t.tokens)) for s, t in zip(plan, segments, strict=True)]
        sampling = [s.request for s in plan if s.samples]
        if sampling:
            for request, choice in zip(sampling, self._sampler.choose(sampling, logits), strict=True):
                self._accept(request, choice)
        drafted = self._propose(computed, batch, hidden)
        for item in computed:
            self._advance(item, drafted)

    def _steps_ahead(self, plan: Sequence[Scheduled]) -> int:
        """How many steps this plan may run without looking at their tokens in between; blocks for them are taken."""
        if self._ahead is None or not self._ahead.fits(len(plan)):
            return 1
        requests = [s.request for s in plan]
        if not all(s.samples and s.count == 1 and s.request.samples_alone for s in plan):
            return 1
        room = min(request.max_new - request.num_generated for request in requests)
        steps = min(room, self._longest_burst(requests))
        if not all(self.scheduler.reserve(request, request.computed + steps) for request in requests):
            return 1
        return steps

    def _longest_burst(self, requests: Sequence[Request]) -> int:
        watched = self.scheduler.waiting or any(request.streamed for request in requests)
        return STEPS_WATCHED if watched else STEPS_AHEAD

    def _awaited(self) -> bool:
        """Whether a burst keeps somebody waiting who came or leaves."""
        return bool(self._arriving or self._leaving)

    def _run_ahead(self, plan: Sequence[Scheduled], steps: int) -> None:
        """Decode steps whose tokens arrive while the next ones run; ends early when someone finishes, comes or leaves."""
        assert self._ahead is not None
        requests = [s.request for s in plan]

        def take(tokens: list[int]) -> bool:
            for request, token in zip(requests, tokens, strict=True):
                if token < 0:
                    request.finish("error", error="the model's logits are not numbers (NaN)")
                else:
                    request.accept(token)
            return not (any(r.finished for r in requests) or self._awaited())

        segments = [Segment(s.tokens, s.request.computed, s.request.blocks, 1) for s in plan]
        self._ahead.burst(self._builder.build(segments).inputs(), self._sampler.rows(requests), steps, take)
        for request in requests:
            self._advance(Computed(request, request.computed, len(request.tokens) - 1 - request.computed), False)

    def _accept(self, request: Request, choice: Choice) -> None:
        self.drafted += len(request.drafts)
        self.accepted += choice.num_accepted
        request.drafted += len(request.drafts)
        request.accepted += choice.num_accepted
        request.drafts = []
        for i, token in enumerate(choice.tokens):
            request.accept(token)
            request.logprobs += choice.logprobs[i : i + 1]
            if request.finished:
                return
        if choice.broken:
            request.finish("error", error="the model's logits are not numbers (NaN)")

    def _propose(self, computed: Sequence[Computed], batch: Batch, hidden: torch.Tensor) -> bool:
        """Run the proposer if a request of the step is still to draft; whether it ran."""
        if self._proposer is None or not any(c.request.max_drafts and not c.request.finished for c in computed):
            return False
        self._proposer.propose(computed, batch, hidden)
        return True

    def _advance(self, item: Computed, drafted: bool) -> None:
        """Count what is in the caches; a block may be shared once the MTP layer has written it too."""
        request = item.request
        if request.finish_reason == "error":
            self._fail(request, request.error)
            return
        in_cache = min(item.start + item.num_rows, len(request.tokens) - 1)
        stated = in_cache if drafted or not request.max_drafts else item.start
        self.scheduler.advance(request, in_cache, stated)
        if request.finished:
            self.scheduler.release(request)

    def _fail(self, request: Request, error: str) -> None:
        """End a request whose cache is not to be trusted."""
        if not request.finished:
            request.finish("error", error=error)
        own = [block for block in request.blocks if self._cache.pool.holders(block) == 1]
        self._cache.pool.forget(own)
        if own:
            self._cache.clear(own)
        self.scheduler.release(request)
