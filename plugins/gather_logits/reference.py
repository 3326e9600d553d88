"""GatherLogits in plain torch."""

from __future__ import annotations

import torch

from dsc.plugins.communicator import gather


def reference(*, part: torch.Tensor, ranks: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """logits float32 [R, vocabulary] of the ranks' parts [R, part]."""
    return (torch.cat(tuple(gather(part, ranks)), -1)[:, :vocabulary].contiguous(),)
