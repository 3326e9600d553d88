"""MtpInput in plain torch."""

from __future__ import annotations

import torch


def reference(
    *,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    embedding_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    """y [T, 2*D]: the normed embedding, then the normed hidden state, in the embedding's dtype."""
    parts = (_norm(embedding, embedding_norm, epsilon), _norm(hidden, hidden_norm, epsilon))
    return (torch.cat(parts, -1).to(embedding.dtype),)


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    values = x.float()
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon) * weight.float()
