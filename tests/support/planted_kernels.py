"""Kernels with faults that a build must refuse."""

import triton
import triton.language as tl


@triton.jit
def planted_spill(gate, y, BLOCK: tl.constexpr):
    """Holds BLOCK values and all their sums with one another: more than a thread has registers for."""
    at = tl.arange(0, BLOCK)
    values = tl.load(gate + at).to(tl.float32)
    sums = values
    for _ in range(4):
        sums = tl.cumsum(sums * values, 0)
    tl.store(y + at, (values * sums).to(y.dtype.element_ty))


@triton.jit
def planted_dot(gate, y, ROWS: tl.constexpr):
    """A product of ROWS x 64."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 64)[None, :]
    a = tl.load(gate + row * 64 + column)
    b = tl.load(gate + tl.arange(0, 64)[:, None] * 64 + column)
    tl.store(y + row * 64 + column, tl.dot(a, b).to(y.dtype.element_ty))
