"""Where a rank's part of a stored tensor lies in the engine's files, and how it comes out of the bytes read from there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsc.runtime.manifest import TensorEntry
from dsc.runtime.program import DTYPE_BYTES
from dsc.runtime.shards import Cut, Place, shard_shape, spans, take

RUN_BYTES = 256 << 10  # longer runs of a part are read by themselves, shorter ones with what lies between them
ROWS_BYTES = 16 << 20  # read at once to pick runs out of it


@dataclass(frozen=True)
class Run:
    """`bytes` bytes that follow each other: from `start` of what is read, to `target` of what a rank has."""

    start: int
    target: int
    bytes: int


@dataclass(frozen=True)
class Read:
    """`rows` rows of `row_bytes` at `offset` of a file; the runs of each row make up `part_bytes` at `target` of a part.

    runs  places within a row, and within the part's row
    What no run writes stays: it is zero.
    """

    offset: int
    target: int
    rows: int
    row_bytes: int
    part_bytes: int
    runs: tuple[Run, ...]

    @property
    def bytes(self) -> int:
        """Bytes read."""
        return self.rows * self.row_bytes

    @property
    def whole(self) -> bool:
        """Whether the bytes go to the part as they are read."""
        return self.runs == (Run(0, 0, self.row_bytes),) and self.part_bytes == self.row_bytes


@dataclass(frozen=True)
class Part:
    """What a rank has of one stored tensor; `reads` brings it, `padded` where the rest is zeros."""

    entry: TensorEntry
    cuts: tuple[Cut, ...]
    place: Place

    @property
    def bytes(self) -> int:
        return math.prod(shard_shape(self.entry.shape, self.cuts)) * DTYPE_BYTES[self.entry.dtype]

    def padded(self) -> bool:
        """Whether the part has zeros that the tensor has not: the tensor ends within it."""
        return any(spans(self.entry.shape[cut.axis], cut, self.place)[1] for cut in self.cuts)

    def reads(self) -> Iterator[Read]:
        """Everything to read for the part, every byte of it once."""
        if not self.cuts:
            yield from _direct(self.entry.offset, 0, self.entry.bytes)
            return
        *_, last = sorted(self.cuts, key=lambda cut: cut.axis)
        shape, axis = self.entry.shape, last.axis
        step = math.prod(shape[axis + 1 :]) * DTYPE_BYTES[self.entry.dtype]
        row_bytes, part_bytes = shape[axis] * step, (last.size + last.kept) * step
        runs = tuple(self._runs(last, step))
        if not runs:  # the tensor ends before
            return
        for part_row, row, count in self._rows(last):
            offset, target = self.entry.offset + row * row_bytes, part_row * part_bytes
            if count == 1 or min(run.bytes for run in runs) >= RUN_BYTES:
                for i in range(count):
                    for run in runs:
                        at = offset + i * row_bytes + run.start
                        yield from _direct(at, target + i * part_bytes + run.target, run.bytes)
                continue
            most = max(1, ROWS_BYTES // row_bytes)
            for i in range(0, count, most):
                rows = min(most, count - i)
                yield Read(offset + i * row_bytes, target + i * part_bytes, rows, row_bytes, part_bytes, runs)

    def _runs(self, cut: Cut, step: int) -> Iterator[Run]:
        """Of a row along the last axis that is cut, whose elements are `step` bytes apart."""
        own, zeros = spans(self.entry.shape[cut.axis], cut, self.place)
        target = 0
        for i, span in enumerate(own):
            if len(span):
                yield Run(span.start * step, target * step, len(span) * step)
            target += len(span) + (zeros if i == 0 else 0)

    def _rows(self, last: Cut) -> Iterator[tuple[int, int, int]]:
        """Rows of the part that follow each other in the tensor too: the first one there and here, and how many."""
        lead = self.entry.shape[: last.axis]
        numbers = torch.arange(1, math.prod(lead) + 1).view(lead)  # 0 is a row of zeros
        taken = take(numbers, [cut for cut in self.cuts if cut is not last], self.place).reshape(-1)
        starts = torch.nonzero(torch.cat([torch.tensor([True]), taken.diff() != 1])).flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(taken)], strict=True):
            first = int(taken[start])
            if first:
                yield start, first - 1, end - start
            elif end - start > 1:  # the zeros before the tensor's first row
                yield start + 1, 0, end - start - 1


def _direct(offset: int, target: int, count: int) -> Iterator[Read]:
    if count:
        yield Read(offset, target, 1, count, count, (Run(0, 0, count),))
