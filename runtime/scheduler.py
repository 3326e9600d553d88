"""Which requests run in the next step and with how many tokens; which blocks they hold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dsc.runtime.cache import BlockPool, block_key
from dsc.runtime.request import Request


@dataclass(frozen=True)
class Scheduled:
    """A request in a step: `count` of its known tokens, then its drafts."""

    request: Request
    count: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last known token, so that a new one is chosen."""
        return self.count == self.request.pending

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute."""
        request = self.request
        known = request.tokens[request.computed : request.computed + self.count]
        return known + request.drafts if request.drafts else known


class Scheduler:
    """Continuous batching: requests join and leave between steps.

    Decoding requests come first in every step, since someone watches them; long prompts fill what is left of
    `batch_tokens` in pieces. When blocks run out, the request that came last gives up its own and is computed anew later.
    """

    def __init__(
        self, pool: BlockPool, block_tokens: int, batch_tokens: int, sequences: int, prefix_reuse: bool
    ) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._batch_tokens = batch_tokens
        self._sequences = sequences
        self._prefix_reuse = prefix_reuse
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted = 0  # times a request gave up its blocks

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def plan(self) -> list[Scheduled]:
        """The next step, decoding requests first; empty when nothing is left to do."""
        plan: list[Scheduled] = []
        budget = self._batch_tokens
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            (decoding if request.pending == 1 else prefilling).append(request)
        for request in (*decoding, *prefilling):
            if budget == 0:
                break
            if not request.blocks:  # it gave them up for one before it
                continue
            count = min(request.pending, budget)
            if request.drafts:
                request.drafts = request.drafts[: min(request.draft_room(), budget - count)]
            tokens = request.computed + count + len(request.drafts)
            if self._grow(request, tokens, plan):
                plan.append(Scheduled(request, count))
                budget -= count + len(request.drafts)
                if request.max_drafts > 1:
                    # Drafts of drafts lie behind the tokens of this step; without blocks for them fewer are drafted.
                    self._take(request, min(tokens + request.draft_room(), len(request.prompt) + request.max_new))
        while budget > 0 and self.waiting and len(self.running) < self._sequences and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            count = min(request.pending, budget)
            plan.append(Scheduled(request, count))
            budget -= count
        return plan

    def reserve(self, request: Request, tokens: int) -> bool:
        """Blocks for so many tokens of a running request, if they are free; nobody gives any up for it."""
        return self._take(request, tokens)

    def advance(self, request: Request, computed: int, stated: int) -> None:
        """The first `computed` tokens are in the cache; blocks within the first `stated` may be shared."""
        request.computed = computed
        if not self._prefix_reuse:
            return
        while (len(request.keys) + 1) * self._block_tokens <= stated:
            at = len(request.keys)
            request.keys.append(self._key(request, at, request.keys[-1] if at else b""))
            self._pool.remember(request.blocks[at], request.keys[at])

    def release(self, request: Request) -> None:
        """Take a finished or cancelled request out and its blocks back."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._give_blocks(request)

    def _give_blocks(self, request: Request) -> None:
        self._pool.give(request.blocks)
        request.blocks, request.keys, request.computed, request.drafts = [], [], 0, []

    def _admit(self, request: Request) -> bool:
        """Find blocks for all tokens of a waiting request, shared ones first; False when there are not enough."""
        keys: list[bytes] = []
        if self._prefix_reuse:
            # At least one token is left to compute, and the key of a block may need the token behind it.
            for at in range((len(request.tokens) - 1) // self._block_tokens):
                keys.append(self._key(request, at, keys[-1] if at else b""))
        request.blocks = self._pool.find(keys)
        request.keys = keys[: len(request.blocks)]
        request.computed = len(request.blocks) * self._block_tokens
        if self._take(request, len(request.tokens)):
            return True
        self._give_blocks(request)
        return False

    def _key(self, request: Request, at: int, before: bytes) -> bytes:
        """Key of a request's block `at`.

        With the MTP layer running a block's key covers one token more: its last row there depends on the successor.
        """
        ahead = 1 if request.max_drafts else 0
        start = at * self._block_tokens
        return block_key(before or bytes([ahead]), request.tokens[start : start + self._block_tokens + ahead])

    def _take(self, request: Request, tokens: int) -> bool:
        missing = -(-tokens // self._block_tokens) - len(request.blocks)
        taken = self._pool.take(missing) if missing > 0 else []
        if taken is None:
            return False
        request.blocks += taken
        return True

    def _grow(self, request: Request, tokens: int, plan: list[Scheduled]) -> bool:
        """Blocks for so many tokens, if need be from requests that came later; False when it had to give up itself."""
        while not self._take(request, tokens):
            last = self.running[-1]
            plan[:] = [s for s in plan if s.request is not last]  # its tokens stay counted in this step's budget
            self._give_blocks(last)
            self.running.pop()
            self.waiting.appendleft(last)
            self.preempted += 1
            if last is request:
                return False
        return True
