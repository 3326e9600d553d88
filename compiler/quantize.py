"""Quantizers: round to nearest even in plain torch, with the same bytes on any machine and at any thread count.

Only elementwise operations, min, max and copies touch values; sums (of squared errors) go by a fixed tree along a row and
exactly (math.fsum) over rows. Weights are worked through in runs of rows whose temporaries fit a core's cache.

Legend: N rows, K columns of a matrix; G columns that share a scale.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dsc.compiler.float8 import e4m3_to_float32
from dsc.plugins.formats import Format
from dsc.plugins.stored import FP8_BLOCK, FP8_MAX

RUN_ELEMENTS = 1 << 18
SAMPLED_ELEMENTS, SAMPLED_RUNS = 1 << 19, 8
# Subnormal scales would overflow the codes, and differ with flush-to-zero.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
SUMMED_COLUMNS = 128
LARGEST_STEP, SMALLEST_STEP = 2.0**40, 2.0**-40
GRIDS = ("-7..7", "-8..7")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float8_e4m3fn", "int8", "uint8")}


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


_BUFFERS = _Buffers()


class NotFiniteError(ValueError):
    """A weight holds NaN or infinity: no format stores it."""


@dataclass(frozen=True)
class Errors:
    """What rounding cost a matrix, or several together.

    square, norm  sums of (stored - value)^2 and of value^2
    worst_row     largest relative error of a row; a row of zeros has none
    saturated     codes cut to the largest or smallest one: they lie half a step from their value, or more
    zero_groups   groups of zeros (or of values below the smallest normal float32): scale 1, codes 0
    grids         wint4: how many matrices took which codes, "-7..7" or "-8..7"
    """

    square: float = 0.0
    norm: float = 0.0
    worst_row: float = 0.0
    saturated: int = 0
    zero_groups: int = 0
    grids: Mapping[str, int] = field(default_factory=dict)

    @property
    def relative(self) -> float:
        """Frobenius norm of the error over that of the values."""
        return math.sqrt(self.square / self.norm) if self.norm else 0.0


def add_errors(items: Sequence[Errors]) -> Errors:
    """Errors of several matrices together, the same in whatever order they were measured."""
    counts: Counter[str] = Counter()
    for item in items:
        counts.update(item.grids)
    return Errors(
        square=math.fsum(item.square for item in items),
        norm=math.fsum(item.norm for item in items),
        worst_row=max((item.worst_row for item in items), default=0.0),
        saturated=sum(item.saturated for item in items),
        zero_groups=sum(item.zero_groups for item in items),
        grids=dict(sorted(counts.items())),
    )


@dataclass(frozen=True)
class Quantized:
    """A matrix in a storage format: its stored parts ("data", "scales") as `Format.parts` describes them."""

    parts: dict[str, torch.Tensor]
    errors: Errors


@dataclass(frozen=True)
class _Run:
    """Some rows of a matrix, rounded: stored parts, and for each row the squares of its errors and of its values."""

    parts: dict[str, torch.Tensor]
    squares: torch.Tensor
    norms: torch.Tensor
    saturated: int = 0
    zero_groups: int = 0


def quantize(x_NK: torch.Tensor, format_: Format, grid: str = "") -> Quantized:
    """Store a float32 matrix in a format.

    fp32, bf16  rounded to nearest even
    fp8         blocks of 128x128 (partial at the edges), scale = amax / 448 in float32, saturating
    wint8       a row's scale = amax / 127
    wint4       groups along K. Grid "-7..7": scale = amax / 7, the extremes are codes. Grid "-8..7": scale =
                max(max / 7.5, -min / 8.5), the smallest that leaves no value over half a step from a code. Without a
                grid: see `choose_grid`.
    Scales of wint4 and wint8 are rounded to bfloat16 first, codes are computed against the rounded scale.
    raises      NotFiniteError
    """
    if format_.kind == "wint4" and not grid:
        grid = choose_grid(x_NK.shape, format_, lambda rows: x_NK[slice(*rows)])
    return _quantize(x_NK, format_, grid)


def choose_grid(shape: Sequence[int], format_: Format, rows_of: Callable[[tuple[int, int]], torch.Tensor]) -> str:
    """The wint4 grid of a matrix: the one with the smaller squared error over its sample, "-7..7" when equal.

    rows_of  gives the float32 values of some rows, the first and one past the last
    """
    squares: dict[str, list[float]] = {grid: [] for grid in GRIDS}
    for rows in sampled_rows(shape):
        values = rows_of(rows)
        for grid, found in squares.items():
            found.append(_quantize(values, format_, grid).errors.square)
    return min(GRIDS, key=lambda grid: math.fsum(squares[grid]))


def sampled_rows(shape: Sequence[int]) -> list[tuple[int, int]]:
    """The sample of a matrix [N, K]: all of up to SAMPLED_ELEMENTS, else that many in SAMPLED_RUNS runs evenly spread."""
    rows, columns = shape
    if rows * columns <= SAMPLED_ELEMENTS:
        return [(0, rows)]
    count = max(SAMPLED_ELEMENTS // SAMPLED_RUNS // columns, 1)
    starts = sorted({(rows - count) * i // (SAMPLED_RUNS - 1) for i in range(SAMPLED_RUNS)})
    return [(start, start + count) for start in starts]


def _quantize(x_NK: torch.Tensor, format_: Format, grid: str) -> Quantized:
    rows, columns = x_NK.shape
    parts = {
        part: torch.empty(shape, dtype=DTYPES[dtype]) for part, (dtype, shape) in format_.parts(x_NK.shape).items()
    }
    squares_N, norms_N = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.float64)
    saturated = zero_groups = 0
    alike = FP8_BLOCK if format_.kind == "fp8" else 1  # rows that share scales
    step = max(RUN_ELEMENTS // columns // alike, 1) * alike
    for start in range(0, rows, step):
        run = _round(x_NK[start : start + step], format_, grid)
        for part, values in run.parts.items():
            first = start // alike if part == "scales" else start
            parts[part][first : first + len(values)] = values
        squares_N[start : start + step] = run.squares
        norms_N[start : start + step] = run.norms
        saturated += run.saturated
        zero_groups += run.zero_groups
    errors = Errors(
        square=math.fsum(squares_N.tolist()),
        norm=math.fsum(norms_N.tolist()),
        worst_row=math.sqrt(float((squares_N / norms_N.clamp_min(torch.finfo(torch.float64).tiny)).max())),
        saturated=saturated,
        zero_groups=zero_groups,
        grids={grid: 1} if grid else {},
    )
    return Quantized(parts, errors)


def sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of each row of x [N, K] in float64, their order fixed whatever the threads and the vector width.

    Whole columns are added first, one after another, in x's dtype; numpy adds the up to 128 left of each row pairwise.
    """
    columns = math.gcd(x.shape[1], SUMMED_COLUMNS)
    partial = x.view(len(x), -1, columns).sum(1).numpy()
    return torch.from_numpy(np.add.reduce(partial, -1, dtype=np.float64))


def _round(x: torch.Tensor, format_: Format, grid: str) -> _Run:
    if format_.kind == "wint4":
        return _wint4(x, format_.group, grid)
    if format_.kind == "wint8":
        return _wint8(x)
    if format_.kind == "fp8":
        return _fp8(x)
    data = x.to(torch.bfloat16 if format_.kind == "bf16" else torch.float32)
    exact = x.double()
    norms = sums(exact.square())
    if not bool(torch.isfinite(norms).all()) or not bool(torch.isfinite(data.abs().amax())):
        raise NotFiniteError("NaN or infinity")
    return _Run({"data": data}, sums(exact.sub_(data).square_()), norms)


def _wint4(x: torch.Tensor, group: int, grid: str) -> _Run:
    groups_NgG = x.reshape(len(x), -1, group)
    high, low = groups_NgG.amax(-1), groups_NgG.amin(-1)
    widest = torch.maximum(high, low.neg()) / 7 if grid == "-7..7" else torch.maximum(high / 7.5, low / -8.5)
    scales, zero_groups = _bf16_scales(widest)
    steps_Ng1 = scales.float().unsqueeze(-1)
    ratios = torch.div(groups_NgG, steps_Ng1, out=_BUFFERS.take("ratios", groups_NgG.shape))
    codes = torch.round(ratios, out=_BUFFERS.take("codes", groups_NgG.shape))
    packed = _BUFFERS.take("packed", x.shape, torch.int8).copy_(codes.view_as(x))
    saturated = 0
    if grid != "-7..7":  # there, no scale's rounding makes an 8 of a 7
        wide, packed = packed, torch.clamp(packed, -8, 7, out=_BUFFERS.take("clamped", x.shape, torch.int8))
        saturated = int(np.count_nonzero(wide.numpy() != packed.numpy()))
        codes.clamp_(-8, 7)
    norms, squares = _measure(groups_NgG, ratios.sub_(codes), steps_Ng1, widest)
    return _Run({"data": _pack(packed), "scales": scales}, squares, norms, saturated, zero_groups)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """int8 [..., K] in -8..7 -> uint8 [..., K/2], the low nibble the even k. Two codes at a time, as an int16."""
    nibbles = codes.view(torch.int16) & 0x0F0F
    return (nibbles >> 4).bitwise_or_(nibbles).to(torch.uint8)


def _wint8(x: torch.Tensor) -> _Run:
    widest = torch.maximum(x.amax(-1, True), x.amin(-1, True).neg()) / 127
    scales, zero_groups = _bf16_scales(widest)
    steps_N1 = scales.float()
    ratios = torch.div(x, steps_N1, out=_BUFFERS.take("ratios", x.shape))
    # At most 127: the rounding of a scale makes no more than 127.25 of it.
    codes = torch.round(ratios, out=_BUFFERS.take("codes", x.shape))
    parts = {"data": codes.to(torch.int8), "scales": scales.squeeze(-1)}
    norms, squares = _measure(x.unsqueeze(1), ratios.sub_(codes).unsqueeze(1), steps_N1.unsqueeze(1), widest)
    return _Run(parts, squares, norms, 0, zero_groups)


def _bf16_scales(scales: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Scales as stored, and how many groups hold nothing: those get scale 1."""
    empty = scales < SMALLEST_SCALE
    return scales.masked_fill(empty, 1.0).to(torch.bfloat16), int(np.count_nonzero(empty.numpy()))


def _measure(
    x_NgG: torch.Tensor, errors_NgG: torch.Tensor, steps_Ng1: torch.Tensor, widest_Ng: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squares of each row's values and of its errors, which are given in steps and overwritten.

    widest  what the steps were before they were rounded and the empty ones became 1: it shows NaN, infinity and how large
            a row's values are. Where squares would overflow or underflow, rows are measured in powers of two near that.
    """
    largest = widest_Ng.amax(-1)
    if not bool(np.isfinite(largest.numpy()).all()):
        raise NotFiniteError("NaN or infinity")
    units = torch.ones((), dtype=torch.float64)
    if float(largest.max()) > LARGEST_STEP or float(largest.min()) < SMALLEST_STEP:
        exponents = torch.exp2(torch.frexp(largest).exponent.float())
        x_NgG, steps_Ng1 = x_NgG / exponents.view(-1, 1, 1), steps_Ng1 / exponents.view(-1, 1, 1)
        units = exponents.double().square_()
    squares = sums(errors_NgG.mul_(steps_Ng1).square_().flatten(1))
    norms = sums(torch.square(x_NgG, out=errors_NgG).flatten(1))
    return norms * units, squares * units


def _fp8(x: torch.Tensor) -> _Run:
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % FP8_BLOCK))
    groups = padded.view(rows, -1, FP8_BLOCK)
    widest = torch.maximum(groups.amax(-1), groups.amin(-1).neg())
    amax = torch.nn.functional.pad(widest, (0, 0, 0, -rows % FP8_BLOCK))
    scales = amax.view(-1, FP8_BLOCK, amax.shape[1]).amax(1) / FP8_MAX
    empty = scales < SMALLEST_SCALE
    scales = scales.masked_fill(empty, 1.0)
    spread = scales.repeat_interleave(FP8_BLOCK, 0)[:rows]
    ratios = torch.div(groups, spread.unsqueeze(-1), out=_BUFFERS.take("ratios", groups.shape)).clamp_(
        -FP8_MAX, FP8_MAX
    )
    codes = ratios.to(torch.float8_e4m3fn)
    parts = {"data": codes.view(rows, -1)[:, :columns], "scales": scales}
    norms, squares = _measure(groups, ratios.sub_(e4m3_to_float32(codes)), spread.unsqueeze(-1), widest)
    return _Run(parts, squares, norms, zero_groups=int(empty.count_nonzero()))
