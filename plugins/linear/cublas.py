"""What cuBLAS multiplies by: rows gathered first where only some count, codes of fp8 where cuBLASLt takes them."""

from __future__ import annotations

import triton
import triton.language as tl

from dsc.plugins.formats import Format
from dsc.plugins.gpu_node import Arch, GpuNode, Typed
from dsc.runtime.steps import Kernel, takes_scales

GATHER_BLOCK = 2048


@triton.jit
def gather_rows(x, rows, y, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y[t] = x[rows[t]], a part of a row a program."""
    t = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows + t).to(tl.int64)
    tl.store(y + t.to(tl.int64) * K + at, tl.load(x + row * K + at, at < K), at < K)


def gather(node: GpuNode, x: Typed, rows: Typed, count: str, width: int, name: str) -> tuple[Kernel, Typed]:
    """The step that copies `count` rows of bfloat16 x, and where they are then."""
    gathered = node.add_scratch(f"{name}.gathered", "bfloat16", (count, width))
    step = node.triton(
        gather_rows,
        (count, -(-width // GATHER_BLOCK)),
        {"x": x, "rows": rows, "y": gathered, "K": width, "BLOCK": GATHER_BLOCK, "PDL": node.arch.has_pdl},
        pdl=True,
    )
    return step, gathered


def takes_codes(format_: Format, activations: str, shape: tuple[int, int], arch: Arch) -> bool:
    """Whether cuBLASLt multiplies by an fp8 weight [N, K] as it is stored: scales of groups and blocks are Hopper's alone."""
    return arch.name == "sm_90a" and format_.kind == "fp8" and activations == "bfloat16" and takes_scales(*shape)
