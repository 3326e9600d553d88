"""Philox4x32-10, a counter-based random generator in integer arithmetic: the same numbers on every machine.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". Imports torch only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, added to the key each round
ROUNDS = 10


def philox(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four random words from four counter words and two key words: int64 tensors of one shape, values in 0 .. 2^32-1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product wraps to 64 bits and the shift repeats its sign, which the mask takes off again.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One float32 in [0, 1) per pair of seed (int64, its two halves are the key) and position (the counter).

    The top 24 bits of the first word, so that every value is exact.
    """
    zero = torch.zeros_like(seeds)
    words = philox((positions.long() & MASK, zero, zero, zero), (seeds & MASK, seeds >> 32 & MASK))
    return (words[0] >> 8).float() * 2.0**-24
