"""Linear in plain torch."""

from __future__ import annotations

import torch

from dsc.plugins.stored import StoredWeight, given_codes, linear


def reference(
    *, x: torch.Tensor, w: StoredWeight, x_codes: torch.Tensor | None = None, x_scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """y [T, O] = x [T, I] times w [O, I] transposed, in x's dtype."""
    return (linear(x, w, given_codes(x_codes, x_scales)).to(x.dtype),)
