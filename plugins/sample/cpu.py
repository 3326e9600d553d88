"""Sample on CPUs: all rows at once; greedy rows without sorting.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from dsc.plugins.cpu_node import CpuNode, Run, StepMemo
from dsc.plugins.sample.philox import uniform


def bind(node: CpuNode) -> Run:
    """Nothing to prepare: the op has no weights."""
    return _run


def _run(
    step: StepMemo,
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
    allowed = _mask(logits, token_mask)
    best, tokens = allowed.max(-1)
    sampled = temperature.nonzero().flatten()
    if len(sampled):
        limits = [x[sampled] for x in (temperature, top_p, top_k, min_p)]
        tokens[sampled] = _draw(allowed[sampled], uniform(seeds[sampled], positions[sampled]), *limits)
    # NaN or infinite where the raw logits hold a NaN or an infinity, or where nothing is allowed.
    total = logits.logsumexp(-1)
    broken = (total - best).isfinite().logical_not_()
    logprobs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - total
    tokens = tokens.masked_fill_(broken, -1).int()
    return tokens, _accept(tokens, drafts), logprobs.masked_fill_(broken, torch.nan)


def _mask(logits: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    """logits [R, V] with -inf where the token's bit is clear; logits themselves where every bit is set."""
    if bool((token_mask == -1).all()):
        return logits
    bits = token_mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def _draw(
    allowed_RV: torch.Tensor,
    u: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Tokens int64 [R] by inverse cumulative probability. The kept tokens are always the first of the sorted ones."""
    sorted_RV, order_RV = allowed_RV.sort(dim=-1, descending=True, stable=True)
    p_RV = torch.softmax((sorted_RV - sorted_RV[:, :1]).double() / temperature.unsqueeze(-1), -1)
    cumulative_RV = p_RV.cumsum(-1)
    vocabulary = allowed_RV.shape[1]
    count = torch.where(top_k > 0, top_k.clamp_max(vocabulary), vocabulary).long()
    limit = cumulative_RV.gather(-1, count.unsqueeze(-1) - 1) * top_p.unsqueeze(-1)
    count = torch.minimum(count, 1 + (cumulative_RV < limit).sum(-1))
    count = torch.minimum(count, (p_RV >= min_p.unsqueeze(-1) * p_RV[:, :1]).sum(-1).clamp_min(1))
    goal = cumulative_RV.gather(-1, count.unsqueeze(-1) - 1) * u.unsqueeze(-1)
    place = (cumulative_RV <= goal).sum(-1, keepdim=True)
    # A row without finite logits has no place; its token is replaced by the caller.
    return order_RV.gather(-1, place.clamp_max_(vocabulary - 1)).squeeze(-1)


def _accept(tokens: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """int32 [R]: 1 up to the first refused draft of each sequence. A row without a draft ends its sequence."""
    accepted, going = [], True
    for token, draft in zip(tokens.tolist(), drafts.tolist(), strict=True):
        accepted.append(int(going and token == draft >= 0))
        going = draft < 0 or accepted[-1] > 0
    return torch.tensor(accepted, dtype=torch.int32)
