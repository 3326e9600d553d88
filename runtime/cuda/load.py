"""Weights from disk to the device: files read in pieces by several threads into pinned memory, copied while others are read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from dsc.runtime.errors import DscError

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
    path: Path
    name: str
    offset: int
    size: int


def load_files(root: Path, names: Iterable[str], device: torch.device) -> LoadedFiles:
    """Copy files of `root` to the device whole. Raises DscError for a file that is cut or cannot be read."""
    begin = time.monotonic()
    sizes = {name: (root / name).stat().st_size for name in names}
    blocks = {name: torch.empty(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}
    pieces = [
        _Piece(root / name, name, offset, min(PIECE_BYTES, size - offset))
        for name, size in sizes.items()
        for offset in range(0, size, PIECE_BYTES)
    ]
    readers = max(1, min(NUM_READERS, len(pieces)))
    free: SimpleQueue[torch.Tensor] = SimpleQueue()
    for _ in range(readers):
        free.put(torch.empty(min(PIECE_BYTES, max(sizes.values(), default=1)), dtype=torch.uint8, pin_memory=True))

    def move(piece: _Piece) -> None:
        pinned = free.get()
        try:
            _read(piece, pinned)
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                target = blocks[piece.name][piece.offset : piece.offset + piece.size]
                target.copy_(pinned[: piece.size], non_blocking=True)
            stream.synchronize()
        finally:
            free.put(pinned)

    with ThreadPoolExecutor(readers) as pool:
        for _ in pool.map(move, pieces):
            pass
    torch.cuda.synchronize(device)
    return LoadedFiles(blocks, sum(sizes.values()), time.monotonic() - begin)


def _read(piece: _Piece, into: torch.Tensor) -> None:
    view = memoryview(into.numpy().data)[: piece.size]
    handle = os.open(piece.path, os.O_RDONLY)
    try:
        done = 0
        while done < piece.size:
            got = os.preadv(handle, [view[done:]], piece.offset + done)
            if got == 0:
                raise DscError("ends too early", where=str(piece.path), got=f"{piece.offset + done} bytes")
            done += got
    finally:
        os.close(handle)
