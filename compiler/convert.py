"""Turn one segment of a weight into its stored bytes, some rows at a time: what is in memory does not grow with the weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from dsc.compiler import quantize as quantizers
from dsc.compiler.emission_plan import Job
from dsc.compiler.evaluate import evaluate, row_blocks
from dsc.compiler.float8 import has_nan
from dsc.compiler.ir.simplify import verdict
from dsc.compiler.ir.weight import Dequantize, DequantizePacked, Expression, Quantize, Source
from dsc.compiler.keep_codes import GRID, can_keep, keep
from dsc.compiler.packing import LAYOUTS
from dsc.compiler.pieces import HELD_BYTES, INTEGERS, piece
from dsc.compiler.quantize import Errors, NotFiniteError, add_errors, quantize
from dsc.compiler.round_integers import Matrix, takes_codes
from dsc.compiler.unpack import AmbiguousZeroError, Read, Rows, read_packed
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
    raises   DscError naming a weight that holds NaN or infinity, or a zero that implementations read differently
    """
    read = _holding(job, read)
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
    except (NotFiniteError, AmbiguousZeroError) as error:
        sources = ", ".join(dict.fromkeys(source.name for source in job.segment.sources()))
        try_ = "the same model in checkpoint_format gptq_v2" if isinstance(error, AmbiguousZeroError) else ""
        raise DscError(
            f"holds {error}", where=f"weight {job.weight}", details=[("from", sources)], try_=try_
        ) from error


def pieces(segment: Expression) -> Iterator[Rows]:
    """Rows of a segment (of the operand, where it is to be rounded) that are worked on together."""
    if not any(segment.sources()):
        return iter([(0, segment.shape[0])])  # a table, computed as a whole
    cut = piece(_kind(segment), bool(_turned(segment)))
    return row_blocks(_worked_on(segment).shape, cut.elements, cut.alike)


def memory_of(job: Job) -> int:
    """Bytes of memory that converting a job takes at most."""
    segment = job.segment
    elements = max(last - first for first, last in pieces(segment)) * math.prod(_worked_on(segment).shape[1:])
    turned = _turned(segment)
    held = max((min(words.nbytes, HELD_BYTES) for words in turned), default=0)
    return elements * piece(_kind(segment), bool(turned)).element_bytes + held


def _turned(expression: Expression) -> list[Source]:
    """Words of packed matrices that are stored with their columns first: all of them are read for any rows."""
    if isinstance(expression, DequantizePacked):
        words = expression.x
        return [words] if LAYOUTS[expression.packing.method].turned and isinstance(words, Source) else []
    return [words for item in expression.inputs for words in _turned(item)]


def _holding(job: Job, read: Read) -> Read:
    """A reader that reads such words once for all pieces, where they are few enough to be held: those of an expert."""
    names = {words.name for words in _turned(job.segment) if words.nbytes <= HELD_BYTES}
    held: dict[str, torch.Tensor] = {}

    def read_held(name: str, rows: slice | None) -> torch.Tensor:
        if name not in names:
            return read(name, rows)
        if name not in held:
            held.clear()  # one matrix after the other
            held[name] = read(name, None)
        return held[name] if rows is None else held[name][rows]

    return read_held if names else read


def _kind(segment: Expression) -> str | None:
    return segment.parsed.kind if isinstance(segment, Quantize) else None


def _worked_on(segment: Expression) -> Expression:
    return segment.x if isinstance(segment, Quantize) else segment


def _round(job: Job, segment: Quantize, read: Read, write: Write, advance: Callable[[int], None]) -> Errors:
    format_, shape = segment.parsed, segment.x.shape
    assert len(shape) == 2, (job.weight, shape)
    keeps = can_keep(segment, read)
    grid = choose_grid(segment, read) if format_.kind == "wint4" and not keeps else ""
    found = []
    for rows in pieces(segment):
        if keeps and isinstance(segment.x, DequantizePacked):
            made = keep(read_packed(segment.x, read, rows), format_.group)
        else:
            made = quantize(_operand(segment, read, rows), format_, grid)
        for part, target in job.targets.items():
            first = rows[0] // FP8_BLOCK if (format_.kind, part) == ("fp8", "scales") else rows[0]
            row_bytes = target.expression.nbytes // target.expression.shape[0]
            write(target.tensor, target.offset + first * row_bytes, made.parts[part])
        advance(_share(job.source_bytes, rows, shape[0]))
        found.append(made.errors)
    total = add_errors(found)
    return replace(total, grids=dict.fromkeys(total.grids, 1))


def outcome(segment: Expression, errors: Errors) -> str:
    """The verdict on a segment that was converted: codes that were kept with their scales are passed."""
    return "passed" if GRID in errors.grids and not errors.square else verdict(segment)


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
