"""Embedding in plain torch."""

from __future__ import annotations

import torch

from dsc.plugins.stored import StoredWeight


def reference(*, tokens: torch.Tensor, table: StoredWeight, dtype: str) -> tuple[torch.Tensor, ...]:
    """y [T, D] = the dequantized rows of `tokens` [T]."""
    return (table.dequantize_rows(tokens.long()).to(getattr(torch, dtype)),)
