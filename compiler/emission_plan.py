"""What emission does, before a byte is read: which bytes of which file come of which source tensors, and in which order.

The layout follows from names, dtypes and shapes; the work goes through the source files in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dsc.compiler.ir.simplify import segments, simplify
from dsc.compiler.ir.splits import EXPERT_MAP
from dsc.compiler.ir.weight import Dequantize, DequantizePacked, Expression, Placement, Quantize, Source, WeightValues
from dsc.compiler.safetensors_layout import FileLayout, lay_out

FILE_BYTES_MAX = 4 << 30
Position = Callable[[str], Any]  # where a source tensor lies: values that sort as the bytes do
Store = Callable[[str, Expression], Expression]


@dataclass(frozen=True)
class Target:
    """A stored part of a segment: the tensor it belongs to, the byte of it where the part begins, what it holds."""

    tensor: str
    offset: int
    expression: Expression


@dataclass(frozen=True)
class Job:
    """A segment of a weight, with where its parts ("data", "scales") go: what is done at once, or not at all."""

    weight: str
    targets: Mapping[str, Target]

    @property
    def segment(self) -> Expression:
        return next(iter(self.targets.values())).expression

    @property
    def sources(self) -> list[Source]:
        """The tensors it reads, each once."""
        return list(dict.fromkeys(self.segment.sources()))

    @property
    def source_bytes(self) -> int:
        return sum(source.nbytes for source in self.sources)


@dataclass(frozen=True)
class EmissionPlan:
    """Files, and the jobs that fill them, in the order of the work.

    weights  stored tensors by name, as graphs have them
    groups   stored tensors of each weight: its data, then its scales
    """

    weights: Mapping[str, WeightValues]
    groups: Mapping[str, Sequence[str]]
    layouts: Sequence[FileLayout]
    jobs: Sequence[Job]

    @property
    def source_bytes(self) -> int:
        """What is read; a source of two weights counts twice."""
        return sum(job.source_bytes for job in self.jobs)

    @property
    def file_bytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts)

    @cached_property
    def placements(self) -> dict[str, Placement]:
        return {s.name: Placement(layout.location, s.offset, s.nbytes) for layout in self.layouts for s in layout.slots}

    @property
    def identity(self) -> str:
        """Differs where any byte may: of the layout, of the jobs or their order."""
        digest = hashlib.sha256()
        for layout in self.layouts:
            digest.update(layout.location.encode() + layout.header)
        for job in self.jobs:
            digest.update(repr(job).encode())
        return digest.hexdigest()


def plan_emission(
    weights: Mapping[str, WeightValues],
    *,
    position: Position | None = None,
    store: Store = lambda name, expression: simplify(expression),
    file_bytes_max: int = FILE_BYTES_MAX,
    prefix: str = "weights/rank0",
    prefix_of_ranks: str = "weights/ranks",
) -> EmissionPlan:
    """Plan `{prefix}-00001.safetensors`, ... and `{prefix_of_ranks}-00001.safetensors` for what several ranks need besides:
    so the other files are the same on any number of ranks.

    position  without it, sources lie in the order of their first use
    store     what is evaluated for a stored tensor, by its name and its weight's expression
    """
    position = position or _order_of_use(weights.values())
    groups = group_parts(weights)
    bases = sorted(groups, key=lambda base: (_first(weights[groups[base][0]].expression, position), base))
    names = [name for base in bases for name in groups[base]]
    stored = {name: store(name, weights[name].expression) for name in names}
    layouts = []
    for of_ranks, start in ((False, prefix), (True, prefix_of_ranks)):
        held = [name for name in names if (name == EXPERT_MAP) == of_ranks]
        layouts += lay_out([(name, stored[name].dtype, stored[name].shape) for name in held], start, file_bytes_max)
    jobs = [job for base in bases for job in _jobs(base, {name: stored[name] for name in groups[base]}, weights)]
    jobs.sort(key=lambda job: _first(job.segment, position))
    return EmissionPlan(weights, {base: groups[base] for base in bases}, layouts, jobs)


def group_parts(weights: Mapping[str, WeightValues]) -> dict[str, list[str]]:
    """Tensors by the weight they store: `base.weight` -> its data, then its scales."""
    groups: dict[str, list[str]] = {}
    for name, values in weights.items():
        quantized = isinstance(values.expression, Quantize)
        groups.setdefault(f"{name.rpartition('.')[0]}.weight" if quantized else name, []).append(name)
    for names in groups.values():
        names.sort(key=lambda name: name.endswith(".scales"))
    return groups


def _order_of_use(weights: Iterable[WeightValues]) -> Position:
    names = (source.name for values in weights for source in values.expression.sources())
    return {name: index for index, name in enumerate(dict.fromkeys(names))}.__getitem__


def _first(expression: Expression, position: Position) -> tuple[Any, ...]:
    """Sorts by where the first bulk of data is read from; tables, which read nothing, come first of all."""
    return min(((position(source.name),) for source in _bulk(expression)), default=())


def _bulk(expression: Expression) -> Iterator[Source]:
    """Sources but for the scales and zeros beside codes, which are small and may lie in any other shard."""
    if isinstance(expression, Source):
        yield expression
    for item in expression.inputs[:1] if isinstance(expression, Dequantize | DequantizePacked) else expression.inputs:
        yield from _bulk(item)


def _jobs(base: str, stored: Mapping[str, Expression], weights: Mapping[str, WeightValues]) -> Iterator[Job]:
    """Segments of a weight. What must be rounded is one job for all its parts; what is passed is a job for each part."""
    rounded: dict[int, dict[str, Target]] = {}
    for name, expression in stored.items():
        quantize_ = weights[name].expression
        part = quantize_.part if isinstance(quantize_, Quantize) else "data"
        # Data and scales are cut alike, so a segment to be rounded has the same number in both.
        number = 0
        for offset, segment in segments(expression):
            target = Target(name, offset, segment)
            if isinstance(segment, Quantize):
                rounded.setdefault(number, {})[part] = target
                number += 1
            else:
                yield Job(base, {part: target})
    for targets in rounded.values():
        yield Job(base, targets)
