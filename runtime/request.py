"""One request on its way through the engine, and what comes out of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsc.runtime.detokenizer import Decode, Detokenizer, StopStrings, whole_text
from dsc.runtime.penalties import Penalties
from dsc.runtime.sampling import SEED_END, SamplingParams


@dataclass(frozen=True)
class TokenLogprob:
    """A chosen token's natural log-probability under the model's own logits, and the likeliest tokens with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one request gave.

    token_ids      generated tokens, the one that ended the text included
    text           their text without special tokens, the end token, the stop string and a last character that is not whole;
                   "" if the engine has no tokenizer
    finish_reason  "stop" (end token or stop string, which `stop_reason` names), "length", "error" or "cancelled"
    logprobs       one entry a token, None unless asked for
    error          why finish_reason is "error"
    drafted        tokens the MTP layer drafted for this request, of which the model `accepted` so many
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None
    stop_reason: int | str | None = None
    error: str = ""
    prompt_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(eq=False)
class Request:
    """The state of a request. `tokens` are prompt and generated ones; the first `computed` of them are in the cache.

    max_new     tokens it may generate: max_tokens and what the context has room for
    ends        tokens that end the text
    drafts      tokens drafted to follow `tokens`, checked in the next step
    max_drafts  how many to draft at most
    streamed    its text is wanted while it comes, as `pieces`
    blocks      its cache blocks in order
    keys        keys of its full blocks, as far as they were stated to the pool or found there
    number      by which the ranks of an engine of several speak of it
    """

    prompt: Sequence[int]
    params: SamplingParams
    max_new: int
    ends: frozenset[int]
    decode: Decode | None = None
    max_drafts: int = 0
    streamed: bool = False

    tokens: list[int] = field(init=False)
    seed: int = field(init=False)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    penalties: Penalties | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    error: str = ""
    drafted: int = 0
    accepted: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.seed = secrets.randbelow(SEED_END) if self.params.seed is None else self.params.seed
        if self.params.penalized:
            self.penalties = Penalties(self.params, self.prompt)
        # Text that nobody looks at before the end is decoded once, at the end.
        as_it_comes = self.decode is not None and (self.streamed or self.params.stop)
        self._detokenizer = Detokenizer(self.decode) if self.decode is not None and as_it_comes else None
        self._stops = StopStrings(self.params.stop)

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def pending(self) -> int:
        """Known tokens that are not in the cache yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def samples_alone(self) -> bool:
        """Whether its next tokens are chosen by the sample graph alone: no drafts, penalties, logprobs or barred ends."""
        plain = self.penalties is None and self.params.logprobs is None
        return plain and not self.max_drafts and not self.ends_barred()

    def draft_room(self) -> int:
        """How many drafts are worth checking in the next step: what it generates must not pass max_new."""
        return max(0, min(self.max_drafts, self.max_new - self.num_generated - 1))

    def ends_barred(self, ahead: int = 0) -> bool:
        """Whether the token `ahead` places after the next must not end the text (min_tokens)."""
        return self.num_generated + ahead < self.params.min_tokens

    def accept(self, token: int) -> None:
        """Take the next generated token; sets `finish_reason` when it is the last."""
        barred = self.ends_barred()
        self.tokens.append(token)
        if self.penalties is not None:
            self.penalties.add(token)
        if token in self.ends and not barred:
            self.finish("stop", token)
            return
        if self._detokenizer is not None:
            piece = self._detokenizer.add(token)
            self._show(piece if self.ends_barred() else self._stops.add(piece))
            if self._stops.found is not None:
                self.finish("stop", self._stops.found)
                return
        if self.num_generated >= self.max_new:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | str | None = None, error: str = "") -> None:
        """End the request; text still held back comes out unless a stop string cut it off."""
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        self.drafts = []
        if self._detokenizer is not None and self._stops.found is None:
            self._show(self._stops.add(self._detokenizer.finish()))
            self._show(self._stops.finish())

    def _show(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)

    def _text(self) -> str:
        if self._detokenizer is not None or self.decode is None:
            return "".join(self.pieces)
        end = len(self.tokens) - isinstance(self.stop_reason, int)
        return whole_text(self.decode, self.tokens[len(self.prompt) : end])

    def output(self) -> Output:
        """The result of a finished request."""
        return Output(
            token_ids=self.tokens[len(self.prompt) :],
            text=self._text(),
            finish_reason=self.finish_reason,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            stop_reason=self.stop_reason,
            error=self.error,
            prompt_tokens=len(self.prompt),
            drafted=self.drafted,
            accepted=self.accepted,
        )
