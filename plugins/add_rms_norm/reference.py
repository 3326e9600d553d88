"""AddRmsNorm in plain torch."""

from __future__ import annotations

import torch

from dsc.plugins.stored import norm_codes


def reference(
    *, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, quantize: str = ""
) -> tuple[torch.Tensor, ...]:
    """(norm of the sum, sum), both [T, D] in x's dtype; the norm reads the rounded sum. With `quantize` the norm's codes and
    scales too.
    """
    total = (x.float() + residual.float()).to(x.dtype)
    values = total.float()
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    y = (values * inverse * weight.float()).to(x.dtype)
    return y, total, *norm_codes(y, quantize)
