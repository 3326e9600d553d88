"""From logits to tokens: penalties, then the engine's `sample` graph, then log-probabilities for those who ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dsc.runtime.backends import Runner
from dsc.runtime.request import Request, TokenLogprob

ALL_TOKENS = -1  # a mask word with every bit set
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
        self._views: dict[int, dict[str, torch.Tensor]] = {}

    def choose(self, requests: Sequence[Request], logits: torch.Tensor) -> list[Choice]:
        """One choice per request. `logits` [R, V] holds 1 + len(drafts) rows a request, in order; may be changed."""
        starts, masked = [0], []
        for request in requests:
            masked += self._fill(starts[-1], request)
            starts.append(starts[-1] + 1 + len(request.drafts))
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

    def _fill(self, at: int, request: Request) -> list[int]:
        """Write one request's rows; returns the rows whose mask is not full."""
        params, drafts = request.params, request.drafts
        end = at + 1 + len(drafts)
        self._floats[:, at:end] = ((params.temperature,), (params.top_p,), (params.min_p,))
        self._ints[0, at:end] = params.top_k
        # The position of the token being chosen: the same whether it is drafted or not, however prompts are chunked.
        self._ints[1, at:end] = range(len(request.tokens), len(request.tokens) + 1 + len(drafts))
        self._ints[2, at : end - 1] = drafts
        self._ints[2, end - 1] = -1
        self._seeds[at:end] = request.seed
        if not params.min_tokens:
            return []
        barred = [row for row in range(at, end) if request.ends_barred(row - at)]
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
