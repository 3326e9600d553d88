"""Rows of the embedding table on GPUs."""

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode
from dsc.runtime.errors import DscError
from dsc.runtime.steps import Variant


@triton.jit
def embedding(tokens, table, y, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y[r] = table[tokens[r]]."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(tokens + row).to(tl.int64)
    values = tl.load(table + token * D + columns, inside, 0.0)
    tl.store(y + row.to(tl.int64) * D + columns, values.to(y.dtype.element_ty), inside)


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """One launch of T programs; the table is not quantized."""
    if node.format("table").quantized:
        got = str(node.format("table"))
        raise DscError(f"{node.name}: a quantized embedding has no kernel", wanted="bf16 or fp32", got=got)
    width = node.width("D")
    step = node.triton(
        embedding,
        ("T",),
        {
            **{name: node.at(name) for name in ("tokens", "table", "y")},
            "D": width,
            "BLOCK": triton.next_power_of_2(width),
            "PDL": node.arch.has_pdl,
        },
        pdl=True,
    )
    return (Variant((step,)),)
