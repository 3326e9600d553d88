"""AddRmsNorm in plain torch."""

from __future__ import annotations

import torch


def reference(
    *, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, ...]:
    """(norm of the sum, sum), both [T, D] in x's dtype; the norm reads the rounded sum."""
    total = (x.float() + residual.float()).to(x.dtype)
    values = total.float()
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (values * inverse * weight.float()).to(x.dtype), total
