"""Store a packed matrix as wint4 with its own codes: only its scales are rounded, to bfloat16, where those do not hold them.

Values that lie on a grid of 16 steps fit no other such grid: rounding them again costs half of what the first rounding did.

Legend: N rows, K columns of a matrix; G groups of wint4.
"""

from __future__ import annotations

import torch

from dsc.compiler.ir.simplify import keeps_codes
from dsc.compiler.ir.weight import DequantizePacked, Quantize
from dsc.compiler.quantize import NotFiniteError, Quantized, row_errors, sums
from dsc.compiler.round_integers import SMALLEST_SCALE
from dsc.compiler.unpack import Packed, Read, read_zeros

GRID = "of the source"
MIDDLE = 8


def can_keep(segment: Quantize, read: Read) -> bool:
    """Whether a matrix's codes are codes of its format: every zero is the middle. Reads the zeros."""
    x = segment.x
    if not (keeps_codes(segment) and isinstance(x, DequantizePacked)):
        return False
    zeros = read_zeros(x, read, (0, x.shape[0]))
    return zeros is None or bool((zeros == x.packing.middle).all())


def keep(packed: Packed, group: int) -> Quantized:
    """Rows of a matrix whose zeros are all the middle as wint4, in groups that lie within its own.

    A group of scale 0 gets scale 1 and codes 0, as zeros do everywhere. Raises NotFiniteError.
    """
    codes, columns = packed.codes, packed.codes.shape[1]
    owners = torch.arange(0, columns, group) // packed.group
    exact_NG = packed.scales.to(torch.float32)[:, owners]
    if not bool(torch.isfinite(exact_NG).all()):
        raise NotFiniteError("NaN or infinity")
    scales_NG = exact_NG.to(torch.bfloat16)
    empty_NG = scales_NG.float().abs() < SMALLEST_SCALE
    squares_NG = _square_sums(codes, group)
    lost_NG = torch.where(empty_NG, exact_NG, exact_NG - scales_NG.float()).double()
    scales_NG = scales_NG.masked_fill(empty_NG, 1.0)
    signed = (
        (codes ^ MIDDLE).contiguous().view(len(codes), -1, group).masked_fill_(empty_NG.unsqueeze(-1), 0).flatten(1)
    )
    errors = row_errors(
        sums(squares_NG * lost_NG.square()),
        sums(squares_NG * exact_NG.double().square()),
        zero_groups=int(empty_NG.sum()),
        grid=GRID,
    )
    return Quantized({"data": signed[:, ::2] | (signed[:, 1::2] << 4), "scales": scales_NG}, errors)


def _square_sums(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Sums of the squares of a group's codes, float64 [N, G]: whole numbers below 2^24, exact in float32 in any order."""
    values = (codes.view(torch.int8) - MIDDLE).to(torch.float32)
    return values.square_().view(len(codes), -1, group).sum(-1).double()
