"""AddRmsNorm on CPUs."""

from __future__ import annotations

import torch

from dsc.plugins.cpu_node import CpuNode, Run, StepMemo
from dsc.plugins.norm import Norm


def bind(node: CpuNode) -> Run:
    """torch rounds the sum to the operands' dtype by itself."""
    norm = Norm(node.constants["weight"], float(node.attributes["epsilon"]))

    def run(step: StepMemo, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + residual
        return norm(total).to(x.dtype), total

    return run
