"""Triton pieces shared by every kernel that multiplies by a stored weight: decoding, and the loop over K.

A weight is [N, K] as `dsc.plugins.formats` stores it, row-major. `product` is the loop of one tile: rows of x times rows
of the weight, summed over a range of K in float32. MATH says in which type tiles are multiplied:

    fp32   IEEE float32 on the plain cores: float32 activations, or a float32 weight
    bf16   tensor cores; integer codes and e4m3 become bfloat16 exactly, scales multiply the float32 sums
    fp8    tensor cores multiply e4m3 codes of both sides (Arch.has_fp8)
"""

import os

import triton
import triton.language as tl

from dsc.plugins.formats import Format
from dsc.plugins.gpu_node import Arch, Typed

# Triton's interpreter runs no inline assembly: the same values by plain operations.
ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")

# Nibbles n of four bytes: bits 0x4300 | (n ^ 8) are the bfloat16 128 + n + 8.
_NIBBLES = tl.constexpr(
    """{
    .reg .b32 low, high, one, bias;
    mov.b32 one, 0x3F803F80;
    mov.b32 bias, 0xC308C308;
    shr.u32 high, $4, 4;
    lop3.b32 low, $4, 0x0F0F0F0F, 0x08080808, 0x6A;
    lop3.b32 high, high, 0x0F0F0F0F, 0x08080808, 0x6A;
    prmt.b32 $0, low, 0x43434343, 0x4140;
    prmt.b32 $1, low, 0x43434343, 0x4342;
    prmt.b32 $2, high, 0x43434343, 0x4140;
    prmt.b32 $3, high, 0x43434343, 0x4342;
    fma.rn.bf16x2 $0, $0, one, bias;
    fma.rn.bf16x2 $1, $1, one, bias;
    fma.rn.bf16x2 $2, $2, one, bias;
    fma.rn.bf16x2 $3, $3, one, bias;
    }"""
)
# int8 i: the bfloat16 128 + (i & 127) less 128, or less 256 if i is negative.
_BYTES = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, minus;
    mov.b32 minus, 0xBF80BF80;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 d, b, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, c, minus, a;
    fma.rn.bf16x2 $1, d, minus, b;
    }"""
)
# e4m3: sign, exponent and mantissa moved into a bfloat16 whose exponent is 120 too small.
_E4M3 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, up, zero;
    mov.b32 up, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    and.b32 c, c, 0x07F007F0;
    and.b32 d, d, 0x07F007F0;
    lop3.b32 a, a, 0x80008000, c, 0xEA;
    lop3.b32 b, b, 0x80008000, d, 0xEA;
    fma.rn.bf16x2 $0, a, up, zero;
    fma.rn.bf16x2 $1, b, up, zero;
    }"""
)


@triton.jit
def decode_nibbles(codes, MATH: tl.constexpr):
    """uint8 [..., K/2] -> values of the low and of the high nibbles (even and odd k), bfloat16 or float32."""
    if MATH == "bf16" and ASSEMBLY:
        low, high = tl.inline_asm_elementwise(
            _NIBBLES, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        wide = codes.to(tl.int32)
        dtype: tl.constexpr = tl.bfloat16 if MATH == "bf16" else tl.float32
        low, high = ((wide & 15) ^ 8) - 8, ((wide >> 4) ^ 8) - 8
        low, high = low.to(tl.float32).to(dtype), high.to(tl.float32).to(dtype)
    return low, high


@triton.jit
def decode_bytes(codes, MATH: tl.constexpr):
    """int8 -> the same values, bfloat16 or float32."""
    if MATH == "bf16" and ASSEMBLY:
        return tl.inline_asm_elementwise(_BYTES, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return codes.to(tl.float32).to(tl.bfloat16 if MATH == "bf16" else tl.float32)


@triton.jit
def decode_e4m3(codes, MATH: tl.constexpr):
    """The bits of float8_e4m3fn as uint8 -> the same values, bfloat16 or float32; needs no FP8 instruction."""
    if MATH == "bf16" and ASSEMBLY:
        return tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        bits = codes.to(tl.int32)
        values = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        return values.to(tl.bfloat16 if MATH == "bf16" else tl.float32)


@triton.jit
def _load(base, rows, inside, k, end, stride, ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr):
    """base[rows, k] as [rows, k], or [k, rows]; zeros where a row is not inside or, unless EVEN, k is past the end."""
    if ROWS_FIRST:
        at = base + rows[:, None].to(tl.int64) * stride + k[None, :]
        mask = inside[:, None] if EVEN else inside[:, None] & (k < end)[None, :]
    else:
        at = base + rows[None, :].to(tl.int64) * stride + k[:, None]
        mask = inside[None, :] if EVEN else inside[None, :] & (k < end)[:, None]
    return tl.load(at, mask, 0.0)


@triton.jit
def _load_weight(base, rows, k, end, stride, ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr):
    """As `_load`, every row inside."""
    if ROWS_FIRST:
        at = base + rows.to(tl.int64)[:, None] * stride + k[None, :]
    else:
        at = base + rows.to(tl.int64)[None, :] * stride + k[:, None]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, (k < end)[None, :] if ROWS_FIRST else (k < end)[:, None], 0.0)


@triton.jit
def _dot(x, w, sums, SWAP: tl.constexpr):
    """sums + x w, or with SWAP its transpose: w x. float32 operands are multiplied in float32."""
    if SWAP:
        return tl.dot(w, x, sums, input_precision="ieee")
    else:
        return tl.dot(x, w, sums, input_precision="ieee")


@triton.jit
def _zeros(x_rows, w_rows, SWAP: tl.constexpr):
    """Sums of a tile."""
    if SWAP:
        return tl.zeros((w_rows.shape[0], x_rows.shape[0]), tl.float32)
    else:
        return tl.zeros((x_rows.shape[0], w_rows.shape[0]), tl.float32)


@triton.jit
def _half(words, HIGH: tl.constexpr):
    """The low or high bfloat16 of each int32."""
    return ((words >> 16) if HIGH else words).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def product(
    x,
    x_scales,
    x_scales_step,
    x_rows,
    x_inside,
    w,
    w_scales,
    w_rows,
    begin,
    end,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    MATH: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum over k in [begin, end) of x[x_rows, k] * W[w_rows, k]: float32 [BM, BN], or with SWAP its transpose [BN, BM].

    x, x_rows, x_inside   [*, K] in bfloat16 or float32, or e4m3 codes (as uint8 unless MATH is fp8); the BM rows that the
                          tile reads and which of them count; the others give zeros
    x_scales              float32 scales of the codes, [ceil(K/128), x_scales_step]; None without codes
    w, w_scales, w_rows   data and scales of the weight (of an expert: moved to it) and the tile's BN rows, all of them
                          valid: clamp, and do not store. fp8: scales of 128 x 128 blocks, the tile within one block of rows
    begin, end            multiples of BLOCK_K, or end = K
    KIND, GROUP           of the weight's Format
    MATH, BLOCK_K         from `math_of` and `block_k`
    """
    if MATH == "fp32":
        return _product_fp32(
            x, x_scales, x_scales_step, x_rows, x_inside, w, w_scales, w_rows, begin, end, K, KIND, GROUP, SWAP, BLOCK_K
        )
    elif KIND == "wint4":
        return _product_wint4(x, x_rows, x_inside, w, w_scales, w_rows, begin, end, K, GROUP, SWAP, BLOCK_K)
    elif KIND == "fp8":
        return _product_fp8(
            x, x_scales, x_scales_step, x_rows, x_inside, w, w_scales, w_rows, begin, end, K, MATH, SWAP
        )
    else:
        sums = _zeros(x_rows, w_rows, SWAP)
        EVEN: tl.constexpr = K % BLOCK_K == 0
        for k0 in range(begin, end, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            xs = _load(x, x_rows, x_inside, k, K, K, not SWAP, EVEN)
            ws = _load_weight(w, w_rows, k, K, K, SWAP, EVEN)
            if KIND == "wint8":
                ws = decode_bytes(ws, MATH)
            sums = _dot(xs, ws, sums, SWAP)
        if KIND == "wint8":
            scales = tl.load(w_scales + w_rows).to(tl.float32)
            sums *= scales[:, None] if SWAP else scales[None, :]
        return sums


@triton.jit
def _scale_words(scales, rows, k, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The BLOCK_K / GROUP scales of each row from k on, packed into one integer."""
    COUNT: tl.constexpr = BLOCK_K // GROUP
    WORD: tl.constexpr = tl.int16 if COUNT == 1 else tl.int32 if COUNT == 2 else tl.int64
    words = scales.to(tl.pointer_type(WORD))
    return tl.load(words + rows.to(tl.int64) * (K // BLOCK_K) + k // BLOCK_K)


@triton.jit
def _product_wint4(
    x,
    x_rows,
    x_inside,
    w,
    w_scales,
    w_rows,
    begin,
    end,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Even and odd k apart, as nibbles lie: x_even low + x_odd high, times the scale of each group."""
    sums = _zeros(x_rows, w_rows, SWAP)
    scales = _scale_words(w_scales, w_rows, begin, K, GROUP, BLOCK_K)
    for k0 in range(begin, end, BLOCK_K):
        # Fetched a step ahead: strided two-byte loads are not pipelined.
        ahead = _scale_words(w_scales, w_rows, tl.minimum(k0 + BLOCK_K, K - BLOCK_K), K, GROUP, BLOCK_K)
        for group in tl.static_range(BLOCK_K // GROUP):
            pair = (k0 + group * GROUP) // 2 + tl.arange(0, GROUP // 2)
            low, high = decode_nibbles(_load_weight(w, w_rows, pair, K, K // 2, SWAP, True), "bf16")
            words = _load(x.to(tl.pointer_type(tl.int32)), x_rows, x_inside, pair, K, K // 2, not SWAP, True)
            part = _dot(_half(words, False), low, _zeros(x_rows, w_rows, SWAP), SWAP)
            part = _dot(_half(words, True), high, part, SWAP)
            scale = ((scales >> (16 * group)).to(tl.int32) << 16).to(tl.float32, bitcast=True)
            sums += part * (scale[:, None] if SWAP else scale[None, :])
        scales = ahead
    return sums


@triton.jit
def _product_fp8(
    x,
    x_scales,
    x_scales_step,
    x_rows,
    x_inside,
    w,
    w_scales,
    w_rows,
    begin,
    end,
    K: tl.constexpr,
    MATH: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Every 128 of k: codes times codes, then both scales into the float32 sums."""
    sums = _zeros(x_rows, w_rows, SWAP)
    EVEN: tl.constexpr = K % 128 == 0
    BLOCKS: tl.constexpr = (K + 128 - 1) // 128
    w_block = w_scales + tl.min(w_rows, 0) // 128 * BLOCKS  # BN divides 128: one block of rows
    first = begin // 128
    w_scale = tl.load(w_block + first)
    x_scale = tl.load(x_scales + first.to(tl.int64) * x_scales_step + x_rows, x_inside, 0.0)
    for k0 in range(begin, end, 128):
        block = tl.minimum(k0 // 128 + 1, BLOCKS - 1)
        w_ahead = tl.load(w_block + block)
        x_ahead = tl.load(x_scales + block.to(tl.int64) * x_scales_step + x_rows, x_inside, 0.0)
        k = k0 + tl.arange(0, 128)
        xs = _load(x, x_rows, x_inside, k, K, K, not SWAP, EVEN)
        ws = _load_weight(w, w_rows, k, K, K, SWAP, EVEN)
        if MATH == "bf16":
            xs, ws = decode_e4m3(xs, MATH), decode_e4m3(ws, MATH)
        part = _dot(xs, ws, _zeros(x_rows, w_rows, SWAP), SWAP)
        scale = w_scale * x_scale
        sums += part * (scale[None, :] if SWAP else scale[:, None])
        w_scale, x_scale = w_ahead, x_ahead
    return sums


@triton.jit
def _product_fp32(
    x,
    x_scales,
    x_scales_step,
    x_rows,
    x_inside,
    w,
    w_scales,
    w_rows,
    begin,
    end,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every value dequantized to float32 first."""
    sums = _zeros(x_rows, w_rows, SWAP)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    for k0 in range(begin, end, BLOCK_K):
        if KIND == "wint4":
            pair = k0 // 2 + tl.arange(0, BLOCK_K // 2)
            low, high = decode_nibbles(_load_weight(w, w_rows, pair, K, K // 2, SWAP, True), "fp32")
            scale = tl.load(w_scales + w_rows.to(tl.int64) * (K // GROUP) + k0 // GROUP).to(tl.float32)
            scale = scale[:, None] if SWAP else scale[None, :]
            even = _load(x, x_rows, x_inside, 2 * pair, K, K, not SWAP, True).to(tl.float32)
            odd = _load(x, x_rows, x_inside, 2 * pair + 1, K, K, not SWAP, True).to(tl.float32)
            sums = _dot(even, low * scale, sums, SWAP)
            sums = _dot(odd, high * scale, sums, SWAP)
        else:
            k = k0 + tl.arange(0, BLOCK_K)
            xs = _load(x, x_rows, x_inside, k, K, K, not SWAP, EVEN)
            ws = _load_weight(w, w_rows, k, K, K, SWAP, EVEN)
            if KIND == "fp8":
                block = k0 // 128
                w_scale = tl.load(w_scales + (w_rows // 128) * ((K + 128 - 1) // 128) + block)
                x_scale = tl.load(x_scales + tl.cast(block, tl.int64) * x_scales_step + x_rows, x_inside, 0.0)
                xs = decode_e4m3(xs, "fp32") * (x_scale[None, :] if SWAP else x_scale[:, None])
                ws = decode_e4m3(ws, "fp32") * (w_scale[:, None] if SWAP else w_scale[None, :])
            sums = _dot(xs.to(tl.float32), ws.to(tl.float32), sums, SWAP)
    if KIND == "wint8":
        scales = tl.load(w_scales + w_rows).to(tl.float32)
        sums *= scales[:, None] if SWAP else scales[None, :]
    return sums


def math_of(format_: Format, activations: str, arch: Arch) -> str:
    """MATH for a weight's format and the activations' dtype."""
    if activations == "float32" or format_.kind == "fp32":
        return "fp32"
    return "fp8" if format_.kind == "fp8" and arch.has_fp8 else "bf16"


def block_k(format_: Format, math: str, width: int) -> int:
    """BLOCK_K for rows of `width` columns; bf16 and wint8 may take another. Groups and blocks of 128 stay whole."""
    if math == "fp32":
        return 32
    return format_.group if format_.kind == "wint4" and width % 128 else 128


def codes(typed: Typed, format_: Format, math: str) -> Typed:
    """A pointer to e4m3 codes, of a weight or of activations, as `product` wants it: uint8 unless MATH is fp8."""
    return Typed(typed.pointer, "uint8") if format_.kind == "fp8" and math != "fp8" else typed
