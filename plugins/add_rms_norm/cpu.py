"""AddRmsNorm on CPUs."""

from __future__ import annotations

import torch

from dsc.plugins.cpu_node import CASTS, CpuNode, Run, StepMemo
from dsc.plugins.norm import Norm
from dsc.plugins.stored import norm_codes


def bind(node: CpuNode) -> Run:
    """torch rounds the sum to the operands' dtype by itself."""
    cast = CASTS[node.types["x"].dtype]
    norm = Norm(node.constants["weight"], float(node.attributes["epsilon"]))
    quantize = str(node.attributes.get("quantize", ""))

    def run(step: StepMemo, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + residual
        y = cast(norm(total))
        return y, total, *norm_codes(y, quantize)

    return run
