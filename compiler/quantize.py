"""Quantizers: round to nearest even in plain torch, with the same bytes on any machine and at any thread count.

Only elementwise operations, min, max and copies touch values; sums (of squared errors) go by a fixed tree along a row and
exactly (math.fsum) over rows. Large weights are worked through in runs of rows that fit a core's cache.

Legend: N rows, K columns of a matrix; G columns that share a scale.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dsc.plugins.formats import Format
from dsc.plugins.stored import FP8_BLOCK, FP8_MAX, pack_nibbles

RUN_ELEMENTS = 1 << 18
SMALLEST_SCALE = torch.finfo(
    torch.float32
).tiny  # subnormal scales would overflow the codes, and differ with flush-to-zero
GRIDS = ("-7..7", "-8..7")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float8_e4m3fn", "int8", "uint8")}


class NotFiniteError(ValueError):
    """A weight holds NaN or infinity: no format stores it."""


@dataclass(frozen=True)
class Errors:
    """What rounding cost a matrix, or several together.

    square, norm  sums of (stored - value)^2 and of value^2
    worst_row     largest relative error of a row; a row of zeros has none
    saturated     codes that lie more than half a step from their value
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
                grid the one with the smaller squared error over the matrix is taken, "-7..7" when equal.
    Scales of wint4 and wint8 are rounded to bfloat16 first, codes are computed against the rounded scale.
    raises      NotFiniteError
    """
    if format_.kind != "wint4" or grid:
        return _quantize(x_NK, format_, grid)
    return min((_quantize(x_NK, format_, each) for each in GRIDS), key=lambda made: made.errors.square)


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
    """Sums along the last axis by halving: additions of whole columns, so neither threads nor vector width change a bit."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if x.shape[-1] % 2:
            folded[..., 0] += x[..., -1]
        x = folded
    return x[..., 0]


def _round(x: torch.Tensor, format_: Format, grid: str) -> _Run:
    if format_.kind == "wint4":
        return _wint4(x, format_.group, grid)
    if format_.kind == "wint8":
        return _wint8(x)
    if format_.kind == "fp8":
        return _fp8(x)
    data = x.to(torch.bfloat16 if format_.kind == "bf16" else torch.float32)
    if not bool(torch.isfinite(data).all()):
        raise NotFiniteError("NaN or infinity")
    exact = x.double()
    return _Run({"data": data}, sums((data - exact).square_()), sums(exact.square_()))


def _wint4(x: torch.Tensor, group: int, grid: str) -> _Run:
    groups = x.reshape(len(x), -1, group)
    if grid == "-7..7":
        low, scales = -7, groups.abs().amax(-1) / 7
    else:
        low, scales = -8, torch.maximum(groups.amax(-1) / 7.5, groups.amin(-1) / -8.5)
    scales, zero_groups = _bf16_scales(scales)
    ratios = groups / scales.float().unsqueeze(-1)
    codes = ratios.round().clamp_(low, 7)
    parts = {"data": pack_nibbles(codes.to(torch.int8).flatten(1)), "scales": scales}
    norms, squares, saturated = _measure(ratios, codes, scales)
    return _Run(parts, squares, norms, saturated, zero_groups)


def _wint8(x: torch.Tensor) -> _Run:
    scales, zero_groups = _bf16_scales(x.abs().amax(-1) / 127)
    ratios = x / scales.float().unsqueeze(-1)
    codes = ratios.round().clamp_(-127, 127)
    parts = {"data": codes.to(torch.int8), "scales": scales}
    norms, squares, saturated = _measure(ratios.unsqueeze(1), codes.unsqueeze(1), scales.unsqueeze(1))
    return _Run(parts, squares, norms, saturated, zero_groups)


def _bf16_scales(scales: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Scales as stored, and how many groups hold nothing: those get scale 1."""
    empty = scales < SMALLEST_SCALE
    return scales.masked_fill(empty, 1.0).to(torch.bfloat16), int(empty.count_nonzero())


def _measure(
    ratios_NgG: torch.Tensor, codes_NgG: torch.Tensor, scales_Ng: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Squares of values and of errors of each row, and the codes that are more than half a step from their value.

    Measured in steps of the scale, where float32 neither overflows nor underflows. ratios is overwritten.
    """
    errors = ratios_NgG - codes_NgG
    weights = scales_Ng.double().square_()
    norms = sums(sums(ratios_NgG.square_()).double() * weights)
    if not bool(torch.isfinite(norms).all()):
        raise NotFiniteError("NaN or infinity")
    # Whole numbers far below 2^24: this sum is exact in any order.
    saturated = int(errors.round().abs_().sum())
    return norms, sums(sums(errors.square_()).double() * weights), saturated


def _fp8(x: torch.Tensor) -> _Run:
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % FP8_BLOCK))
    groups = padded.view(rows, -1, FP8_BLOCK)
    amax = torch.nn.functional.pad(groups.abs().amax(-1), (0, 0, 0, -rows % FP8_BLOCK))
    scales = amax.view(-1, FP8_BLOCK, amax.shape[1]).amax(1) / FP8_MAX
    empty = scales < SMALLEST_SCALE
    scales = scales.masked_fill(empty, 1.0)
    spread = scales.repeat_interleave(FP8_BLOCK, 0)[:rows]
    ratios = (groups / spread.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX)
    codes = ratios.to(torch.float8_e4m3fn)
    parts = {"data": codes.view(rows, -1)[:, :columns], "scales": scales}
    # A step of e4m3 is up to 32 near 448, so _measure's count of far codes means nothing here: nothing is clipped.
    norms, squares, _ = _measure(ratios, codes.float(), spread)
    return _Run(parts, squares, norms, zero_groups=int(empty.count_nonzero()))
