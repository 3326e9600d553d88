"""How weights are cut for conversion and how many threads convert them: what emission does, and what plans reckon with.

Threads wait for Python's lock between pieces, so that small ones keep each other waiting; a piece's memory is a thread's.
"""

from __future__ import annotations

import os
from typing import NamedTuple

# Elements of a piece.
COPIED_ELEMENTS = 1 << 21  # of what is stored as it is
FP8_ELEMENTS = 1 << 21  # of what becomes fp8
INTEGER_ELEMENTS = 1 << 22  # of what becomes wint4 or wint8
RUN_ELEMENTS = 1 << 18  # of what becomes bf16 or fp32
INTEGERS = ("wint4", "wint8")
FP8_ROWS = 128  # that share scales
# Of memory for one element of a piece, at most: the values, what quantizers make of them, and the stored bytes.
PIECE_BYTES, INTEGER_PIECE_BYTES = 40, 24
HELD_BYTES = 1 << 24  # words of a packed matrix with its columns first that are held for all its pieces, at most
THREAD_BYTES = 8 << 20  # of a thread, beside a piece and what is made of it
SLACK_BYTES = 64 << 20  # what comes and goes beside the pieces
THREADS_MAX = 8  # more wait for Python's lock


class Piece(NamedTuple):
    """Elements worked on together, of whole rows and a multiple of `alike` rows; bytes of memory for one element."""

    elements: int
    alike: int
    element_bytes: int


def piece(kind: str | None, turned: bool = False) -> Piece:
    """How a matrix is cut that becomes a kind of format; None: it is stored as it is.

    turned  its source is stored with its columns first, and all of it is read for a piece: fewer, larger ones
    """
    if turned and kind not in INTEGERS:
        return Piece(INTEGER_ELEMENTS, FP8_ROWS if kind == "fp8" else 1, PIECE_BYTES)
    if kind is None:
        return Piece(COPIED_ELEMENTS, 1, PIECE_BYTES)
    if kind in INTEGERS:
        return Piece(INTEGER_ELEMENTS, 1, INTEGER_PIECE_BYTES)
    if kind == "fp8":
        return Piece(FP8_ELEMENTS, FP8_ROWS, PIECE_BYTES)
    return Piece(RUN_ELEMENTS, 1, PIECE_BYTES)


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_wanted(cores: int | None = None) -> int:
    """One more than there are cores (None: here): one waits for the disk or for the lock."""
    return min((cores_here() if cores is None else cores) + 1, THREADS_MAX)
