"""Weights from disk to the device: files read in pieces by several threads into pinned memory, copied while others are read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from dsc.runtime.errors import DscError
from dsc.runtime.manifest import TensorEntry

PIECE_BYTES = 64 << 20
NUM_READERS = 8


@dataclass(frozen=True)
class LoadedFiles:
    """Every file as one block of device memory, and how long that took."""

    blocks: dict[str, torch.Tensor]
    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class _Piece:
    """Bytes of a file from `offset` on, and the memory on the device that they go to."""

    path: Path
    offset: int
    target: torch.Tensor


def load_files(root: Path, names: Iterable[str], device: torch.device) -> LoadedFiles:
    """Copy files of `root` to the device whole. Raises DscError for a file that is cut or cannot be read."""
    begin = time.monotonic()
    sizes = {name: (root / name).stat().st_size for name in names}
    blocks = {name: torch.empty(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}
    _move([piece for name, block in blocks.items() for piece in _pieces(root / name, 0, block)], device)
    return LoadedFiles(blocks, sum(sizes.values()), time.monotonic() - begin)


def load_tensors(root: Path, entries: Mapping[str, TensorEntry], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy some tensors of an engine to the device, each flat and in memory of its own. Raises DscError as `load_files`."""
    blocks = {name: torch.empty(entry.bytes, dtype=torch.uint8, device=device) for name, entry in entries.items()}
    pieces = [
        piece for name, entry in entries.items() for piece in _pieces(root / entry.file, entry.offset, blocks[name])
    ]
    _move(pieces, device)
    return {name: blocks[name].view(getattr(torch, entry.dtype)) for name, entry in entries.items()}


def _pieces(path: Path, offset: int, block: torch.Tensor) -> list[_Piece]:
    return [
        _Piece(path, offset + start, block[start : start + PIECE_BYTES]) for start in range(0, len(block), PIECE_BYTES)
    ]


def _move(pieces: Sequence[_Piece], device: torch.device) -> None:
    readers = max(1, min(NUM_READERS, len(pieces)))
    largest = max((len(piece.target) for piece in pieces), default=1)
    free: SimpleQueue[torch.Tensor] = SimpleQueue()
    for _ in range(readers):
        free.put(torch.empty(largest, dtype=torch.uint8, pin_memory=True))

    def move(piece: _Piece) -> None:
        pinned = free.get()
        try:
            size = len(piece.target)
            _read(piece, pinned[:size])
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                piece.target.copy_(pinned[:size], non_blocking=True)
            stream.synchronize()
        finally:
            free.put(pinned)

    with ThreadPoolExecutor(readers) as pool:
        for _ in pool.map(move, pieces):
            pass
    torch.cuda.synchronize(device)


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
