"""Sample in plain torch, one row after the other."""

from __future__ import annotations

import math

import torch

from dsc.plugins.sample.philox import uniform


def reference(
    *,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    token_mask: torch.Tensor,
    drafts: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """tokens int32 [R], accepted int32 [R], logprobs float32 [R]; see the op's text."""
    numbers = uniform(seeds, positions).tolist()
    tokens, accepted, logprobs = [], [], []
    chain = True  # no draft of this row's sequence was refused so far
    for row, values in enumerate(logits):
        bits = token_mask[row].unsqueeze(-1) >> torch.arange(32) & 1
        allowed = values.masked_fill(bits.flatten()[: len(values)] == 0, -torch.inf)
        limits = (float(top_p[row]), int(top_k[row]), float(min_p[row]))
        token = _choose(values, allowed, float(temperature[row]), limits, numbers[row])
        draft = int(drafts[row])
        matches = chain and token >= 0 and token == draft
        chain = matches or draft < 0
        tokens.append(token)
        accepted.append(int(matches))
        logprobs.append(float(torch.log_softmax(values, 0)[token]) if token >= 0 else math.nan)
    ints = torch.int32
    return torch.tensor(tokens, dtype=ints), torch.tensor(accepted, dtype=ints), torch.tensor(logprobs)


def _choose(
    raw: torch.Tensor, allowed: torch.Tensor, temperature: float, limits: tuple[float, int, float], u: float
) -> int:
    """The token of one row; -1 where no largest logit exists."""
    if not (raw.max().isfinite() and allowed.max().isfinite()):
        return -1
    if temperature == 0:
        return int(allowed.argmax())
    top_p, top_k, min_p = limits
    values, order = allowed.sort(descending=True, stable=True)
    p = torch.softmax((values - values[0]).double() / temperature, 0)
    cumulative = p.cumsum(0)
    count = min(top_k, len(p)) if top_k > 0 else len(p)
    count = 1 + int((cumulative[: count - 1] < top_p * cumulative[count - 1]).sum())
    count = min(count, max(1, int((p >= min_p * p[0]).sum())))
    return int(order[int((cumulative > u * cumulative[count - 1]).nonzero()[0])])
