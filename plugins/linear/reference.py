"""Linear in plain torch."""

from __future__ import annotations

import torch

from dsc.plugins.stored import StoredWeight, linear


def reference(*, x: torch.Tensor, w: StoredWeight) -> tuple[torch.Tensor, ...]:
    """y [T, O] = x [T, I] times w [O, I] transposed, in x's dtype."""
    return (linear(x, w).to(x.dtype),)
