"""LmHead in plain torch."""

from __future__ import annotations

import torch

from dsc.plugins.stored import StoredWeight, linear


def reference(*, hidden: torch.Tensor, logit_rows: torch.Tensor, w: StoredWeight) -> tuple[torch.Tensor, ...]:
    """logits float32 [R, V] of the rows `logit_rows` of hidden [T, D]."""
    return (linear(hidden[logit_rows.long()], w),)
