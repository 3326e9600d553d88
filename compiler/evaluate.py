"""Evaluate weight expressions: read source tensors and apply their transforms, whole or some rows at a time.

Elementwise operations and copies only, so a piece's bytes do not depend on threads or on where the pieces are cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dsc.compiler import tables
from dsc.compiler.float8 import e4m3_to_float32
from dsc.compiler.ir.weight import (
    Cast,
    Concat,
    Dequantize,
    DequantizePacked,
    Expression,
    Generated,
    Quantize,
    Reshape,
    Source,
    Stack,
)
from dsc.compiler.quantize import quantize
from dsc.compiler.unpack import Read, Rows, read_packed

PIECE_ELEMENTS = 1 << 24  # one expert of R1 is 14.7 M, and stays whole
BLOCK_ROWS = 128


def row_blocks(shape: tuple[int, ...], elements: int = PIECE_ELEMENTS, alike: int = BLOCK_ROWS) -> Iterator[Rows]:
    """Cut the leading axis into pieces of at most `elements`, or of `alike` rows; of a multiple of them but for the last."""
    step = max(elements // math.prod(shape[1:]) // alike, 1) * alike
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def evaluate(expression: Expression, read: Read, rows: Rows | None = None) -> torch.Tensor:
    """The values of an expression, or of some rows of its leading axis, in its dtype.

    read   gives source tensors; it is asked for no more rows than are needed
    raises NotFiniteError from a Quantize, AmbiguousZeroError from packed codes
    """
    whole = rows is None or rows == (0, expression.shape[0])
    match expression:
        case Source():
            return read(expression.name, None if whole or rows is None else slice(*rows))
        case Generated():
            return _cut(torch.from_numpy(tables.evaluate(expression)), rows)
        case Cast():
            return evaluate(expression.x, read, rows).to(getattr(torch, expression.to))
        case Reshape():
            return _reshape(expression, read, rows)
        case Dequantize():
            return _dequantize(expression, read, (0, expression.shape[0]) if rows is None else rows)
        case DequantizePacked():
            return read_packed(expression, read, (0, expression.shape[0]) if rows is None else rows).dequantize()
        case Concat():
            return torch.cat([evaluate(part, read, inner) for part, inner in _overlaps(expression, rows)])
        case Stack():
            parts = expression.parts if rows is None else expression.parts[slice(*rows)]
            return torch.stack([evaluate(part, read) for part in parts])
        case Quantize():
            return _cut(_quantize(expression.x, expression, read), rows)
    raise AssertionError(f"no evaluation of {type(expression).__name__}")


def _cut(values: torch.Tensor, rows: Rows | None) -> torch.Tensor:
    return values if rows is None else values[slice(*rows)]


def _reshape(expression: Reshape, read: Read, rows: Rows | None) -> torch.Tensor:
    """Rows of the result that are whole rows of the operand are read alone; else all of it is."""
    inner, outer = math.prod(expression.x.shape[1:]), math.prod(expression.shape[1:])
    if rows is None or (rows[0] * outer) % inner or (rows[1] * outer) % inner:
        return _cut(evaluate(expression.x, read).reshape(expression.shape), rows)
    operand = evaluate(expression.x, read, (rows[0] * outer // inner, rows[1] * outer // inner))
    return operand.reshape(-1, *expression.shape[1:])


def _dequantize(expression: Dequantize, read: Read, rows: Rows) -> torch.Tensor:
    """float32 codes * scales; the block rows that `rows` touch are the only scales read."""
    height, width = expression.block
    first = rows[0] // height
    codes = evaluate(expression.x, read, rows)
    values = e4m3_to_float32(codes) if codes.dtype == torch.float8_e4m3fn else codes.to(torch.float32, copy=True)
    scales = evaluate(expression.scales, read, (first, -(-rows[1] // height))).to(torch.float32)
    whole = values.shape[1] // width
    for block, row_of_scales in enumerate(scales, first):
        part = values[max(block * height - rows[0], 0) : (block + 1) * height - rows[0]]
        part[:, : whole * width].view(len(part), whole, width).mul_(row_of_scales[:whole].unsqueeze(1))
        if len(row_of_scales) > whole:
            part[:, whole * width :].mul_(row_of_scales[whole])
    return values


def _overlaps(expression: Concat, rows: Rows | None) -> Iterator[tuple[Expression, Rows | None]]:
    """The parts that some rows of a concatenation lie in, with their rows there."""
    start = 0
    for part in expression.parts:
        stop = start + part.shape[0]
        if rows is None:
            yield part, None
        elif rows[0] < stop and start < rows[1]:
            yield part, (max(rows[0] - start, 0), min(rows[1], stop) - start)
        start = stop


def _quantize(x: Expression, expression: Quantize, read: Read) -> torch.Tensor:
    """One part of a quantized weight; a stacked one matrix by matrix, each with its own choice of grid."""
    if len(x.shape) == 2:
        return quantize(evaluate(x, read), expression.parsed).parts[expression.part]
    matrices = (evaluate(x, read, (index, index + 1))[0] for index in range(x.shape[0]))
    return torch.stack([quantize(matrix, expression.parsed).parts[expression.part] for matrix in matrices])
