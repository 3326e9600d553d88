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

RUN_ELEMENTS = 1 << 17
# Subnormal scales would overflow the codes, and differ with flush-to-zero.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
SUMMED_COLUMNS = 128
# Outside of these, squares could overflow or underflow.
LARGEST_STEP, SMALLEST_STEP = 2.0**40, 2.0**-40
SMALLEST_EXPONENT = -125  # of a row: that of SMALLEST_SCALE; one over a smaller power of two is infinity
_SCALES_BELOW = 2.0**100  # so that a scale times HALF_EXPONENT is finite
_COUNTED = 15  # bytes with bit 4 set, or not, whose sum is below 256


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
    """Data and scales as stored; each row's squares of errors and of values, in float64; see `Errors`.

    finite  False where the matrix holds NaN or infinity, and all else means nothing
    """

    data: torch.Tensor
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


def row_powers(largest_N: torch.Tensor) -> torch.Tensor:
    """Powers of two near rows' largest values, to measure the rows in; none where squares of all can be taken as they are."""
    if float(largest_N.max()) <= LARGEST_STEP and float(largest_N.min()) >= SMALLEST_STEP:
        return torch.empty(0)
    return torch.exp2(torch.frexp(largest_N).exponent.clamp(min=SMALLEST_EXPONENT).float())


def add_up(partial: torch.Tensor, powers: torch.Tensor | None = None) -> torch.Tensor:
    """Sums of up to 128 columns, which numpy adds pairwise, in float64; of squares measured in `powers`, where there are."""
    sums = torch.from_numpy(np.add.reduce(partial.numpy(), -1, dtype=np.float64))
    return sums if powers is None or not len(powers) else sums * powers.double().square_()


def square_sums(x: torch.Tensor, powers: torch.Tensor, memory: torch.Tensor, sums: torch.Tensor) -> None:
    """Fill `sums` [N, up to 128] with sums of the squares of some rows, to be added up.

    x       [N, K]; rows are measured in `powers` [N] where those are not empty
    memory  [N, K], overwritten; x, where that is not needed any more
    """
    if powers.numel() > 0:
        torch.div(x, powers.unsqueeze(-1), out=memory)
        memory.square_()
    else:
        torch.square(x, out=memory)
    torch.sum(memory.view(len(sums), -1, sums.shape[1]), [1], out=sums)


def takes_codes(scales: torch.Tensor, columns: int) -> bool:
    """Whether codes of so many columns with these scales can be a Matrix: extremes are looked for among the codes."""
    return columns % FP8_BLOCK == 0 and bool(((scales >= 0) & (scales < _SCALES_BELOW)).all())


def round_integers(matrix: Matrix, group: int, low: int, errors_only: bool = False) -> Rounded:
    """Codes from `low` (-7 or -8: to 7; -127: to 127) in groups of `group` columns.

    A step is that of dsc.compiler.quantize.quantize, rounded to bfloat16; a code is its value over that, rounded to even.
    Of -7 and -8 two codes go into a byte, the even column in the low nibble. With `errors_only` data and norms are empty.
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
    if not bool(np.isfinite(largest_N.numpy()).all()):
        return Rounded(nothing, scales_Ng, nothing, nothing, finite=False)

    powers_N = row_powers(largest_N)
    step = min(max(RUN_ELEMENTS // columns, 1), rows)
    values, rounded = (BUFFERS.take(name, (step, columns)) for name in ("values", "rounded"))
    bits = rounded.view(-1).view(torch.int16)[: step * columns].view(step, columns)  # read before codes are rounded
    wide, flags, counts = (BUFFERS.take(name, (step, columns), torch.uint8) for name in ("bytes", "flags", "counts"))
    squares, norms = (BUFFERS.take(n, (rows, math.gcd(columns, SUMMED_COLUMNS))) for n in ("squares", "norms"))
    packed = low in (-7, -8)
    width = 0 if errors_only else columns // 2 if packed else columns
    data = torch.empty((rows, width), dtype=torch.uint8 if packed else torch.int8)
    steps = scales_Ng.float().unsqueeze(-1)
    saturated = _go_through(
        matrix.values if matrix.scales is None else matrix.values.view(torch.int8),
        nothing if matrix.scales is None else matrix.scales.mul(HALF_EXPONENT).unsqueeze(-1),
        steps, steps / powers_N.view(-1, 1, 1) if len(powers_N) else steps, powers_N, low, step,
        data, squares, nothing if errors_only else norms, values, rounded, bits, bits.view(torch.float16),
        wide, wide.view(torch.int8), wide.view(torch.int16) if packed else bits,
        flags, flags.view(torch.int16) if packed else bits, counts,
    )  # fmt: skip
    squares_N, norms_N = add_up(squares, powers_N), nothing if errors_only else add_up(norms, powers_N)
    return Rounded(data, scales_Ng, squares_N, norms_N, saturated, int(np.count_nonzero(empty_Ng.numpy())))


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


def _go_through(
    x: torch.Tensor,
    scales: torch.Tensor,
    steps: torch.Tensor,
    error_steps: torch.Tensor,
    powers: torch.Tensor,
    low: int,
    step: int,
    out: torch.Tensor,
    squares: torch.Tensor,
    norms: torch.Tensor,
    values: torch.Tensor,
    rounded: torch.Tensor,
    bits: torch.Tensor,
    halves: torch.Tensor,
    wide: torch.Tensor,
    signed: torch.Tensor,
    pairs: torch.Tensor,
    flags: torch.Tensor,
    higher: torch.Tensor,
    counts: torch.Tensor,
    keep: int = SIGN_AND_VALUE,
    block: int = FP8_BLOCK,
    most: int = _COUNTED,
) -> int:
    """Fill `out` with codes, two a byte of -7 and -8, and `squares` and `norms` as `square_sums` does.

    x       float32 [N, K], or e4m3 codes as int8 where `scales` are not empty: [N, B, 1], HALF_EXPONENT times what is meant
    steps   [N, g, 1], and `error_steps` the same, measured in `powers` [N] where those are not empty
    step    rows at a time, for which `values` to `counts` are memory: `halves` is `bits` as float16, which is used before `rounded`
            and lies in it; `signed` is `wide` as int8, and `pairs` and `higher` are `wide` and `flags` as int16
    out, norms  without elements: not wanted
    returns how many codes were cut
    """
    rows, num_groups, cut, counted = x.shape[0], steps.shape[1], 0, 0
    # As tensors: a Python number beside a tensor costs a call more than a microsecond, what a run's bytes take or more.
    seven, sign_and_value = torch.tensor(7, dtype=torch.int16), torch.tensor(keep, dtype=torch.int16)
    eight, flag, four = (
        torch.tensor(8, dtype=torch.int8),
        torch.tensor(16, dtype=torch.uint8),
        torch.tensor(4, dtype=torch.int16),
    )
    bit_3, nibbles = torch.tensor(0x0808, dtype=torch.int16), torch.tensor(0x0F0F, dtype=torch.int16)
    counts.zero_()
    for first in range(0, rows, step):
        last = min(first + step, rows)
        count = last - first
        if count < step:
            values, rounded, bits, halves = values[:count], rounded[:count], bits[:count], halves[:count]
            wide, signed, pairs = wide[:count], signed[:count], pairs[:count]
            flags, higher = flags[:count], higher[:count]
        groups, some = values.view(count, num_groups, -1), x[first:last]
        if x.dtype == torch.int8:  # as e4m3_to_float32 in float8.py, the exponent's correction being in the scales
            bits.copy_(some).bitwise_left_shift_(seven).bitwise_and_(sign_and_value)
            some = values.copy_(halves)
            some.view(count, -1, block).mul_(scales[first:last])
        if norms.numel() > 0:
            square_sums(some, powers[first:last], rounded, norms[first:last])
        torch.div(some.view(count, num_groups, -1), steps[first:last], out=groups)
        torch.round(values, out=rounded)
        # -7..7: no scale's rounding makes an 8 of a 7. -127..127: at most 127.25 comes of it.
        if out.numel() > 0 and low == -127:
            out[first:last].copy_(rounded)
        elif out.numel() > 0:
            signed.copy_(rounded)
            if low == -8:
                # Plus 8, codes are 0 to 15, and those to be cut 16 or -1, which bit 4 tells; nibbles differ by bit 3.
                signed.add_(eight)
                counts[:count].add_(torch.bitwise_and(wide, flag, out=flags))
                counted += 1
                if counted == most or last == rows:
                    cut += int(torch.sum(counts)) // 16
                    counts.zero_()
                    counted = 0
                signed.clamp_(0, 15)
                pairs.bitwise_xor_(bit_3)
            else:
                pairs.bitwise_and_(nibbles)
            torch.bitwise_right_shift(pairs, four, out=higher)
            out[first:last].copy_(higher.bitwise_or_(pairs))
        if low == -8:
            rounded.clamp_(-8, 7)
        values.sub_(rounded)
        groups.mul_(error_steps[first:last])
        square_sums(values, powers[:0], values, squares[first:last])
    return cut


with warnings.catch_warnings():
    # Deprecated, but what should replace it wants a C++ compiler where dsc runs. The same in plain Python, only slower.
    warnings.simplefilter("ignore", DeprecationWarning)
    square_sums = torch.jit.script(square_sums)
    _go_through = torch.jit.script(_go_through)
