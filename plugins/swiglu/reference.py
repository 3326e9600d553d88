"""Swiglu in plain torch."""

from __future__ import annotations

import torch


def reference(*, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y [T, F] = gate * sigmoid(gate) * up in float32, in gate's dtype."""
    values = gate.float()
    return ((values * torch.sigmoid(values) * up.float()).to(gate.dtype),)
