"""Simplify weight expressions, so that what was stored once in a format is passed through bit for bit.

The result is a Stack or Concat of segments, or one segment. A segment either needs rounding, and then is a Quantize, or
holds the source's values or codes as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsc.compiler.ir.weight import (
    Cast,
    Concat,
    Dequantize,
    DequantizePacked,
    Expression,
    Quantize,
    Random,
    Reshape,
    Stack,
    Unary,
)
from dsc.plugins.formats import parse_format

_EXACT_IN = {  # dtypes that hold every value of a dtype
    "float32": ("float32",),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
    "float8_e4m3fn": ("float8_e4m3fn", "bfloat16", "float32"),
}


def simplify(expression: Expression) -> Expression:
    """An expression of the same bytes that does less. A Quantize of an fp8 weight in its own blocks becomes its codes or
    scales; casts there and back vanish; a Quantize of stacked matrices becomes a Stack, so each is judged by itself.
    """
    match expression:
        case Quantize():
            return _quantize(expression)
        case Cast():
            return _cast(simplify(expression.x), expression.to)
        case Reshape():
            return _reshape(simplify(expression.x), expression.to)
        case Dequantize():
            return replace(expression, x=simplify(expression.x), scales=simplify(expression.scales))
        case Concat() | Stack():
            return replace(expression, parts=tuple(simplify(part) for part in expression.parts))
    return expression


def segments(expression: Expression) -> Iterator[tuple[int, Expression]]:
    """Parts of a simplified expression that are evaluated and judged by themselves, with their byte offset in it."""
    if not isinstance(expression, Concat | Stack):
        yield 0, expression
        return
    offset = 0
    for part in expression.parts:
        for inner, segment in segments(part):
            yield offset + inner, segment
        offset += part.nbytes


def verdict(segment: Expression) -> str:
    """What became of a segment's values.

    exact        the values are the source's       passed       codes and scales are the source's, bit for bit
    rounded      to bfloat16, from float32         quantized    from unquantized values
    requantized  from another format's codes        random       made up

    Of what `keeps_codes` allows, conversion finds out whether it is passed.
    """
    if isinstance(segment, Random):
        return "random"
    if isinstance(segment, Quantize):
        if not segment.parsed.quantized:
            return "rounded"
        return "requantized" if _dequantizes(segment) else "quantized"
    if _rounds(segment):
        return "rounded"
    return "passed" if segment.dtype == "float8_e4m3fn" else "exact"


def keeps_codes(expression: Quantize) -> bool:
    """Whether codes of a packed operand are codes of wint4 too, where all of its zeros are the middle: same bits, and groups
    of wint4 that lie within the operand's.
    """
    return isinstance(expression.x, DequantizePacked) and _holds_codes(expression.x, expression.format)


def passes_codes(x: DequantizePacked, format_: str) -> bool:
    """Whether a format stores codes and scales of a packed matrix as they are, as dtypes alone tell: other ones must be read."""
    return _holds_codes(x, format_) and x.zeros is None and x.scales.dtype == "bfloat16"


def loses_codes(x: Expression, format_: str) -> int:
    """Columns of the groups of symmetric 4-bit codes that wint4 could keep and this format of it does not; 0 for none."""
    if isinstance(x, Stack | Concat):
        return next((group for part in x.parts if (group := loses_codes(part, format_))), 0)
    if not isinstance(x, DequantizePacked) or x.zeros is not None or x.packing.bits != 4:
        return 0
    keeps = _holds_codes(x, format_) or parse_format(format_).kind != "wint4"
    return 0 if keeps else x.packing.group


def _holds_codes(x: DequantizePacked, format_: str) -> bool:
    parsed = parse_format(format_)
    group = x.packing.group or x.shape[1]
    return parsed.kind == "wint4" and x.packing.bits == 4 and (group % parsed.group == 0 or group >= x.shape[1])


def _dequantizes(expression: Expression) -> bool:
    return isinstance(expression, Dequantize | DequantizePacked) or any(
        _dequantizes(item) for item in expression.inputs
    )


def _cast(x: Expression, to: str) -> Expression:
    """Cast of a simplified expression."""
    if x.dtype == to:
        return x
    if isinstance(x, Cast) and x.to in _EXACT_IN.get(x.x.dtype, ()):
        return _cast(x.x, to)
    if isinstance(x, Concat | Stack):
        return replace(x, parts=tuple(_cast(part, to) for part in x.parts))
    if isinstance(x, Reshape):
        return replace(x, x=_cast(x.x, to))
    return Cast(x, to)


def _reshape(x: Expression, to: tuple[int, ...]) -> Expression:
    if isinstance(x, Reshape):
        x = x.x
    return x if x.shape == to else Reshape(x, to)


def _quantize(expression: Quantize) -> Expression:
    x = simplify(expression.x)
    if isinstance(x, Stack):
        return replace(x, parts=tuple(_quantize(replace(expression, x=part)) for part in x.parts))
    format_ = expression.parsed
    if format_.kind in ("fp32", "bf16"):
        return _quantize_plain(x, expression)
    if format_.kind == "wint4" and isinstance(x, Concat) and any(isinstance(p, DequantizePacked) for p in x.parts):
        return replace(x, parts=tuple(_quantize(replace(expression, x=part)) for part in x.parts))
    if format_.kind == "fp8" and isinstance(x, Concat) and _on_block_borders(x):
        parts = tuple(_quantize(replace(expression, x=part)) for part in x.parts)
        if any(not isinstance(part, Quantize) for part in parts):
            return replace(x, parts=parts)
    if format_.kind == "fp8" and isinstance(x, Dequantize) and x.block == (128, 128):
        return x.x if expression.part == "data" else _cast(x.scales, "float32")
    return replace(expression, x=x)


def _quantize_plain(x: Expression, expression: Quantize) -> Expression:
    """fp32 and bf16: a cast where that loses nothing, else a Quantize, whose error is then measured."""
    if isinstance(x, Concat):
        return replace(x, parts=tuple(_quantize_plain(part, expression) for part in x.parts))
    cast = _cast(x, expression.dtype)
    return replace(expression, x=x) if _rounds(cast) else cast


def _rounds(expression: Expression) -> bool:
    """Whether a cast in it may lose digits."""
    if isinstance(expression, Cast) and expression.to not in _EXACT_IN.get(expression.x.dtype, ()):
        return True
    return isinstance(expression, Unary) and _rounds(expression.x)


def _on_block_borders(x: Concat) -> bool:
    """Whether quantizing the parts is quantizing the whole: every part but the last fills its blocks of 128 rows."""
    return all(part.shape[0] % 128 == 0 for part in x.parts[:-1])
