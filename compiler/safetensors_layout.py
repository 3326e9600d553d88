"""Lay tensors out in safetensors files: data from byte 4096, every tensor at a multiple of 64, gaps filled by `_pad.N`.

The place of everything follows from names, dtypes and shapes, before a byte of data exists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dsc.compiler.ir.weight import DTYPE_BYTES

PAGE = 4096
ALIGNMENT = 64
OWN_FILE_BYTES = 256 << 20
# Names of dtypes in a safetensors header.
_NAMES = {
    "float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "int32": "I32", "int64": "I64", "uint8": "U8",
    "int8": "I8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """A tensor and the byte of the file where its data begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class FileLayout:
    """One file: its path in the engine, its header as written, its tensors in the order of their bytes, its size."""

    location: str
    header: bytes
    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        last = self.slots[-1]
        return last.offset + last.nbytes


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]], prefix: str, file_bytes_max: int) -> list[FileLayout]:
    """Place (name, dtype, shape) in this order in files `{prefix}-00001.safetensors`, ...

    file_bytes_max  of a file's data
    A tensor of OWN_FILE_BYTES or more has a file for itself: the stacked experts of a layer are written side by side, and
    so each of their files can be hashed as it grows.
    """
    return [
        _file(f"{prefix}-{number:05d}.safetensors", slots)
        for number, slots in enumerate(_split(tensors, file_bytes_max), 1)
    ]


def _split(tensors: Iterable[tuple[str, str, tuple[int, ...]]], file_bytes_max: int) -> Iterator[list[Slot]]:
    """Slots of each file, offsets counted from where its data begins."""
    slots: list[Slot] = []
    end = 0
    for name, dtype, shape in tensors:
        slot = Slot(name, dtype, shape, 0)
        if slot.nbytes >= min(OWN_FILE_BYTES, file_bytes_max):
            yield [slot]
            continue
        slot = replace(slot, offset=-(-end // ALIGNMENT) * ALIGNMENT)
        if slots and slot.offset + slot.nbytes > file_bytes_max:
            yield slots
            slots, slot = [], replace(slot, offset=0)
        slots.append(slot)
        end = slot.offset + slot.nbytes
    if slots:
        yield slots


def _file(location: str, slots: list[Slot]) -> FileLayout:
    entries: dict[str, object] = {}
    end = pads = 0
    for slot in slots:
        if slot.offset > end:
            entries[f"_pad.{pads}"] = _entry("uint8", (slot.offset - end,), end, slot.offset)
            pads += 1
        end = slot.offset + slot.nbytes
        entries[slot.name] = _entry(slot.dtype, slot.shape, slot.offset, end)
    text = json.dumps(entries, separators=(",", ":")).encode()
    begin = -(-(8 + len(text)) // PAGE) * PAGE
    header = (begin - 8).to_bytes(8, "little") + text.ljust(begin - 8)
    placed = tuple(Slot(slot.name, slot.dtype, slot.shape, begin + slot.offset) for slot in slots)
    return FileLayout(location, header, placed)


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, object]:
    return {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
