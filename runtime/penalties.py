"""What is added to and taken from logits before sampling, touching only the tokens concerned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dsc.runtime.sampling import SamplingParams


class Penalties:
    """Presence, frequency and repetition penalties and the logit bias of one request.

    Repetition (Keskar et al. 2019, "CTRL", as in transformers) counts prompt and generated tokens; presence and frequency
    (OpenAI's) the generated ones. Costs of a step follow the number of distinct tokens, not the vocabulary.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        distinct = sorted(set(prompt)) if params.repetition_penalty != 1.0 else []
        room = max(64, 2 * len(distinct))
        self._places = {token: place for place, token in enumerate(distinct)}
        self._ids = np.zeros(room, np.int64)
        self._counts = np.zeros(room, np.float32)
        self._ids[: len(distinct)] = distinct
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1

    def undo(self, token: int, known: bool) -> None:
        """Take back the last `add`; `known` as `token in penalties` was before it."""
        self._counts[self._places[token]] -= 1
        if not known:
            del self._places[token]

    def __contains__(self, token: int) -> bool:
        return token in self._places

    def apply(self, logits_V: torch.Tensor) -> None:
        """Change one row of logits, float32 [V], in place."""
        count = len(self._places)
        if count:
            ids = torch.from_numpy(self._ids[:count]).to(logits_V.device)
            counts = torch.from_numpy(self._counts[:count]).to(logits_V.device)
            values = logits_V[ids]
            if self._params.repetition_penalty != 1.0:
                penalty = self._params.repetition_penalty
                values = torch.where(values > 0, values / penalty, values * penalty)
            values = values - self._params.frequency_penalty * counts - self._params.presence_penalty * (counts > 0)
            logits_V[ids] = values
        if len(self._bias):
            logits_V[self._bias_ids.to(logits_V.device)] += self._bias.to(logits_V.device)

    def apply_rows(self, logits_RV: torch.Tensor, drafts: Sequence[int]) -> None:
        """Rows of one sequence: row i follows the first i drafts, which count for it."""
        added: list[tuple[int, bool]] = []
        for row, logits_V in enumerate(logits_RV):
            self.apply(logits_V)
            if row < len(drafts):
                added.append((drafts[row], drafts[row] in self))
                self.add(drafts[row])
        for token, known in reversed(added):
            self.undo(token, known)
