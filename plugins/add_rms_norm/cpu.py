"""AddRmsNorm on CPUs."""

from __future__ import annotations

import torch

from dsc.plugins.cpu_node import CASTS, CpuNode, Run, StepMemo
from dsc.plugins.norm import Norm


def bind(node: CpuNode) -> Run:
    """torch rounds the sum to the operands' dtype by itself."""
    cast = CASTS[node.types["x"].dtype]
    norm = Norm(node.constants["weight"], float(node.attributes["epsilon"]))

    def run(step: StepMemo, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + residual
        return cast(norm(total)), total

    return run
