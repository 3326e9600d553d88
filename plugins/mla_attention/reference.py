"""MlaAttention in plain torch: one sequence after the other, every score at once."""

from __future__ import annotations

import torch

from dsc.plugins.latent_cache import cache_rows, context_slots
from dsc.plugins.rope import rotate
from dsc.plugins.stored import StoredWeight


def reference(
    *,
    q: torch.Tensor,
    kv_b: StoredWeight,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lengths: torch.Tensor,
    block_table: torch.Tensor,
    cache: torch.Tensor,
    latent: torch.Tensor | None,
    k_rope: torch.Tensor | None,
    heads: int,
    nope: int,
    rope: int,
    v: int,
    latent_dim: int,
    scale: float,
    mode: str,
    cache_dtype: str,
    block_tokens: int,
    block_bytes: int,
) -> tuple[torch.Tensor, ...]:
    """o [T, heads*v] in q's dtype."""
    attend = {"expanded": _expanded, "absorbed": _absorbed}[mode]
    rows = cache_rows(cache, cache_dtype, latent_dim + rope)
    q_nope_THN, q_rope_THR = q.float().view(-1, heads, nope + rope).split_with_sizes((nope, rope), -1)
    angles = positions.long()
    q_rope_THR = rotate(q_rope_THR, cos[angles].unsqueeze(1), sin[angles].unsqueeze(1))
    w_uk_HNL, w_uv_HVL = kv_b.dequantize().view(heads, nope + v, latent_dim).split_with_sizes((nope, v), 1)
    o_THV = torch.zeros(len(q), heads, v)
    for sequence, length in enumerate(sequence_lengths.tolist()):
        start, stop = query_starts[sequence : sequence + 2].tolist()
        slots = context_slots(block_table[sequence], length, block_tokens)
        latent_SL, k_rope_SR = rows[slots].float().split_with_sizes((latent_dim, rope), -1)
        visible = torch.arange(length) <= length - (stop - start) + torch.arange(stop - start).unsqueeze(1)
        bias_TS = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        q_rope = scale * torch.einsum("thr,sr->hts", q_rope_THR[start:stop], k_rope_SR) + bias_TS
        o_THV[start:stop] = attend(q_nope_THN[start:stop], q_rope, latent_SL, w_uk_HNL, w_uv_HVL, scale)
    return (o_THV.flatten(1).to(q.dtype),)


def _expanded(
    q_THN: torch.Tensor,
    rope_scores_HTS: torch.Tensor,
    latent_SL: torch.Tensor,
    w_uk_HNL: torch.Tensor,
    w_uv_HVL: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention over keys and values made of the latents, [T, H, V]; rope_scores hold the rope part and the mask."""
    k_HSN = latent_SL @ w_uk_HNL.mT
    v_HSV = latent_SL @ w_uv_HVL.mT
    scores_HTS = scale * torch.einsum("thn,hsn->hts", q_THN, k_HSN) + rope_scores_HTS
    return torch.einsum("hts,hsv->thv", torch.softmax(scores_HTS, -1), v_HSV)


def _absorbed(
    q_THN: torch.Tensor,
    rope_scores_HTS: torch.Tensor,
    latent_SL: torch.Tensor,
    w_uk_HNL: torch.Tensor,
    w_uv_HVL: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same with W_UK moved to the query and W_UV to the sum: keys and values are the latents themselves."""
    q_THL = torch.einsum("thn,hnl->thl", q_THN, w_uk_HNL)
    scores_HTS = scale * torch.einsum("thl,sl->hts", q_THL, latent_SL) + rope_scores_HTS
    o_THL = torch.einsum("hts,sl->thl", torch.softmax(scores_HTS, -1), latent_SL)
    return torch.einsum("thl,hvl->thv", o_THL, w_uv_HVL)
