"""Quantizers: round to nearest even in plain torch, with the same bytes on any machine and at any thread count.

Only elementwise operations, min, max and copies touch values; sums (of squared errors) go by a fixed tree along a row and
exactly (math.fsum) over rows. Weights are worked through in runs of rows whose temporaries fit a core's cache.

Legend: N rows, K columns of a matrix; G columns that share a scale.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dsc.compiler.pieces import RUN_ELEMENTS
from dsc.compiler.round_fp8 import round_fp8
from dsc.compiler.round_integers import (
    SUMMED_COLUMNS,
    Matrix,
    Rounded,
    add_up,
    join,
    round_integers,
)
from dsc.plugins.formats import Format

SAMPLED_ELEMENTS, SAMPLED_RUNS = 1 << 19, 8
GRIDS = ("-7..7", "-8..7")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float8_e4m3fn", "int8", "uint8")}


class NotFiniteError(ValueError):
    """A weight holds NaN or infinity: no format stores it."""


@dataclass(frozen=True)
class Errors:
    """What rounding cost a matrix, or several together.

    square, norm  sums of (stored - value)^2 and of value^2
    worst_row     largest relative error of a row; a row of zeros has none
    saturated     codes cut to the largest or smallest one: they lie half a step from their value, or more
    zero_groups   groups of zeros (or of values below the smallest normal float32): scale 1, codes 0
    grids         wint4: how many matrices took which codes, "-7..7", "-8..7" or those "of the source"
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
    """Some rows of a matrix as stored, and for each row the squares of its errors and of its values."""

    data: torch.Tensor
    squares: torch.Tensor
    norms: torch.Tensor


def quantize(x: torch.Tensor | Matrix, format_: Format, grid: str = "") -> Quantized:
    """Store a matrix in a format: float32 values, or for wint4 and wint8 anything that `Matrix` can be.

    fp32, bf16  rounded to nearest even
    fp8         blocks of 128x128 (partial at the edges), scale = amax / 448 in float32, saturating
    wint8       a row's scale = amax / 127
    wint4       groups along K. Grid "-7..7": scale = amax / 7, the extremes are codes. Grid "-8..7": scale =
                max(max / 7.5, -min / 8.5), the smallest that leaves no value over half a step from a code. Without a
                grid: see `choose_grid`.
    Scales of wint4 and wint8 are rounded to bfloat16 first, codes are computed against the rounded scale.
    raises      NotFiniteError
    """
    matrix = x if isinstance(x, Matrix) else Matrix(x)
    if format_.kind == "wint4":
        grid = grid or choose_grid(matrix.shape, format_, matrix.rows)
        rounded = _round_integers(matrix, format_, grid)
        return Quantized({"data": rounded.data, "scales": rounded.scales}, _errors_of(rounded, grid))
    if format_.kind == "wint8":
        rounded = _round_integers(matrix, format_)
        return Quantized({"data": rounded.data, "scales": rounded.scales.squeeze(-1)}, _errors_of(rounded))
    assert matrix.scales is None, format_
    if format_.kind == "fp8":
        rounded = _finite(round_fp8(matrix.values))
        return Quantized({"data": rounded.data, "scales": rounded.scales}, _errors_of(rounded))
    return _quantize_floats(matrix.values, format_)


def choose_grid(shape: Sequence[int], format_: Format, rows_of: Callable[[tuple[int, int]], Matrix]) -> str:
    """The wint4 grid of a matrix: the one with the smaller squared error over its sample, "-7..7" when equal.

    rows_of  gives some rows, the first and one past the last
    """
    runs = [rows_of(rows) for rows in sampled_rows(shape)]
    sample, counts = join(runs), [run.shape[0] for run in runs]
    squares = {}
    for grid in GRIDS:
        rows = _round_integers(sample, format_, grid, errors_only=True).squares
        squares[grid] = math.fsum(math.fsum(run.tolist()) for run in torch.split(rows, counts))
    return min(GRIDS, key=squares.__getitem__)


def sampled_rows(shape: Sequence[int]) -> list[tuple[int, int]]:
    """The sample of a matrix [N, K]: all of up to SAMPLED_ELEMENTS, else that many in SAMPLED_RUNS runs evenly spread."""
    rows, columns = shape
    if rows * columns <= SAMPLED_ELEMENTS:
        return [(0, rows)]
    count = max(SAMPLED_ELEMENTS // SAMPLED_RUNS // columns, 1)
    starts = sorted({(rows - count) * i // (SAMPLED_RUNS - 1) for i in range(SAMPLED_RUNS)})
    return [(start, start + count) for start in starts]


def _round_integers(matrix: Matrix, format_: Format, grid: str = "", errors_only: bool = False) -> Rounded:
    low = {"": -127, "-7..7": -7, "-8..7": -8}[grid]
    return _finite(round_integers(matrix, format_.group if grid else matrix.shape[1], low, errors_only))


def _finite(rounded: Rounded) -> Rounded:
    if not rounded.finite:
        raise NotFiniteError("NaN or infinity")
    return rounded


def row_errors(
    squares: torch.Tensor, norms: torch.Tensor, saturated: int = 0, zero_groups: int = 0, grid: str = ""
) -> Errors:
    """Errors of a matrix, from each row's squares of its errors and of its values, in float64."""
    return Errors(
        square=math.fsum(squares.tolist()),
        norm=math.fsum(norms.tolist()),
        worst_row=math.sqrt(float((squares / norms.clamp_min(torch.finfo(torch.float64).tiny)).max())),
        saturated=saturated,
        zero_groups=zero_groups,
        grids={grid: 1} if grid else {},
    )


def _errors_of(made: Rounded, grid: str = "") -> Errors:
    return row_errors(made.squares, made.norms, made.saturated, made.zero_groups, grid)


def _quantize_floats(x_NK: torch.Tensor, format_: Format) -> Quantized:
    rows, columns = x_NK.shape
    parts = {
        part: torch.empty(shape, dtype=DTYPES[dtype]) for part, (dtype, shape) in format_.parts(x_NK.shape).items()
    }
    squares_N, norms_N = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.float64)
    step = max(RUN_ELEMENTS // columns, 1)
    for start in range(0, rows, step):
        run = _round(x_NK[start : start + step], format_)
        parts["data"][start : start + step] = run.data
        squares_N[start : start + step] = run.squares
        norms_N[start : start + step] = run.norms
    return Quantized(parts, row_errors(squares_N, norms_N))


def sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of each row of x [N, K] in float64, their order fixed whatever the threads and the vector width.

    Whole columns are added first, one after another, in x's dtype; numpy adds the up to 128 left of each row pairwise.
    """
    return add_up(x.view(len(x), -1, math.gcd(x.shape[1], SUMMED_COLUMNS)).sum(1))


def _round(x: torch.Tensor, format_: Format) -> _Run:
    data = x.to(torch.bfloat16 if format_.kind == "bf16" else torch.float32)
    exact = x.double()
    norms = sums(exact.square())
    if not bool(torch.isfinite(norms).all()) or not bool(torch.isfinite(data.abs().amax())):
        raise NotFiniteError("NaN or infinity")
    return _Run(data, sums(exact.sub_(data).square_()), norms)
