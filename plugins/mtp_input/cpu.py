"""MtpInput on CPUs: both norms at once, over the concatenation."""

from __future__ import annotations

import torch

from dsc.plugins.cpu_node import CpuNode, Run, StepMemo
from dsc.plugins.norm import Norm


def bind(node: CpuNode) -> Run:
    """Two stacked norms; the weights are graph constants."""
    weights = torch.stack([node.constants[name].float() for name in ("embedding_norm", "hidden_norm")])
    norm = Norm(weights, float(node.attributes["epsilon"]))

    def run(step: StepMemo, embedding: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.stack((embedding, hidden), 1)  # in the wider dtype of the two
        return (norm(both).to(embedding.dtype).flatten(1),)

    return run
