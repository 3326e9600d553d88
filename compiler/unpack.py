"""Codes, zeros and scales of packed matrices, some rows at a time.

Where a matrix is stored with its columns first, rows of it are columns of what is stored: that is read through in blocks, so
no more of it is in memory than a block, and the same rows come of it whatever the blocks.

Legend: N rows, K columns of a matrix; G groups of columns that share a scale and a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dsc.compiler.ir.weight import DequantizePacked, Expression, Source
from dsc.compiler.packing import LAYOUTS
from dsc.runtime.spec import Packing

Rows = tuple[int, int]  # first and one past the last along the leading axis
Read = Callable[[str, slice | None], torch.Tensor]  # a source tensor, or some of its rows; nobody writes into it

BLOCK_BYTES = 1 << 22  # of words read together where columns are stored first


class AmbiguousZeroError(ValueError):
    """Implementations read a stored zero differently."""


@dataclass(frozen=True)
class Packed:
    """Some rows of a packed matrix.

    codes   uint8 [N, K]
    zeros   float32 [N, G], or one number for all
    scales  [N, G] as stored
    group   columns of a group
    """

    codes: torch.Tensor
    zeros: torch.Tensor | int
    scales: torch.Tensor
    group: int

    def dequantize(self) -> torch.Tensor:
        """(codes - zeros) * scales, float32 [N, K]: the differences are exact, each product is rounded once."""
        values = self.codes.to(torch.float32)
        scales = self.scales.to(torch.float32)
        for part, first, last in group_runs(values, self.group):
            if isinstance(self.zeros, int):
                part.sub_(self.zeros)
            else:
                part.sub_(self.zeros[:, first:last, None])
            part.mul_(scales[:, first:last, None])
        return values


def group_runs(x_NK: torch.Tensor, group: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Views [N, groups, columns] of whole groups and of the partial one behind them, with the numbers of their groups."""
    rows, columns = x_NK.shape
    whole = columns // group
    if whole:
        yield x_NK[:, : whole * group].view(rows, whole, group), 0, whole
    if columns % group:
        yield x_NK[:, whole * group :].unsqueeze(1), whole, whole + 1


def read_packed(x: DequantizePacked, read: Read, rows: Rows) -> Packed:
    """Rows of a packed matrix. Raises AmbiguousZeroError."""
    zeros = read_zeros(x, read, rows)
    packing = x.packing
    return Packed(
        codes=_codes(x, read, rows),
        zeros=packing.middle if zeros is None else zeros.to(torch.float32),
        scales=_of_rows(x.scales, read, rows, LAYOUTS[packing.method].turned),
        group=packing.group or x.shape[1],
    )


def read_zeros(x: DequantizePacked, read: Read, rows: Rows) -> torch.Tensor | None:
    """Zeros of some rows, int16 [N, G]; None where none are stored. Raises AmbiguousZeroError."""
    if x.zeros is None:
        return None
    layout, packing = LAYOUTS[x.packing.method], x.packing
    codes = 32 // packing.bits
    first, last = rows[0] // codes, -(-rows[1] // codes)
    words = _of_rows(x.zeros, read, (first, last), layout.turned)  # [words, G]
    stored = unpack(words.mT, packing.bits, layout.order)[:, rows[0] - first * codes : rows[1] - first * codes]
    if packing.zero_offset and stored.numel() and int(stored.max()) == (1 << packing.bits) - 1:
        _refuse_largest(packing)
    return stored.mT.to(torch.int16) + packing.zero_offset


def unpack(words: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """int32 [..., W] -> the codes of each word, lowest bits first or in `order`, uint8 [..., W * 32 / bits]."""
    codes = _bytes(words).flatten(-2)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return codes.view(*codes.shape[:-1], -1, len(order))[..., list(order)].flatten(-2) if order else codes


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., W] -> uint8 [..., W, 4], freshly made: what counts as contiguous may have any stride along axes of one."""
    copied = words.clone(memory_format=torch.contiguous_format)
    return copied.view(torch.uint8).view(*words.shape, 4)


def _codes(x: DequantizePacked, read: Read, rows: Rows) -> torch.Tensor:
    """uint8 [N, K]."""
    layout, bits, columns = LAYOUTS[x.packing.method], x.packing.bits, x.shape[1]
    codes = 32 // bits
    if not layout.turned:
        return unpack(_stored_rows(x.x, read, rows), bits)[:, :columns]
    if layout.by_rows:
        return _codes_by_rows(x, read, rows)
    found = torch.empty((rows[1] - rows[0], columns), dtype=torch.uint8)
    for start, words in _blocks(x.x, read):  # [columns / codes, N]
        block = unpack(words[:, rows[0] : rows[1]].mT, bits)
        found[:, start * codes : (start + len(words)) * codes] = block[:, : columns - start * codes]
    return found


def _codes_by_rows(x: DequantizePacked, read: Read, rows: Rows) -> torch.Tensor:
    """uint8 [N, K] from words [K, N / 8], which hold 4-bit codes of eight rows."""
    assert x.packing.bits == 4, x.packing
    first, last = rows[0] // 8, -(-rows[1] // 8)
    found = torch.empty((last - first, 8, x.shape[1]), dtype=torch.uint8)
    for start, words in _blocks(x.x, read):
        stored = _bytes(words[:, first:last].mT)
        for row, place in enumerate(LAYOUTS[x.packing.method].order):
            out, byte = found[:, row, start : start + len(words)], stored[..., place // 2]
            if place % 2:
                torch.bitwise_right_shift(byte, 4, out=out)
            else:
                torch.bitwise_and(byte, 15, out=out)
    return found.flatten(0, 1)[rows[0] - first * 8 : rows[1] - first * 8]


def _blocks(words: Expression, read: Read) -> Iterator[tuple[int, torch.Tensor]]:
    """All rows of stored words, some together."""
    assert isinstance(words, Source), words
    step = max(BLOCK_BYTES // (words.shape[1] * 4), 1)
    for start in range(0, words.shape[0], step):
        yield start, read(words.name, slice(start, min(start + step, words.shape[0])))


def _of_rows(x: Expression, read: Read, rows: Rows, turned: bool) -> torch.Tensor:
    """Rows of a small tensor that may be stored with its columns first."""
    if not turned:
        return _stored_rows(x, read, rows)
    assert isinstance(x, Source), x
    return read(x.name, None)[:, rows[0] : rows[1]].mT


def _stored_rows(x: Expression, read: Read, rows: Rows) -> torch.Tensor:
    assert isinstance(x, Source), x
    return read(x.name, None if rows == (0, x.shape[0]) else slice(*rows))


def _refuse_largest(packing: Packing) -> None:
    """GPTQ's first format stores a zero less one, and 0 as all bits: kernels add 1 to it, converters let it overflow."""
    most = (1 << packing.bits) - 1
    raise AmbiguousZeroError(f"a stored zero of {most}, which some implementations read as {most + 1} and others as 0")
