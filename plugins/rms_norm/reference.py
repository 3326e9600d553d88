"""RmsNorm in plain torch."""

from __future__ import annotations

import torch

from dsc.plugins.stored import norm_codes


def reference(*, x: torch.Tensor, weight: torch.Tensor, epsilon: float, quantize: str = "") -> tuple[torch.Tensor, ...]:
    """y [T, D] = x / sqrt(mean(x^2) + epsilon) * weight in float32, in x's dtype; with `quantize` its codes and scales."""
    values = x.float()
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    y = (values * inverse * weight.float()).to(x.dtype)
    return y, *norm_codes(y, quantize)
