"""Turn one segment of a weight into its stored bytes, some rows at a time: what is in memory does not grow with the weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from dsc.compiler import quantize as quantizers
from dsc.compiler.emission_plan import Job
from dsc.compiler.evaluate import Read, Rows, evaluate, row_blocks
from dsc.compiler.float8 import has_nan
from dsc.compiler.ir.weight import Dequantize, Expression, Quantize
from dsc.compiler.pieces import INTEGERS, piece
from dsc.compiler.quantize import Errors, NotFiniteError, add_errors, quantize
from dsc.compiler.round_integers import Matrix, takes_codes
from dsc.plugins.stored import FP8_BLOCK
from dsc.runtime.errors import DscError

# Bits of a float without its sign, as an integer of its size, and the smallest of them that is no number.
_MAGNITUDES = {
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.float32: (torch.int32, 0x7FFF_FFFF, 0x7F80_0000),
}

Write = Callable[[str, int, torch.Tensor], None]  # some bytes of a tensor, from a byte of it on


def convert(job: Job, read: Read, write: Write, advance: Callable[[int], None]) -> Errors:
    """Evaluate a job and write its bytes; what rounding cost.

    advance  is told of source bytes that are done with, in all `job.source_bytes`
    raises   DscError naming a weight that holds NaN or infinity
    """
    try:
        if isinstance(job.segment, Quantize):
            return _round(job, job.segment, read, write, advance)
        for target in job.targets.values():
            row_bytes = target.expression.nbytes // target.expression.shape[0]
            for rows in pieces(target.expression):
                values = evaluate(target.expression, read, rows)
                check_finite(values)
                write(target.tensor, target.offset + rows[0] * row_bytes, values)
                advance(_share(job.source_bytes, rows, target.expression.shape[0]))
        return Errors()
    except NotFiniteError as error:
        sources = ", ".join(dict.fromkeys(source.name for source in job.segment.sources()))
        raise DscError(f"holds {error}", where=f"weight {job.weight}", details=[("from", sources)]) from error


def pieces(segment: Expression) -> Iterator[Rows]:
    """Rows of a segment (of the operand, where it is to be rounded) that are worked on together."""
    if not any(segment.sources()):
        return iter([(0, segment.shape[0])])  # a table, computed as a whole
    cut = piece(_kind(segment))
    return row_blocks(_worked_on(segment).shape, cut.elements, cut.alike)


def memory_of(job: Job) -> int:
    """Bytes of memory that converting a job takes at most."""
    segment = job.segment
    elements = max(last - first for first, last in pieces(segment)) * math.prod(_worked_on(segment).shape[1:])
    return elements * piece(_kind(segment)).element_bytes


def _kind(segment: Expression) -> str | None:
    return segment.parsed.kind if isinstance(segment, Quantize) else None


def _worked_on(segment: Expression) -> Expression:
    return segment.x if isinstance(segment, Quantize) else segment


def _round(job: Job, segment: Quantize, read: Read, write: Write, advance: Callable[[int], None]) -> Errors:
    format_, shape = segment.parsed, segment.x.shape
    assert len(shape) == 2, (job.weight, shape)
    grid = choose_grid(segment, read) if format_.kind == "wint4" else ""
    found = []
    for rows in pieces(segment):
        made = quantize(_operand(segment, read, rows), format_, grid)
        for part, target in job.targets.items():
            first = rows[0] // FP8_BLOCK if (format_.kind, part) == ("fp8", "scales") else rows[0]
            row_bytes = target.expression.nbytes // target.expression.shape[0]
            write(target.tensor, target.offset + first * row_bytes, made.parts[part])
        advance(_share(job.source_bytes, rows, shape[0]))
        found.append(made.errors)
    total = add_errors(found)
    return replace(total, grids=dict.fromkeys(total.grids, 1))


def choose_grid(segment: Quantize, read: Read) -> str:
    """The wint4 grid of a matrix (dsc.compiler.quantize.choose_grid). Its sample is read here, and again with the rest."""
    return quantizers.choose_grid(segment.x.shape, segment.parsed, lambda rows: _operand(segment, read, rows))


def _operand(segment: Quantize, read: Read, rows: Rows) -> Matrix:
    """Some rows of what is to be rounded, as codes where the quantizer takes those."""
    x = segment.x
    if segment.parsed.kind in INTEGERS and isinstance(x, Dequantize) and _in_blocks(x):
        first = rows[0] // FP8_BLOCK
        scales = evaluate(x.scales, read, (first, -(-rows[1] // FP8_BLOCK))).to(torch.float32)
        if takes_codes(scales, x.shape[1]):
            spread = scales.repeat_interleave(FP8_BLOCK, 0)[rows[0] - first * FP8_BLOCK :]
            return Matrix(evaluate(x.x, read, rows), spread[: rows[1] - rows[0]])
    return Matrix(evaluate(x, read, rows))


def _in_blocks(x: Dequantize) -> bool:
    return x.x.dtype == "float8_e4m3fn" and x.block == (FP8_BLOCK, FP8_BLOCK)


def _share(total: int, rows: Rows, count: int) -> int:
    """The part of `total` that falls to some of `count` rows; the parts of all rows add up to it."""
    return total * rows[1] // count - total * rows[0] // count


def check_finite(values: torch.Tensor) -> None:
    """Raise NotFiniteError where floats hold NaN or infinity."""
    if values.dtype == torch.float8_e4m3fn:
        finite = not has_nan(values)
    elif values.dtype in _MAGNITUDES and values.numel():
        integer, mask, limit = _MAGNITUDES[values.dtype]
        finite = int((values.view(integer) & mask).max()) < limit
    else:
        finite = not values.is_floating_point() or bool(torch.isfinite(values).all())
    if not finite:
        raise NotFiniteError("NaN or infinity")
