"""Experts in Triton: any number of tokens, every storage format and width.

A program takes a tile of at most BM pairs of one expert and BN rows of its weight. `tiles` and `order` are what moe_plan
(plan.cu) made; without them the tile is of consecutive tokens and the weights are those of the shared expert.

PLANES: of what wint4 multiplies in bfloat16, the even columns of a row lie first, then the odd ones, as nibbles want them.
LATE: what the predecessor waited for is all that a kernel reads; its last program waits at its end, so that who waits for
the kernel has waited for both.
"""

import triton
import triton.language as tl

from dsc.plugins.triton_activations import encode_e4m3
from dsc.plugins.triton_weights import _dot, _load, _load_weight, _scale_words, _zeros, decode_nibbles, product


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
def _last_waits():
    """The last program waits for the predecessor; the others make room."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()


@triton.jit
def split_planes(x, planes, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """planes[t] = the even columns of x[t], then the odd ones."""
    t = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < K // 2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    words = tl.load((x + t * K).to(tl.pointer_type(tl.int32)) + pair, inside, 0)
    tl.store(planes + t * K + pair, words.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
    tl.store(planes + t * K + K // 2 + pair, (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), inside)


@triton.jit
def _product(
    x,
    x_scales,
    x_scales_step,
    x_rows,
    x_inside,
    w,
    w_scales,
    w_rows,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    MATH: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PLANES: tl.constexpr,
):
    """`product` over all of K; with PLANES both of x are fetched ahead as they are."""
    if not PLANES:
        return product(
            x, x_scales, x_scales_step, x_rows, x_inside, w, w_scales, w_rows, 0, K, K, KIND, GROUP, MATH, SWAP, BLOCK_K
        )
    else:
        sums = _zeros(x_rows, w_rows, SWAP)
        scales = _scale_words(w_scales, w_rows, 0, K, GROUP, BLOCK_K)
        for k0 in range(0, K, BLOCK_K):
            ahead = _scale_words(w_scales, w_rows, tl.minimum(k0 + BLOCK_K, K - BLOCK_K), K, GROUP, BLOCK_K)
            for group in tl.static_range(BLOCK_K // GROUP):
                pair = (k0 + group * GROUP) // 2 + tl.arange(0, GROUP // 2)
                even = _load(x, x_rows, x_inside, pair, K, K, not SWAP, True)
                odd = _load(x + K // 2, x_rows, x_inside, pair, K, K, not SWAP, True)
                low, high = decode_nibbles(_load_weight(w, w_rows, pair, K, K // 2, SWAP, True), "bf16")
                part = _dot(odd, high, _dot(even, low, _zeros(x_rows, w_rows, SWAP), SWAP), SWAP)
                scale = ((scales >> (16 * group)).to(tl.int32) << 16).to(tl.float32, bitcast=True)
                sums += part * (scale[:, None] if SWAP else scale[None, :])
            scales = ahead
        return sums


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
    X_PLANES: tl.constexpr,
    H_PLANES: tl.constexpr,
    PDL: tl.constexpr,
    LATE: tl.constexpr,
):
    """h[position of the pair] = silu(gate x) * (up x), as down takes it: with h_scales e4m3 codes and their scales.

    num_rows rows of h; BN is 128, a group of the codes, where there are h_scales.
    """
    BLOCKS: tl.constexpr = (F + BN - 1) // BN
    if PDL:
        if not LATE:
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
        a = _product(
            x, x_scales, num_tokens, x_rows, inside, w, s, valid, D, KIND, GROUP, MATH, SWAP, BLOCK_K, X_PLANES
        )
        w = _weight(up, expert, F, D, KIND)
        s = up_scales if up_scales is None else _scales(up_scales, expert, F, D, KIND, GROUP)
        b = _product(
            x, x_scales, num_tokens, x_rows, inside, w, s, valid, D, KIND, GROUP, MATH, SWAP, BLOCK_K, X_PLANES
        )
        at, inside = _positions(tiles, num_tokens, tile, BM, ".cg")
        hidden = a / (1.0 + tl.exp(-a)) * b
        if SWAP:
            hidden = tl.trans(hidden)
        columns = rows % 2 * (F // 2) + rows // 2 if H_PLANES else rows
        to = at.to(tl.int64)[:, None] * F + columns[None, :]
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
    if PDL and LATE:
        _last_waits()


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
    H_PLANES: tl.constexpr,
    PDL: tl.constexpr,
    LATE: tl.constexpr,
):
    """out[pair] = weights[pair] * (down h[position of the pair]); without `order` out[t] = down h[t]."""
    BLOCKS: tl.constexpr = (D + BN - 1) // BN
    if PDL:
        if not LATE:
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
        sums = _product(h, h_scales, num_rows, at, inside, w, s, valid, F, KIND, GROUP, MATH, SWAP, BLOCK_K, H_PLANES)
        if SWAP:
            sums = tl.trans(sums)
        at, inside = _positions(tiles, num_tokens, tile, BM, ".cg")
        pair = _pairs(order, at, inside)
        if order is not None:
            sums *= tl.load(weights + pair, inside, 0.0)[:, None]
        to = pair.to(tl.int64)[:, None] * D + rows[None, :]
        tl.store(out + to, sums.to(out.dtype.element_ty), inside[:, None] & (rows < D)[None, :])
    if PDL and LATE:
        _last_waits()


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
