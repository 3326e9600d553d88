"""Which part of a stored tensor a rank has.

An engine stores every weight once, whole, for all its ranks: each reads its part when it loads. So shards put together
are the whole, bit for bit, and the weights of an engine are the same bytes on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Axis = Literal["tensor", "expert", "width"]


@dataclass(frozen=True)
class Cut:
    """Along `axis` of a tensor a rank has `size` elements, those of its place along `by`, and the last `kept` elements.

    by    tensor: heads, widths of MLPs and the vocabulary; expert: experts; width: the width of each expert
    size  elements of one rank. Beyond the end of the tensor, before what is kept, a rank has zeros
    """

    axis: int
    by: Axis
    size: int
    kept: int = 0


@dataclass(frozen=True)
class Place:
    """One rank of `tensor` ranks. Experts are spread over `expert` groups of ranks that follow each other, and each
    expert's width over the ranks of a group."""

    rank: int
    tensor: int
    expert: int

    def index(self, by: Axis) -> int:
        """The rank's number along an axis."""
        group = self.tensor // self.expert
        return {"tensor": self.rank, "expert": self.rank // group, "width": self.rank % group}[by]


ALONE = Place(rank=0, tensor=1, expert=1)


@dataclass(frozen=True)
class Span:
    """Elements `start` to `stop` along an axis of a stored tensor."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def shard_shape(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """The shape of a rank's part of a tensor."""
    found = list(shape)
    for cut in cuts:
        found[cut.axis] = cut.size + cut.kept
    return tuple(found)


def cut_faults(shape: Sequence[int], cuts: Sequence[Cut], tensor: int, expert: int) -> Iterator[str]:
    """Why cuts leave no parts of a tensor for `tensor` ranks and `expert` groups of them: a line for each reason."""
    ways = {"tensor": tensor, "expert": expert, "width": tensor // expert}
    seen = set()
    for cut in cuts:
        told = f"axis {cut.axis} by {cut.by}"
        if not 0 <= cut.axis < len(shape):
            yield f"{told}: there are {len(shape)} axes"
        elif cut.axis in seen:
            yield f"{told}: the axis is cut twice"
        elif cut.size < 1 or not 0 <= cut.kept < shape[cut.axis]:
            yield f"{told}: no part has {cut.size} elements and {cut.kept} kept of {shape[cut.axis]}"
        elif cut.size * ways[cut.by] < shape[cut.axis] - cut.kept:
            yield f"{told}: {ways[cut.by]} x {cut.size} elements do not cover {shape[cut.axis] - cut.kept}"
        seen.add(cut.axis)


def spans(length: int, cut: Cut, place: Place) -> tuple[tuple[Span, ...], int]:
    """What a rank has along a cut axis of `length` elements: spans of the tensor one after another, and how many zeros
    stand behind the first of them."""
    end = length - cut.kept
    start = min(place.index(cut.by) * cut.size, end)
    own = Span(start, min(start + cut.size, end))
    return (own, Span(end, length)) if cut.kept else (own,), cut.size - len(own)


def take(whole: torch.Tensor, cuts: Sequence[Cut], place: Place) -> torch.Tensor:
    """A rank's part of a stored tensor; a view where that is possible."""
    part = whole
    for cut in cuts:
        parts, zeros = spans(whole.shape[cut.axis], cut, place)
        taken = [part.narrow(cut.axis, span.start, len(span)) for span in parts]
        if zeros:
            shape = [*part.shape]
            shape[cut.axis] = zeros
            taken.insert(1, part.new_zeros(shape))
        part = taken[0] if len(taken) == 1 else _join(taken, cut.axis)
    return part


def _join(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    shape = [*parts[0].shape]
    shape[axis] = sum(part.shape[axis] for part in parts)
    joined = parts[0].new_empty(shape)
    start = 0
    for part in parts:
        joined.narrow(axis, start, part.shape[axis]).copy_(part)
        start += part.shape[axis]
    return joined
