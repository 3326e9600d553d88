"""Rotary position embedding inside Triton kernels, in interleaved pairs."""

import triton
import triton.language as tl


@triton.jit
def rotate_rows(x, cos, sin, positions, inside, ROPE: tl.constexpr):
    """x float32 [n, ROPE] turned in interleaved pairs by the rows `positions` [n] of the tables [*, ROPE/2]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], ROPE // 2, 2)))
    at = positions.to(tl.int64)[:, None] * (ROPE // 2) + tl.arange(0, ROPE // 2)[None, :]
    c, s = tl.load(cos + at, inside[:, None], 0.0), tl.load(sin + at, inside[:, None], 0.0)
    return tl.interleave(even * c - odd * s, even * s + odd * c)
