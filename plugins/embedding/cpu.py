"""Embedding on CPUs: only the rows asked for are read."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from dsc.plugins.cpu_node import CpuNode, Run, StepMemo, keep


def bind(node: CpuNode) -> Run:
    """A plain lookup where the table is float; quantized rows are dequantized after it."""
    table = node.pack("table", keep)
    dtype = getattr(torch, str(node.attributes["dtype"]))
    if table.scales is None:
        return lambda step, tokens: (embedding(tokens, table.data).to(dtype),)

    def run(step: StepMemo, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (table.dequantize_rows(tokens.long()).to(dtype),)

    return run
