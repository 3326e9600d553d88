"""All-reduces as measured: NCCL's in a CUDA graph on two H200s (NV18), sums of T rows of 7,168 bf16 values, 2026-11-29."""

from __future__ import annotations

from itertools import pairwise

MEASURED_RANKS = 2
MEASURED_WIDTH = 7168
MICROSECONDS = ((1, 7.4), (16, 8.1), (64, 12.5), (128, 26.3), (256, 31.2), (1024, 67.4), (4096, 218.4))  # rows, us


def all_reduce_us(tokens: int, width: int) -> float:
    """Microseconds of one sum of [tokens, width] bf16 values over two ranks; beyond the largest measured one by its rate."""
    rows = tokens * width / MEASURED_WIDTH
    if rows <= MICROSECONDS[0][0]:
        return MICROSECONDS[0][1]
    for (low, before), (high, after) in pairwise(MICROSECONDS):
        if rows <= high:
            return before + (after - before) * (rows - low) / (high - low)
    most, us = MICROSECONDS[-1]
    return us * rows / most
