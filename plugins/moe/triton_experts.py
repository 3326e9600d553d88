"""Experts in Triton: any number of tokens, every storage format and width.

A program takes a tile of at most BM pairs of one expert and BN rows of its weight. `tiles` and `order` are what moe_plan
(plan.cu) made; without them the tile is of consecutive tokens and the weights are those of the shared expert.
"""

import triton
import triton.language as tl

from dsc.plugins.triton_activations import encode_e4m3
from dsc.plugins.triton_weights import product


@triton.jit
def _expert(tiles, index):
    """The expert of a tile; -1 where there is none."""
    if tiles is None:
        return index * 0
    else:
        return tl.load(tiles + 4 * index)


@triton.jit
def _positions(tiles, count, index, BM: tl.constexpr, CACHE: tl.constexpr):
    """Where a tile's pairs are among all sorted pairs, and which of BM are there. Read anew, not kept in registers."""
    lane = tl.arange(0, BM)
    if tiles is None:
        return index * BM + lane, index * BM + lane < count
    else:
        first = tl.load(tiles + 4 * index + 1, cache_modifier=CACHE)
        return first + lane, lane < tl.load(tiles + 4 * index + 2, cache_modifier=CACHE)


@triton.jit
def _pairs(order, at, inside):
    """Pairs, or tokens, at positions."""
    return at if order is None else tl.load(order + at, inside, 0)


@triton.jit
def _weight(w, expert, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr):
    """Data of one expert of a stacked weight."""
    PITCH: tl.constexpr = K // 2 if KIND == "wint4" else K
    return w + expert.to(tl.int64) * (N * PITCH)


@triton.jit
def _scales(scales, expert, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr):
    """Scales of one expert, for kinds that have them."""
    BLOCKS: tl.constexpr = ((N + 127) // 128) * ((K + 127) // 128)
    GROUPS: tl.constexpr = N * (K // GROUP) if GROUP else N
    return scales + expert.to(tl.int64) * (BLOCKS if KIND == "fp8" else GROUPS)


@triton.jit
def moe_gate_up(
    x,
    x_scales,
    tiles,
    order,
    gate,
    gate_scales,
    up,
    up_scales,
    h,
    h_scales,
    num_tokens,
    num_rows,
    F: tl.constexpr,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    MATH: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UE8M0: tl.constexpr,
    PDL: tl.constexpr,
):
    """h[position of the pair] = silu(gate x) * (up x), as down takes it: with h_scales e4m3 codes and their scales.

    num_rows rows of h; BN is 128, a group of the codes, where there are h_scales.
    """
    BLOCKS: tl.constexpr = (F + BN - 1) // BN
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) // BLOCKS
    expert = _expert(tiles, tile)
    if expert >= 0:
        at, inside = _positions(tiles, num_tokens, tile, BM, "")
        x_rows = at if order is None else _pairs(order, at, inside) // TOP_K
        rows = tl.program_id(0) % BLOCKS * BN + tl.arange(0, BN)
        valid = rows if F % BN == 0 else tl.minimum(rows, F - 1)
        w = _weight(gate, expert, F, D, KIND)
        s = gate_scales if gate_scales is None else _scales(gate_scales, expert, F, D, KIND, GROUP)
        a = product(x, x_scales, num_tokens, x_rows, inside, w, s, valid, 0, D, D, KIND, GROUP, MATH, SWAP, BLOCK_K)
        w = _weight(up, expert, F, D, KIND)
        s = up_scales if up_scales is None else _scales(up_scales, expert, F, D, KIND, GROUP)
        b = product(x, x_scales, num_tokens, x_rows, inside, w, s, valid, 0, D, D, KIND, GROUP, MATH, SWAP, BLOCK_K)
        at, inside = _positions(tiles, num_tokens, tile, BM, ".cg")
        hidden = a / (1.0 + tl.exp(-a)) * b
        if SWAP:
            hidden = tl.trans(hidden)
        to = at.to(tl.int64)[:, None] * F + rows[None, :]
        stored = inside[:, None] & (rows < F)[None, :]
        if h_scales is None:
            tl.store(h + to, hidden.to(h.dtype.element_ty), stored)
        else:
            hidden = tl.where((rows < F)[None, :], hidden, 0.0)
            scale = tl.div_rn(tl.maximum(tl.max(tl.abs(hidden), 1), 1e-4), 448.0)
            if UE8M0:
                scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
            codes = tl.div_rn(hidden, tl.broadcast_to(scale[:, None], hidden.shape))
            codes = tl.minimum(tl.maximum(codes, -448.0), 448.0)
            tl.store(h + to, encode_e4m3(codes, h.dtype.element_ty == tl.float8e4nv), stored)
            tl.store(h_scales + tl.program_id(0) % BLOCKS * num_rows + at, scale, inside)


@triton.jit
def moe_down(
    h,
    h_scales,
    tiles,
    order,
    weights,
    down,
    down_scales,
    out,
    num_tokens,
    num_rows,
    D: tl.constexpr,
    F: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    MATH: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = weights[pair] * (down h[position of the pair]); without `order` out[t] = down h[t]."""
    BLOCKS: tl.constexpr = (D + BN - 1) // BN
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) // BLOCKS
    expert = _expert(tiles, tile)
    if expert >= 0:
        at, inside = _positions(tiles, num_tokens, tile, BM, "")
        rows = tl.program_id(0) % BLOCKS * BN + tl.arange(0, BN)
        valid = rows if D % BN == 0 else tl.minimum(rows, D - 1)
        w = _weight(down, expert, D, F, KIND)
        s = down_scales if down_scales is None else _scales(down_scales, expert, D, F, KIND, GROUP)
        sums = product(h, h_scales, num_rows, at, inside, w, s, valid, 0, F, F, KIND, GROUP, MATH, SWAP, BLOCK_K)
        if SWAP:
            sums = tl.trans(sums)
        at, inside = _positions(tiles, num_tokens, tile, BM, ".cg")
        pair = _pairs(order, at, inside)
        if order is not None:
            sums *= tl.load(weights + pair, inside, 0.0)[:, None]
        to = pair.to(tl.int64)[:, None] * D + rows[None, :]
        tl.store(out + to, sums.to(out.dtype.element_ty), inside[:, None] & (rows < D)[None, :])


@triton.jit
def moe_sum(
    out,
    ids,
    y,
    shared_row,
    K: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t] = the rows of t's pairs in `out`, in their order, then the shared expert's row; summed in float32."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        live = tl.load(ids + t * K + k) >= 0
        sums += tl.load(out + (t * K + k) * D + columns, inside & live, 0.0).to(tl.float32)
    if SHARED:
        sums += tl.load(out + (shared_row + t) * D + columns, inside, 0.0).to(tl.float32)
    tl.store(y + t * D + columns, sums.to(y.dtype.element_ty), inside)
