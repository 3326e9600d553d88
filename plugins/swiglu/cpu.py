"""Swiglu on CPUs, and the same for gate and up side by side."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from dsc.plugins.cpu_node import CpuNode, Run


def bind(node: CpuNode) -> Run:
    """Two elementwise calls; bfloat16 rounds between them."""
    return lambda step, gate, up: (silu(gate).mul_(up),)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2*F], gate first: [T, F]."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate).mul_(up)
