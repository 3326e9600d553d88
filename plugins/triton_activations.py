"""Activations to e4m3 codes in 1x128 groups, as fp8 weights multiply them: in the launch of the norm that makes them, or in
a small kernel before the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsc.plugins.formats import parse_format
from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.runtime.steps import Kernel

GROUP = 128
GROUPS_PER_PROGRAM = 8
SPREAD_BLOCK = 1024


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
def quantize_groups(values, UE8M0: tl.constexpr, NATIVE: tl.constexpr):
    """float32 [G, 128] -> codes [G, 128] = values / scale, scales [G] = max(amax, 1e-4) / 448 or the next power of two."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 1), 1e-4), 448.0)
    if UE8M0:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    quotient = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    quotient = tl.minimum(tl.maximum(quotient, -448.0), 448.0)
    return encode_e4m3(quotient, NATIVE), scale


@triton.jit
def store_codes(
    y, t, codes, scales, count, K: tl.constexpr, BLOCK: tl.constexpr, UE8M0: tl.constexpr, NATIVE: tl.constexpr
):
    """codes[t], scales[group, t] of a row y [BLOCK] that its program holds as it was rounded; zeros behind its K columns."""
    group = tl.arange(0, BLOCK // 128)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    made, scale = quantize_groups(tl.reshape(y.to(tl.float32), (BLOCK // 128, 128)), UE8M0, NATIVE)
    tl.store(codes + t.to(tl.int64) * K + k, made, k < K)
    tl.store(scales + group.to(tl.int64) * count + t, scale, group * 128 < K)


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
    """codes[t], scales[group, t] of x[t or rows[t]]; `count` scales a group."""
    t = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = t if rows is None else tl.load(rows + t)
    values = tl.load(x + row.to(tl.int64) * K + k, k < K, 0.0).to(tl.float32)
    made, scale = quantize_groups(values, UE8M0, NATIVE)
    tl.store(codes + t.to(tl.int64) * K + k, made, k < K)
    tl.store(scales + group.to(tl.int64) * count + t, scale, group * 128 < K)


@triton.jit
def spread_scales(scales, spread, count, pitch, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """spread[group, t] = scales[group, t], rows of `count` and of `pitch`."""
    group = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(spread + group * pitch + t, tl.load(scales + group * count + t, t < count), t < count)


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
) -> tuple[tuple[Kernel, ...], Typed, Typed]:
    """Steps that quantize `count` rows of x [*, width] (those that `rows` names, if given), and where their results are:
    codes [count, width], uint8 where the architecture has no FP8, and scales [ceil(width/128), count].

    Where the norm that made x did it, no step, or the one that spreads its scales.

    multiple   of which a row of scales has some: behind those of `count` tokens are undefined ones; divides the bound
    """
    assert node.bounds.get(count, 0) % multiple == 0, (node.name, count, multiple)
    groups, pitch = -(-width // GROUP), count if multiple == 1 else f"ceil_div({count},{multiple})*{multiple}"
    if node.has("x_codes") and x == node.at("x"):
        assert rows is None, node.name
        codes, scales = codes_at(node, "x_codes"), node.at("x_scales")
        if multiple == 1:
            return (), codes, scales
        spread = node.add_scratch(f"{name}.scales", "float32", (groups, count))
        return (_spread(node, scales, spread, groups, count, pitch),), codes, spread
    node.add_scratch(f"{name}.codes", "float8_e4m3fn", (count, width))
    codes = codes_at(node, f"{node.name}/{name}.codes")
    scales = node.add_scratch(f"{name}.scales", "float32", (groups, count))
    step = node.triton(
        quantize_rows,
        (count, -(-groups // GROUPS_PER_PROGRAM)),
        {
            "x": x,
            "rows": rows,
            "codes": codes,
            "scales": scales,
            "count": pitch,
            "K": width,
            "UE8M0": ue8m0,
            "NATIVE": node.arch.has_fp8,
            "GROUPS": GROUPS_PER_PROGRAM,
            "PDL": node.arch.has_pdl,
        },
        pdl=True,
    )
    return (step,), codes, scales


def _spread(node: GpuNode, scales: Typed, spread: Typed, groups: int, count: str, pitch: str) -> Kernel:
    arguments = {"scales": scales, "spread": spread, "count": count, "pitch": pitch}
    return node.triton(
        spread_scales,
        (groups, f"ceil_div({count},{SPREAD_BLOCK})"),
        {**arguments, "BLOCK": SPREAD_BLOCK, "PDL": node.arch.has_pdl},
        pdl=True,
    )


def codes_at(node: GpuNode, name: str) -> Typed:
    """An operand of e4m3 codes as kernels of the architecture point at it."""
    return node.at(name, dtype="" if node.arch.has_fp8 else "uint8")


def norm_arguments(node: GpuNode) -> dict[str, object]:
    """Arguments by which a norm's kernel makes codes of its rows, or makes none: codes, scales, count, UE8M0, NATIVE."""
    quantize = str(node.attributes.get("quantize", ""))
    return {
        "codes": codes_at(node, "codes") if quantize else None,
        "scales": node.at("scales") if quantize else None,
        "count": "T" if quantize else None,
        "UE8M0": bool(quantize) and parse_format(quantize).ue8m0,
        "NATIVE": node.arch.has_fp8,
    }
