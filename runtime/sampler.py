"""From logits to tokens: penalties, then the engine's `sample` graph, then log-probabilities for those who ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dsc.runtime.backends import Runner
from dsc.runtime.request import Request, TokenLogprob

ALL_TOKENS = -1  # a mask word with every bit set
NO_DRAFT = -1
BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


@dataclass(frozen=True)
class Choice:
    """What one request got from one step: drafts the model agrees with, and the token after them.

    broken  the logits after `tokens` hold a NaN: there is no next token
    """

    tokens: list[int]
    num_accepted: int
    logprobs: list[TokenLogprob]
    broken: bool


class Sampler:
    """Runs the `sample` program over the logit rows of several requests, each with one row per draft and one more."""

    def __init__(self, program: Runner, vocab_size: int, max_rows: int) -> None:
        self._program = program
        self._floats = np.zeros((3, max_rows), np.float32)  # temperature, top_p, min_p
        self._ints = np.zeros((3, max_rows), np.int32)  # top_k, positions, drafts
        self._seeds = np.zeros(max_rows, np.int64)
        self._mask = np.full((max_rows, -(-vocab_size // 32)), ALL_TOKENS, np.int32)
        floats, ints = torch.from_numpy(self._floats), torch.from_numpy(self._ints)
        self._inputs = {
            "temperature": floats[0],
            "top_p": floats[1],
            "min_p": floats[2],
            "top_k": ints[0],
            "positions": ints[1],
            "drafts": ints[2],
            "seeds": torch.from_numpy(self._seeds),
            "token_mask": torch.from_numpy(self._mask),
        }
        self._layout: list[tuple[int, int]] = []
        self._held: list[Request] = []
        self._views: dict[int, dict[str, torch.Tensor]] = {}

    def choose(self, requests: Sequence[Request], logits: torch.Tensor) -> list[Choice]:
        """One choice per request. `logits` [R, V] holds 1 + len(drafts) rows a request, in order; may be changed."""
        starts = [0]
        for request in requests:
            starts.append(starts[-1] + 1 + len(request.drafts))
        masked = self._fill(requests, starts)
        raw = [self._raw_logprobs(r, logits[at:end]) for r, at, end in zip(requests, starts, starts[1:], strict=False)]
        for request, at, end in zip(requests, starts, starts[1:], strict=False):
            if request.penalties is not None:
                request.penalties.apply_rows(logits[at:end], request.drafts)
        outputs = self._program.run({"logits": logits[: starts[-1]], **self._first(starts[-1])})
        for row in masked:
            self._mask[row] = ALL_TOKENS
        tokens, accepted = outputs["tokens"].tolist(), outputs["accepted"].tolist()
        return [
            self._choice(request, tokens[at:end], accepted[at:end], logprobs)
            for request, at, end, logprobs in zip(requests, starts, starts[1:], raw, strict=False)
        ]

    def rows(self, requests: Sequence[Request]) -> dict[str, torch.Tensor]:
        """Inputs of the sample program but the logits, one row a request, for steps that run ahead of the host."""
        self._fill(requests, range(len(requests) + 1))
        return self._first(len(requests))

    def _fill(self, requests: Sequence[Request], starts: Sequence[int]) -> list[int]:
        """Write all rows; returns those whose mask is not full."""
        end = starts[-1]
        layout = [(id(request), len(request.drafts)) for request in requests]
        if layout != self._layout:
            self._layout, self._held = layout, list(requests)  # held, so that no other request gets the same id
            rows = [request for request in requests for _ in range(1 + len(request.drafts))]
            params = [request.params for request in rows]
            self._floats[0, :end] = [p.temperature for p in params]
            self._floats[1, :end] = [p.top_p for p in params]
            self._floats[2, :end] = [p.min_p for p in params]
            self._ints[0, :end] = [p.top_k for p in params]
            self._seeds[:end] = [request.seed for request in rows]
        # The position of the token being chosen: the same whether it is drafted or not, however prompts are chunked.
        self._ints[1, :end] = [len(r.tokens) + i for r in requests for i in range(1 + len(r.drafts))]
        self._ints[2, :end] = [draft for r in requests for draft in (*r.drafts, NO_DRAFT)]
        return [row for r, at in zip(requests, starts, strict=False) if r.params.min_tokens for row in self._bar(r, at)]

    def _bar(self, request: Request, at: int) -> list[int]:
        """Forbid end tokens in the rows of a request that must not end yet; returns these rows."""
        barred = [at + i for i in range(1 + len(request.drafts)) if request.ends_barred(i)]
        for row in barred:
            for token in request.ends:
                self._mask[row, token // 32] &= ~BITS[token % 32]
        return barred

    def _first(self, count: int) -> dict[str, torch.Tensor]:
        """The first `count` rows of each input; views are made once, since steps of one size come again and again."""
        if count not in self._views:
            self._views[count] = {name: tensor[:count] for name, tensor in self._inputs.items()}
        return self._views[count]

    def _raw_logprobs(self, request: Request, logits: torch.Tensor) -> torch.Tensor | None:
        return None if request.params.logprobs is None else torch.log_softmax(logits, -1)

    def _choice(
        self, request: Request, tokens: list[int], accepted: list[int], logprobs: torch.Tensor | None
    ) -> Choice:
        count = 0
        while count < len(request.drafts) and accepted[count]:
            count += 1
        broken = tokens[count] < 0
        chosen = tokens[: count + (not broken)]
        entries = [] if logprobs is None else [
            _entry(token, row, request.params.logprobs or 0) for token, row in zip(chosen, logprobs, strict=False)
        ]  # fmt: skip
        return Choice(chosen, count, entries, broken)


def _entry(token: int, logprobs_V: torch.Tensor, count: int) -> TokenLogprob:
    values, ids = torch.topk(logprobs_V, count) if count else (torch.empty(0), torch.empty(0))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs_V[token]), top)
