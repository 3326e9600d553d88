"""The header of a safetensors file, read and checked before any of its data is trusted.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, then the tensors without gaps).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from dsc.runtime.errors import DscError

# name in a header -> torch's name, bytes of one element
DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
LFS_POINTER = b"version https://git-lfs"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class TensorInfo(NamedTuple):
    """One stored tensor: torch's dtype name, shape, its file, and where its bytes lie in it (from the file's start)."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a file by name; raises DscError where the file is a pointer, is cut short or contradicts itself."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start + file.read(len(LFS_POINTER) - 8) == LFS_POINTER:
            wanted = "the file itself, a safetensors shard"
            raise DscError(
                "is a git-lfs pointer", where=str(path), wanted=wanted, got=f"{size} bytes", try_="git lfs pull"
            )
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > MAX_HEADER_BYTES or length < 2:
            raise DscError("is not a safetensors file", where=str(path), got=f"it begins with {start!r}")
        if length > size - 8:
            raise _cut_short(path, 8 + length, size)
        file.seek(8)
        header = _parse(path, file.read(length))
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice")
        return found

    try:
        header = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DscError("has a header that is not valid JSON", where=str(path), got=str(error)) from error
    if not isinstance(header, dict):
        raise DscError("has a header that is not a JSON object", where=str(path))
    header.pop("__metadata__", None)
    return header


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    fields = entry if isinstance(entry, dict) else {}
    code, shape, offsets = fields.get("dtype"), _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if not isinstance(code, str) or shape is None or offsets is None or len(offsets) != 2:
        raise DscError(f"tensor {name} is not described", where=str(path), got=json.dumps(entry)[:80])
    if code not in DTYPES:
        raise DscError(f"tensor {name} has the unknown dtype {code}", where=str(path), wanted=", ".join(DTYPES))
    dtype, itemsize = DTYPES[code]
    nbytes = math.prod(shape) * itemsize
    if offsets[1] - offsets[0] != nbytes:
        wanted = f"{nbytes} bytes for {dtype} {list(shape)}"
        raise DscError(
            f"tensor {name} contradicts itself", where=str(path), wanted=wanted, got=f"offsets {list(offsets)}"
        )
    return TensorInfo(dtype, shape, path, data_start + offsets[0], nbytes)


def _counts(value: Any) -> tuple[int, ...] | None:
    """A list of whole numbers as a tuple, None for anything else."""
    if isinstance(value, list) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    return None


def _check_layout(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """The tensors must fill the data exactly: no overlap, no gap, nothing missing at the end."""
    end, last = data_start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != end:
            fault = "overlaps" if info.offset < end else "leaves a gap after"
            raise DscError(
                f"tensor {name} {fault} {last}", where=str(path), wanted=f"byte {end}", got=f"byte {info.offset}"
            )
        end, last = info.offset + info.nbytes, name
    if size < end:
        raise _cut_short(path, end, size)
    if size > end:
        raise DscError("has bytes that no tensor claims", where=str(path), wanted=f"{end} bytes", got=f"{size} bytes")


def _cut_short(path: Path, wanted: int, size: int) -> DscError:
    return DscError(
        "is cut short", where=str(path), wanted=f"{wanted} bytes", got=f"{size} bytes", try_="download it again"
    )
