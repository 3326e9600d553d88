"""RmsNorm on CPUs."""

from __future__ import annotations

import torch

from dsc.plugins.cpu_node import CASTS, CpuNode, Run, StepMemo
from dsc.plugins.norm import Norm
from dsc.plugins.stored import norm_codes


def bind(node: CpuNode) -> Run:
    """The norm in few calls; its weight is a graph constant."""
    cast = CASTS[node.types["x"].dtype]
    norm = Norm(node.constants["weight"], float(node.attributes["epsilon"]))
    quantize = str(node.attributes.get("quantize", ""))

    def run(step: StepMemo, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = cast(norm(x))
        return y, *norm_codes(y, quantize)

    return run
