"""The MTP layer's input on GPUs: two RMSNorms side by side, one program a row and half."""

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode
from dsc.runtime.steps import Variant


@triton.jit
def mtp_input(
    embedding, hidden, embedding_norm, hidden_norm, y, epsilon, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """y[r] = [RMSNorm(embedding[r]), RMSNorm(hidden[r])]; axis 1 of the grid is the half."""
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    scale = tl.load(tl.where(half == 0, embedding_norm, hidden_norm) + columns, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = tl.load(tl.where(half == 0, embedding, hidden) + row * D + columns, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    inverse = tl.math.rsqrt(tl.sum(values * values, 0) / D + epsilon)
    tl.store(y + row * 2 * D + half * D + columns, (values * inverse * scale).to(y.dtype.element_ty), inside)


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """One launch of 2 T programs."""
    width = node.width("D")
    step = node.triton(
        mtp_input,
        ("T", 2),
        {
            **{name: node.at(name) for name in ("embedding", "hidden", "embedding_norm", "hidden_norm", "y")},
            "epsilon": float(node.attributes["epsilon"]),
            "D": width,
            "BLOCK": triton.next_power_of_2(width),
            "PDL": node.arch.has_pdl,
        },
        num_warps=8 if width > 2048 else 4,
        pdl=True,
    )
    return (Variant((step,)),)
