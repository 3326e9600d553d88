"""Integer codes to bfloat16 before a product of many tokens: each weight is decoded once, not once a tile of tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.plugins.triton_weights import decode_bytes, decode_nibbles
from dsc.runtime.steps import Kernel

MAX_BLOCK = 4096  # stored bytes of one program


@triton.jit
def dequantize_rows(
    w, w_scales, values, ROW: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """values[n, k] = bfloat16 of the weight; ROW stored bytes a row."""
    n = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < ROW
    data = tl.load(w + n * ROW + byte, inside, 0)
    if KIND == "wint4":
        low, high = decode_nibbles(data, "bf16")
        scale = tl.load(w_scales + n * (2 * ROW // GROUP) + byte * 2 // GROUP, inside, 0.0).to(tl.float32)
        low, high = (low.to(tl.float32) * scale).to(tl.bfloat16), (high.to(tl.float32) * scale).to(tl.bfloat16)
        k = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        tl.store(values + n * (2 * ROW) + k, tl.interleave(low, high), k < 2 * ROW)
    else:
        scale = tl.load(w_scales + n).to(tl.float32)
        tl.store(values + n * ROW + byte, (decode_bytes(data, "fp32") * scale).to(tl.bfloat16), inside)


def dequantize(node: GpuNode, w: str, rows: int, width: int, values: Typed) -> Kernel:
    """The step that sets values [rows, width] to a weight in wint4 or wint8; rows of all its experts.

    It waits for all before it, so that values may lie where an earlier step of the node has read.
    """
    format_ = node.format(w)
    assert format_.kind in ("wint4", "wint8"), (node.name, w, format_)
    row = width // 2 if format_.kind == "wint4" else width
    block = min(MAX_BLOCK, triton.next_power_of_2(row))
    return node.triton(
        dequantize_rows,
        (rows, -(-row // block)),
        {
            "w": node.at(w),
            "w_scales": node.at(f"{w}.scales"),
            "values": values,
            "ROW": row,
            "KIND": format_.kind,
            "GROUP": format_.group,
            "BLOCK": block,
        },
        num_warps=8 if block > 1024 else 4,
    )
