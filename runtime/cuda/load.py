"""Weights from disk to the device: files read in pieces by several threads into pinned memory, copied while others are read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from dsc.runtime.cuda.parts import Part, Read
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import TensorEntry

PIECE_BYTES = 64 << 20
NUM_READERS = 8
ALIGN = 256  # bytes, of a part's place on the device
GAP_BYTES = 64 << 10  # between what is read at once: less than a read of its own costs


@dataclass(frozen=True)
class Loaded:
    """Device memory by the name it was asked for under, flat, and how long that took."""

    tensors: dict[str, torch.Tensor]
    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class _Copy:
    """What goes to `target`: bytes of a piece from `start` on as they are, or the runs of the rows of `read`."""

    start: int
    target: torch.Tensor
    read: Read | None = None

    def put(self, piece: torch.Tensor, packed: torch.Tensor) -> None:
        """Copy on the current stream; `packed` is memory for the part's rows."""
        if self.read is None:
            self.target.copy_(piece[self.start : self.start + len(self.target)], non_blocking=True)
            return
        rows = piece[: self.read.bytes].view(self.read.rows, self.read.row_bytes).numpy()
        packed = packed[: len(self.target)]
        into = packed.view(self.read.rows, self.read.part_bytes).numpy()
        if sum(run.bytes for run in self.read.runs) < self.read.part_bytes:
            into[:] = 0
        for run in self.read.runs:
            into[:, run.target : run.target + run.bytes] = rows[:, run.start : run.start + run.bytes]
        self.target.copy_(packed, non_blocking=True)

    @property
    def packed_bytes(self) -> int:
        return 0 if self.read is None else len(self.target)


@dataclass(frozen=True)
class _Piece:
    """`bytes` bytes of a file from `offset` on, and where they go."""

    path: Path
    offset: int
    bytes: int
    copies: tuple[_Copy, ...]

    @property
    def end(self) -> int:
        return self.offset + self.bytes


def load_files(root: Path, names: Iterable[str], device: torch.device) -> Loaded:
    """Copy files of `root` to the device, each whole, as bytes. Raises DscError for a file that is cut or cannot be read."""
    begin = time.monotonic()
    sizes = {name: (root / name).stat().st_size for name in names}
    blocks = {name: torch.empty(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}
    _move([piece for name, block in blocks.items() for piece in _pieces(root / name, 0, block)], device)
    return Loaded(blocks, sum(sizes.values()), time.monotonic() - begin)


def load_tensors(root: Path, entries: Mapping[str, TensorEntry], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy some tensors of an engine to the device, each flat and in memory of its own. Raises DscError as `load_files`."""
    blocks = {name: torch.empty(entry.bytes, dtype=torch.uint8, device=device) for name, entry in entries.items()}
    pieces = [
        piece for name, entry in entries.items() for piece in _pieces(root / entry.file, entry.offset, blocks[name])
    ]
    _move(pieces, device)
    return {name: blocks[name].view(getattr(torch, entry.dtype)) for name, entry in entries.items()}


def load_parts(root: Path, parts: Mapping[str, Part], device: torch.device) -> Loaded:
    """Copy a rank's parts of tensors to the device, into one block. Raises DscError as `load_files`."""
    begin = time.monotonic()
    block = torch.empty(parts_bytes(parts.values()), dtype=torch.uint8, device=device)
    pieces, found, at = [], {}, 0
    for name, part in parts.items():
        memory = block[at : at + part.bytes]
        at += _aligned(part.bytes)
        if part.padded():
            memory.zero_()
        pieces += [piece for read in part.reads() for piece in _pieces_of(read, root / part.entry.file, memory)]
        found[name] = memory.view(getattr(torch, part.entry.dtype))
    _move(list(_joined(pieces)), device)
    return Loaded(found, sum(part.bytes for part in parts.values()), time.monotonic() - begin)


def parts_bytes(parts: Iterable[Part]) -> int:
    """Device memory that parts take together."""
    return sum(_aligned(part.bytes) for part in parts)


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def _pieces(path: Path, offset: int, block: torch.Tensor) -> list[_Piece]:
    targets = [(start, block[start : start + PIECE_BYTES]) for start in range(0, len(block), PIECE_BYTES)]
    return [_Piece(path, offset + start, len(target), (_Copy(0, target),)) for start, target in targets]


def _pieces_of(read: Read, path: Path, memory: torch.Tensor) -> list[_Piece]:
    target = memory[read.target : read.target + read.rows * read.part_bytes]
    if read.whole:
        return _pieces(path, read.offset, target)
    return [_Piece(path, read.offset, read.bytes, (_Copy(0, target, read),))]


def _joined(pieces: Sequence[_Piece]) -> Iterator[_Piece]:
    """The pieces with those in one that lie beside each other in a file; rows that runs are picked from stay alone."""
    whole = [piece for piece in pieces if piece.copies[0].read is None]
    yield from (piece for piece in pieces if piece.copies[0].read is not None)
    held: list[_Piece] = []
    for piece in sorted(whole, key=lambda piece: (piece.path, piece.offset)):
        if held and not _fits_behind(held, piece):
            yield _join(held)
            held = []
        held.append(piece)
    if held:
        yield _join(held)


def _fits_behind(held: Sequence[_Piece], piece: _Piece) -> bool:
    near = held[-1].path == piece.path and 0 <= piece.offset - held[-1].end <= GAP_BYTES
    return near and piece.end - held[0].offset <= PIECE_BYTES


def _join(held: Sequence[_Piece]) -> _Piece:
    begin = held[0].offset
    copies = (_Copy(piece.offset - begin + copy.start, copy.target) for piece in held for copy in piece.copies)
    return _Piece(held[0].path, begin, held[-1].end - begin, tuple(copies))


def _move(pieces: Sequence[_Piece], device: torch.device) -> None:
    readers = max(1, min(NUM_READERS, len(pieces)))
    largest = max((piece.bytes for piece in pieces), default=1)
    packed_bytes = max((copy.packed_bytes for piece in pieces for copy in piece.copies), default=0)
    free: SimpleQueue[torch.Tensor] = SimpleQueue()
    for _ in range(readers):
        free.put(torch.empty(largest + packed_bytes, dtype=torch.uint8, pin_memory=True))
    torch.cuda.synchronize(device)  # what is zeroed is so before it is written

    def move(piece: _Piece) -> None:
        pinned = free.get()
        try:
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                _deliver(piece, pinned[:largest], pinned[largest:])
            stream.synchronize()
        finally:
            free.put(pinned)

    with ThreadPoolExecutor(readers) as pool:
        for _ in pool.map(move, pieces):
            pass
    torch.cuda.synchronize(device)


def _deliver(piece: _Piece, memory: torch.Tensor, packed: torch.Tensor) -> None:
    """Read a piece into `memory` and copy it to where it goes, on the current stream."""
    memory = memory[: piece.bytes]
    _read(piece, memory)
    for copy in piece.copies:
        copy.put(memory, packed)


def _read(piece: _Piece, into: torch.Tensor) -> None:
    """Fill `into` from the piece's place in its file."""
    view = memoryview(into.numpy().data)
    handle = os.open(piece.path, os.O_RDONLY)
    try:
        done = 0
        while done < len(view):
            got = os.preadv(handle, [view[done:]], piece.offset + done)
            if got == 0:
                raise DscError("ends too early", where=str(piece.path), got=f"{piece.offset + done} bytes")
            done += got
    finally:
        os.close(handle)
