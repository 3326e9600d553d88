"""Round matrices to wint4 and wint8: what every element goes through, with as little Python as can be.

Python's lock is what threads wait for, and a core's cache is what passes over memory wait for. So a matrix is gone through in
TorchScript, which runs without the lock, some rows at a time whose temporaries fit the cache. Elementwise operations, min, max
and copies only, and sums along the rows in a fixed order.

Legend: N rows, K columns of a matrix; g groups of G columns that share a step (wint8: one group); B blocks of 128 columns.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dsc.compiler.float8 import HALF_EXPONENT, SIGN_AND_VALUE, e4m3_to_float32
from dsc.plugins.stored import FP8_BLOCK

RUN_ELEMENTS = 1 << 16
# Subnormal scales would overflow the codes, and differ with flush-to-zero.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
SUMMED_COLUMNS = 128
# Outside of these, squares could overflow or underflow.
LARGEST_STEP, SMALLEST_STEP = 2.0**40, 2.0**-40
SMALLEST_EXPONENT = -125  # of a row: that of SMALLEST_SCALE; one over a smaller power of two is infinity
_SCALES_BELOW = 2.0**100  # so that a scale times HALF_EXPONENT is finite
_COUNTED = 128  # of which a byte holds the count


@dataclass(frozen=True)
class Matrix:
    """What is to be rounded: float32 values [N, K]; or float8_e4m3fn codes, with a scale for 128 columns of each row [N, B]."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self) -> torch.Tensor:
        """The values."""
        if self.scales is None:
            return self.values
        return e4m3_to_float32(self.values) * self.scales.repeat_interleave(FP8_BLOCK, -1)

    def rows(self, rows: tuple[int, int]) -> Matrix:
        """Some rows: the first and one past the last."""
        part = slice(*rows)
        return Matrix(self.values[part], None if self.scales is None else self.scales[part])


def join(matrices: Sequence[Matrix]) -> Matrix:
    """The rows of all of them; values where some are values."""
    if all(matrix.scales is not None for matrix in matrices):
        codes = torch.cat([matrix.values.view(torch.uint8) for matrix in matrices]).view(torch.float8_e4m3fn)
        return Matrix(codes, torch.cat([matrix.scales for matrix in matrices if matrix.scales is not None]))
    return Matrix(torch.cat([matrix.dequantize() for matrix in matrices]))


@dataclass(frozen=True)
class Rounded:
    """Codes, one a byte, in memory that the thread's next call takes again; scales as stored; each row's squares of errors and of values, in float64; see `Errors`.

    finite  False where the matrix holds NaN or infinity, and all else means nothing
    """

    codes: torch.Tensor
    scales: torch.Tensor
    squares: torch.Tensor
    norms: torch.Tensor
    saturated: int = 0
    zero_groups: int = 0
    finite: bool = True


class _Buffers(threading.local):
    """Memory of a thread for what lives as long as one run: the next finds it in the core's cache."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialized tensor; it is another's once the name is taken again."""
        count = math.prod(shape)
        if name not in self._kept or len(self._kept[name]) < count:
            self._kept[name] = torch.empty(count, dtype=dtype)
        return self._kept[name][:count].view(*shape)


BUFFERS = _Buffers()


def add_up(partial: torch.Tensor) -> torch.Tensor:
    """Sums of up to 128 columns, which numpy adds pairwise, in float64."""
    return torch.from_numpy(np.add.reduce(partial.numpy(), -1, dtype=np.float64))


def takes_codes(scales: torch.Tensor, columns: int) -> bool:
    """Whether codes of so many columns with these scales can be a Matrix: extremes are looked for among the codes."""
    return columns % FP8_BLOCK == 0 and bool(((scales >= 0) & (scales < _SCALES_BELOW)).all())


def round_integers(matrix: Matrix, group: int, low: int) -> Rounded:
    """Codes from `low` (-7 or -8: to 7; -127: to 127) in groups of `group` columns.

    A step is that of dsc.compiler.quantize.quantize, rounded to bfloat16; a code is its value over that, rounded to even.
    """
    rows, columns = matrix.shape
    high_Ng, low_Ng = _extremes(matrix, group)
    if low == -8:
        widest_Ng = torch.maximum(high_Ng / 7.5, low_Ng / -8.5)
    else:
        widest_Ng = torch.maximum(high_Ng, low_Ng.neg()) / -low
    empty_Ng = widest_Ng < SMALLEST_SCALE
    scales_Ng = widest_Ng.masked_fill(empty_Ng, 1.0).to(torch.bfloat16)
    largest_N = widest_Ng.amax(-1)
    nothing = torch.empty(0)
    codes = BUFFERS.take("bytes", (rows, columns), torch.int8)
    if not bool(np.isfinite(largest_N.numpy()).all()):
        return Rounded(codes, scales_Ng, nothing, nothing, finite=False)

    powers_N, units_N = nothing, None
    if float(largest_N.max()) > LARGEST_STEP or float(largest_N.min()) < SMALLEST_STEP:
        # Rows are measured in powers of two near their values.
        powers_N = torch.exp2(torch.frexp(largest_N).exponent.clamp(min=SMALLEST_EXPONENT).float())
        units_N = powers_N.double().square_()
    step = min(max(RUN_ELEMENTS // columns, 1), rows)
    values, ratios, rounded = (BUFFERS.take(name, (step, columns)) for name in ("values", "ratios", "codes"))
    bits = BUFFERS.take("bits", (step, columns), torch.int16)
    squares, norms = (BUFFERS.take(n, (rows, math.gcd(columns, SUMMED_COLUMNS))) for n in ("squares", "norms"))
    _go_through(
        matrix.values if matrix.scales is None else matrix.values.view(torch.int8),
        nothing if matrix.scales is None else matrix.scales.mul(HALF_EXPONENT).unsqueeze(-1),
        scales_Ng.float().unsqueeze(-1), powers_N, low, step, codes, squares, norms,
        values, ratios, rounded, bits, bits.view(torch.float16),
    )  # fmt: skip
    squares_N, norms_N = add_up(squares), add_up(norms)
    if units_N is not None:
        squares_N, norms_N = squares_N * units_N, norms_N * units_N
    saturated = 0
    if low == -8:
        wide = codes
        codes = torch.clamp(wide, -8, 7, out=BUFFERS.take("cut bytes", (rows, columns), torch.int8))
        saturated = _count(torch.ne(wide, codes, out=BUFFERS.take("flags", (rows, columns), torch.bool)))
    return Rounded(codes, scales_Ng, squares_N, norms_N, saturated, int(np.count_nonzero(empty_Ng.numpy())))


def _extremes(matrix: Matrix, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest and smallest values of groups [N, g]. Of codes, one of the two may be any value nearer to zero than the other.

    Codes of one sign sort by their magnitude: as signed bytes the largest is the largest positive value, as unsigned bytes
    the smallest negative one, where there are such; NaN sorts last of each.
    """
    if matrix.scales is None:
        groups = matrix.values.reshape(len(matrix.values), -1, group)
        return groups.amax(-1), groups.amin(-1)
    width = min(group, FP8_BLOCK)
    codes = matrix.values.view(len(matrix.values), -1, width)
    scales = matrix.scales if width == FP8_BLOCK else matrix.scales.repeat_interleave(FP8_BLOCK // width, -1)
    found = torch.stack([codes.view(torch.int8).amax(-1).view(torch.uint8), codes.view(torch.uint8).amax(-1)])
    high, low = e4m3_to_float32(found.view(torch.float8_e4m3fn)).mul_(scales)
    return (high, low) if group == width else (high.amax(-1, True), low.amin(-1, True))


def _count(flags: torch.Tensor) -> int:
    """How many of [N, K] are set: several times as fast as torch.count_nonzero."""
    flat = flags.view(torch.uint8).view(-1)
    whole = len(flat) // _COUNTED * _COUNTED
    counted = int(flat[:whole].view(_COUNTED, -1).sum(0, dtype=torch.uint8).sum()) if whole else 0
    return counted + int(flat[whole:].sum())


def _go_through(
    x: torch.Tensor,
    scales: torch.Tensor,
    steps: torch.Tensor,
    powers: torch.Tensor,
    low: int,
    step: int,
    out: torch.Tensor,
    squares: torch.Tensor,
    norms: torch.Tensor,
    values: torch.Tensor,
    ratios: torch.Tensor,
    rounded: torch.Tensor,
    bits: torch.Tensor,
    halves: torch.Tensor,
    keep: int = SIGN_AND_VALUE,
    block: int = FP8_BLOCK,
) -> None:
    """Fill `out` with codes, not yet cut to 7, and `squares` and `norms` with sums of squares, a few columns for each row.

    x       float32 [N, K], or e4m3 codes as int8 where `scales` are not empty: [N, B, 1], HALF_EXPONENT times what is meant
    steps   [N, g, 1]; rows are measured in `powers` [N] where those are not empty
    step    rows at a time, for which `values` to `halves` are memory; `halves` is `bits` as float16
    """
    rows, num_groups = x.shape[0], steps.shape[1]
    for first in range(0, rows, step):
        last = min(first + step, rows)
        count = last - first
        if count < step:
            values, ratios, rounded, bits, halves = (
                values[:count],
                ratios[:count],
                rounded[:count],
                bits[:count],
                halves[:count],
            )
        if x.dtype == torch.int8:  # as e4m3_to_float32 in float8.py, the exponent's correction being in the scales
            bits.copy_(x[first:last]).bitwise_left_shift_(7).bitwise_and_(keep)
            values.copy_(halves)
            values.view(count, -1, block).mul_(scales[first:last])
        else:
            values = x[first:last]
        groups = values.view(count, num_groups, -1)
        steps_of = steps[first:last]
        torch.div(groups, steps_of, out=ratios.view(count, num_groups, -1))
        torch.round(ratios, out=rounded)
        # -7..7: no scale's rounding makes an 8 of a 7. -127..127: at most 127.25 comes of it.
        out[first:last].copy_(rounded)
        if low == -8:
            rounded.clamp_(-8, 7)
        errors = ratios.sub_(rounded).view(count, num_groups, -1)
        if powers.numel() > 0:
            power = powers[first:last].view(-1, 1, 1)
            groups, steps_of = groups / power, steps_of / power
        errors.mul_(steps_of).square_()
        torch.sum(errors.view(count, -1, squares.shape[1]), [1], out=squares[first:last])
        torch.square(groups, out=errors)
        torch.sum(errors.view(count, -1, norms.shape[1]), [1], out=norms[first:last])


with warnings.catch_warnings():
    # Deprecated, but what should replace it wants a C++ compiler where dsc runs. The same in plain Python, only slower.
    warnings.simplefilter("ignore", DeprecationWarning)
    _go_through = torch.jit.script(_go_through)
