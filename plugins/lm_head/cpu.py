"""LmHead on CPUs: float32 products, whatever the weight's format."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from dsc.plugins.cpu_linear import bind_product
from dsc.plugins.cpu_node import CpuNode, Run, StepMemo, keep

CHUNK_ELEMENTS = 1 << 19  # of a weight converted at a time: 2 MB at float32 stay in a core's cache


def bind(node: CpuNode) -> Run:
    """A bfloat16 weight is converted in chunks, since torch's bfloat16 product returns bfloat16; others as in Linear."""
    kind = node.weights["w"].format.kind
    if kind == "bf16":
        weight = node.pack("w", keep).data
        chunk_rows = max(1, CHUNK_ELEMENTS // weight.shape[1])

        def run_chunks(step: StepMemo, hidden: torch.Tensor, logit_rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rows = hidden.index_select(0, logit_rows).float()
            parts = [linear(rows, chunk.float()) for chunk in torch.split(weight, chunk_rows)]
            return (parts[0] if len(parts) == 1 else torch.cat(parts, -1),)

        return run_chunks

    packed = kind in ("wint4", "wint8")  # their kernels sum in float32 and round to the activations' dtype
    dtype = getattr(torch, node.types["hidden"].dtype) if packed else torch.float32
    product = bind_product(node, "w", dtype)

    def run(step: StepMemo, hidden: torch.Tensor, logit_rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (product(hidden.index_select(0, logit_rows).to(dtype)).float(),)

    return run
