"""Moe in plain torch."""

from __future__ import annotations

import torch

from dsc.plugins.stored import Quantized, StoredWeight, given_codes, linear


def reference(
    *,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate: StoredWeight,
    up: StoredWeight,
    down: StoredWeight,
    shared_gate: StoredWeight | None,
    shared_up: StoredWeight | None,
    shared_down: StoredWeight | None,
    x_codes: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    expert_groups: int = 1,
) -> tuple[torch.Tensor, ...]:
    """y [T, D]: the weighted experts of each row of x, then the shared expert, summed in float32, in x's dtype."""
    quantized = given_codes(x_codes, x_scales)
    y = torch.zeros(x.shape, dtype=torch.float32)
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        rows, column = torch.nonzero(ids == expert, as_tuple=True)
        of_rows = None if quantized is None else (quantized[0][rows], quantized[1][rows])
        out = _mlp(x[rows], of_rows, gate[expert], up[expert], down[expert])
        y.index_add_(0, rows, out * weights[rows, column].unsqueeze(1))
    if shared_gate is not None and shared_up is not None and shared_down is not None:
        y += _mlp(x, quantized, shared_gate, shared_up, shared_down)
    return (y.to(x.dtype),)


def _mlp(
    x: torch.Tensor, quantized: Quantized | None, gate: StoredWeight, up: StoredWeight, down: StoredWeight
) -> torch.Tensor:
    hidden = linear(x, gate, quantized)
    return linear(hidden * torch.sigmoid(hidden) * linear(x, up, quantized), down)
