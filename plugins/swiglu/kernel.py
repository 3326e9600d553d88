"""SwiGLU on GPUs: elementwise, computed in float32."""

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode
from dsc.runtime.steps import Variant

BLOCK = 1024


@triton.jit
def swiglu(gate, up, y, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y = gate * sigmoid(gate) * up."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    if PDL:
        tl.extra.cuda.gdc_wait()
    g = tl.load(gate + at, inside, 0.0).to(tl.float32)
    u = tl.load(up + at, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(y + at, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), inside)


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """One launch over all elements."""
    count = f"T*{node.width('F')}"
    arguments = {name: node.at(name) for name in ("gate", "up", "y")}
    step = node.triton(
        swiglu,
        (f"ceil_div({count}, {BLOCK})",),
        {**arguments, "count": count, "BLOCK": BLOCK, "PDL": node.arch.has_pdl},
        pdl=True,
    )
    return (Variant((step,)),)
