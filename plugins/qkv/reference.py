"""Qkv in plain torch."""

from __future__ import annotations

import torch

from dsc.plugins.latent_cache import cache_rows
from dsc.plugins.rope import rotate
from dsc.plugins.stored import StoredWeight, given_codes, linear


def reference(
    *,
    x: torch.Tensor,
    w: StoredWeight,
    w_kv: StoredWeight | None,
    q_norm: torch.Tensor | None,
    kv_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    x_codes: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    q_width: int,
    q_lora: int,
    heads: int,
    nope: int,
    latent: int,
    rope: int,
    epsilon: float,
    cache_dtype: str,
    block_tokens: int,
    block_bytes: int,
    joint: int,
) -> tuple[torch.Tensor, ...]:
    """q [T, q_width], latent [T, latent], k_rope [T, rope] in x's dtype, and `cache` with the tokens appended."""
    quantized = given_codes(x_codes, x_scales)
    projected = linear(x, w, quantized)
    if w_kv is not None:
        projected = torch.cat((projected, linear(x, w_kv, quantized)), -1)
    q, latents, keys = projected.split_with_sizes((q_width, latent, rope), -1)
    if q_norm is not None:
        q = _norm(q, q_norm, epsilon)
    latents = _norm(latents, kv_norm, epsilon)
    keys = rotate(keys, cos[positions.long()], sin[positions.long()])
    kept = slots >= 0
    rows = cache_rows(cache, cache_dtype, latent + rope)
    rows[slots[kept].long()] = torch.cat((latents, keys), -1)[kept].to(rows.dtype)
    return q.to(x.dtype), latents.to(x.dtype), keys.to(x.dtype), cache


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()
