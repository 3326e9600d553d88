"""RmsNorm on CPUs."""

from __future__ import annotations

import torch

from dsc.plugins.cpu_node import CASTS, CpuNode, Run, StepMemo
from dsc.plugins.norm import Norm


def bind(node: CpuNode) -> Run:
    """The norm in few calls; its weight is a graph constant."""
    cast = CASTS[node.types["x"].dtype]
    norm = Norm(node.constants["weight"], float(node.attributes["epsilon"]))

    def run(step: StepMemo, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (cast(norm(x)),)

    return run
