"""Speculation: who proposes the tokens that the next step checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dsc.runtime.batch import Batch, BatchBuilder, Segment
from dsc.runtime.model import CompiledModel
from dsc.runtime.request import Request


@dataclass(frozen=True)
class Computed:
    """A request after a step of the main model, which computed its tokens from position `start` in `num_rows` rows.

    `request.tokens` already holds what was chosen; rows of drafts that were refused lie behind it.
    """

    request: Request
    start: int
    num_rows: int


class Proposer(Protocol):
    """Proposes drafts. One object serves all requests of an engine."""

    def propose(self, computed: Sequence[Computed], batch: Batch, hidden: torch.Tensor) -> None:
        """Set `request.drafts` where `request.draft_room()` allows and the prompt is computed.

        computed   every sequence of the step, in the order of `batch`
        hidden     what the main model gave, [T, D]
        """
        ...


class MtpProposer:
    """Greedy drafts of the MTP layer (DeepSeek-V3 report, section 2.2).

    Row i of the layer takes the main model's hidden h_i and the token t_{i+1}, and predicts t_{i+2}. It runs over every row
    of the main step, so its cache follows the main one; rows of refused drafts are overwritten when their positions come
    again. Further drafts feed the layer its own hidden row and draft.
    """

    def __init__(self, model: CompiledModel, max_tokens: int, max_sequences: int, block_tokens: int) -> None:
        self._model = model
        self._block_tokens = block_tokens
        self._successors = np.zeros(max_tokens, np.int32)
        self._builder = BatchBuilder(max_sequences, max_sequences, block_tokens)

    def propose(self, computed: Sequence[Computed], batch: Batch, hidden: torch.Tensor) -> None:
        """See Proposer."""
        rows, drafting = [], []
        at = 0
        for item in computed:
            tokens = item.request.tokens
            following = tokens[item.start + 1 : item.start + 1 + item.num_rows]
            self._successors[at : at + len(following)] = following
            self._successors[at + len(following) : at + item.num_rows] = 0
            # Where the last known token has been chosen in this step, its row predicts the token after it.
            last = len(tokens) - 2 - item.start
            if last < item.num_rows and item.request.draft_room() > 0 and not item.request.finished:
                rows.append(at + last)
                drafting.append(item.request)
            at += item.num_rows
        logit_rows = torch.tensor(rows or [0], dtype=torch.int32)
        logits, hidden = self._model.run(batch.for_mtp(torch.from_numpy(self._successors[:at]), hidden, logit_rows))
        if drafting:
            self._draft(drafting, logits, hidden[rows])

    def _draft(self, requests: list[Request], logits_BV: torch.Tensor, hidden_BD: torch.Tensor) -> None:
        """One draft a request, then further ones from the layer's own hidden rows."""
        for request in requests:
            request.drafts = []
        while True:
            for request, token in zip(requests, logits_BV.argmax(-1).tolist(), strict=True):
                request.drafts.append(token)
            going = [i for i, request in enumerate(requests) if self._may_go_on(request)]
            if not going:
                return
            requests = [requests[i] for i in going]
            # A draft stands at the place behind `tokens`; its row takes the position of the token before it.
            segments = [Segment(r.drafts[-1:], len(r.tokens) + len(r.drafts) - 2, r.blocks) for r in requests]
            batch = self._builder.build(segments)
            logits_BV, hidden_BD = self._model.run(
                batch.for_mtp(batch.tokens, hidden_BD[going], batch.logit_rows), "decode"
            )

    def _may_go_on(self, request: Request) -> bool:
        position = len(request.tokens) + len(request.drafts) - 1
        return len(request.drafts) < request.draft_room() and position < len(request.blocks) * self._block_tokens
