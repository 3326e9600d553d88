"""RmsNorm in plain torch."""

from __future__ import annotations

import torch


def reference(*, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, ...]:
    """y [T, D] = x / sqrt(mean(x^2) + epsilon) * weight in float32, in x's dtype."""
    values = x.float()
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return ((values * inverse * weight.float()).to(x.dtype),)
