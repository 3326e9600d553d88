"""Activations to e4m3 codes in 1x128 groups, as fp8 weights multiply them: one small kernel before the product."""

from __future__ import annotations

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.runtime.steps import Kernel

GROUP = 128
GROUPS_PER_PROGRAM = 8


@triton.jit
def encode_e4m3(values, NATIVE: tl.constexpr):
    """float32 in -448..448 -> e4m3, rounded to nearest even; its bits as uint8 unless NATIVE."""
    if NATIVE:
        return values.to(tl.float8e4nv)
    else:
        bits = values.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Adding 2^23 rounds to an integer: below 2^-6 codes are multiples of 2^-9.
        small = (tl.abs(values) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(size < ((127 - 6) << 23), small, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantize_rows(
    x,
    rows,
    codes,
    scales,
    count,
    K: tl.constexpr,
    UE8M0: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """codes[t] = x[t or rows[t]] / scale, scales[group, t] = max(amax, 1e-4) / 448, or the next power of two; `count` of
    them a group.
    """
    t = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = t if rows is None else tl.load(rows + t)
    values = tl.load(x + row.to(tl.int64) * K + k, k < K, 0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 1), 1e-4), 448.0)
    if UE8M0:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    quotient = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    quotient = tl.minimum(tl.maximum(quotient, -448.0), 448.0)
    tl.store(codes + t.to(tl.int64) * K + k, encode_e4m3(quotient, NATIVE), k < K)
    tl.store(scales + group.to(tl.int64) * count + t, scale, group * 128 < K)


def quantize(
    node: GpuNode,
    x: Typed,
    width: int,
    count: str,
    *,
    ue8m0: bool,
    rows: Typed | None = None,
    name: str = "x",
    multiple: int = 1,
) -> tuple[Kernel, Typed, Typed]:
    """A step that quantizes `count` rows of x [*, width] (those that `rows` names, if given), and where its results are:
    codes [count, width], uint8 where the architecture has no FP8, and scales [ceil(width/128), count].

    multiple   of which a row of scales has some: behind those of `count` tokens are undefined ones; divides the bound
    """
    assert node.bounds.get(count, 0) % multiple == 0, (node.name, count, multiple)
    groups = -(-width // GROUP)
    codes = node.add_scratch(f"{name}.codes", "float8_e4m3fn", (count, width))
    if not node.arch.has_fp8:
        codes = Typed(codes.pointer, "uint8")
    scales = node.add_scratch(f"{name}.scales", "float32", (groups, count))
    step = node.triton(
        quantize_rows,
        (count, -(-groups // GROUPS_PER_PROGRAM)),
        {
            "x": x,
            "rows": rows,
            "codes": codes,
            "scales": scales,
            "count": count if multiple == 1 else f"ceil_div({count},{multiple})*{multiple}",
            "K": width,
            "UE8M0": ue8m0,
            "NATIVE": node.arch.has_fp8,
            "GROUPS": GROUPS_PER_PROGRAM,
            "PDL": node.arch.has_pdl,
        },
        pdl=True,
    )
    return step, codes, scales
