"""Sample on CPUs: all rows at once; greedy rows without sorting.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

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
    raw_RV = logits.numpy()
    mask = token_mask.numpy()
    allowed_RV = raw_RV if (mask == -1).all() else _mask(raw_RV, mask)
    chosen = allowed_RV.argmax(-1)
    rows = np.arange(len(chosen))
    best = allowed_RV[rows, chosen]
    if temperature.numpy().any():
        sampled = temperature.nonzero().flatten()
        limits = [x[sampled] for x in (temperature, top_p, top_k, min_p)]
        u = uniform(seeds[sampled], positions[sampled])
        chosen[sampled.numpy()] = _draw(torch.from_numpy(allowed_RV)[sampled], u, *limits).numpy()
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        # NaN or infinite where the raw logits hold a NaN or an infinity, or where nothing is allowed.
        highest = raw_RV.max(-1)
        total = np.log(np.exp(raw_RV - highest[:, None]).sum(-1)) + highest
        broken = ~np.isfinite(total - best)
        logprobs = raw_RV[rows, chosen] - total
    tokens = chosen.astype(np.int32)
    if broken.any():
        tokens[broken], logprobs[broken] = -1, np.nan
    return torch.from_numpy(tokens), _accept(tokens.tolist(), drafts.tolist()), torch.from_numpy(logprobs)


def _mask(raw_RV: NDArray[np.float32], token_mask: NDArray[np.int32]) -> NDArray[np.float32]:
    """The logits with -inf where the token's bit is clear."""
    bits = token_mask[..., None] >> np.arange(32, dtype=np.int32) & 1
    allowed = bits.reshape(len(bits), -1)[:, : raw_RV.shape[1]] != 0
    return np.where(allowed, raw_RV, np.float32(-np.inf))


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


def _accept(tokens: list[int], drafts: list[int]) -> torch.Tensor:
    """int32 [R]: 1 up to the first refused draft of each sequence. A row without a draft ends its sequence."""
    accepted, going = [], True
    for token, draft in zip(tokens, drafts, strict=True):
        accepted.append(int(going and token == draft >= 0))
        going = draft < 0 or accepted[-1] > 0
    return torch.tensor(accepted, dtype=torch.int32)
