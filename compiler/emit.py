"""Write the weights of an engine: every expression evaluated piece by piece and put where the layout says.

The layout follows from names, dtypes and shapes; the work goes through the source files in their order. Pieces know their
place, so neither threads nor order show in the bytes, and no more than a piece per thread is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsc.compiler.evaluate import Read, Rows, evaluate, row_blocks
from dsc.compiler.ir.graph import Graph, is_weight
from dsc.compiler.ir.simplify import segments, simplify, verdict
from dsc.compiler.ir.weight import Dequantize, Expression, Placement, Quantize, Source, WeightValues
from dsc.compiler.quantize import GRIDS, Errors, NotFiniteError, add_errors, quantize
from dsc.compiler.safetensors_layout import lay_out
from dsc.compiler.safetensors_writer import SafetensorsWriter
from dsc.compiler.weight_record import Outcome, WeightRecord, make_record
from dsc.runtime.errors import DscError

FILE_BYTES_MAX = 4 << 30
THREADS_MAX = 8  # each holds a piece, of up to 64 MiB in float32, and what is made of it
Position = Callable[[str], Any]  # where a source tensor lies: values that sort as the bytes do
Store = Callable[[str, Expression], Expression]
NAN_CODE = 0x7F  # of float8_e4m3fn, without its sign


@dataclass(frozen=True)
class Emission:
    """What was written: places and hashes of tensors by name, hashes of files by path in the engine, a record per weight."""

    placements: dict[str, Placement]
    tensor_sha256: dict[str, str]
    file_sha256: dict[str, str]
    weights: tuple[WeightRecord, ...]


@dataclass(frozen=True)
class Target:
    """A stored part of a segment: the tensor it belongs to, the byte of it where the part begins, what it holds."""

    tensor: str
    offset: int
    expression: Expression


@dataclass(frozen=True)
class Job:
    """A segment of a weight, with where its parts ("data", "scales") go."""

    weight: str
    targets: Mapping[str, Target]

    @property
    def segment(self) -> Expression:
        return next(iter(self.targets.values())).expression


def gather(graphs: Iterable[Graph]) -> dict[str, WeightValues]:
    """Every weight of some graphs once, in order of first use; one name means one expression everywhere."""
    found: dict[str, WeightValues] = {}
    for graph in graphs:
        for name, tensor in graph.weights().items():
            values: WeightValues = tensor._values
            known = found.setdefault(name, values)
            assert known.expression == values.expression, f"{graph.name}: {name} differs from another graph's"
    return found


def place(graphs: Iterable[Graph], placements: Mapping[str, Placement]) -> None:
    """Tell every weight constant of the graphs where its bytes lie, for ONNX external data."""
    for graph in graphs:
        for node in graph.nodes:
            for tensor in node.inputs:
                if is_weight(tensor):
                    tensor._values.placement = placements[tensor.name]


def emit(
    weights: Mapping[str, WeightValues],
    read: Read,
    folder: Path,
    *,
    position: Position | None = None,
    store: Store = lambda name, expression: simplify(expression),
    file_bytes_max: int = FILE_BYTES_MAX,
    prefix: str = "weights/rank0",
    threads: int = 1,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Emission:
    """Write weights into `{folder}/{prefix}-00001.safetensors`, ...

    read      source tensors, see `evaluate`
    threads   at most THREADS_MAX are used
    position  without it, sources lie in the order of their first use
    store     what is evaluated for a stored tensor, by its name and its weight's expression
    advance   is told the bytes of each piece as it is written
    raises    DscError naming a weight that holds NaN or infinity; OSError
    """
    position = position or _order_of_use(weights.values())
    groups = group_parts(weights)
    bases = sorted(groups, key=lambda base: (_first(weights[groups[base][0]].expression, position), base))
    names = [name for base in bases for name in groups[base]]
    stored = {name: store(name, weights[name].expression) for name in names}
    layouts = lay_out([(name, stored[name].dtype, stored[name].shape) for name in names], prefix, file_bytes_max)
    jobs = [job for base in bases for job in _jobs(base, {name: stored[name] for name in groups[base]}, weights)]
    jobs.sort(key=lambda job: _first(job.segment, position))
    with SafetensorsWriter(folder, layouts) as files:
        errors = _run(jobs, lambda job: _write(job, read, files, advance), threads)
        tensor_sha256, file_sha256 = files.finish(threads)
    placements = {s.name: Placement(layout.location, s.offset, s.nbytes) for layout in layouts for s in layout.slots}
    outcomes: dict[str, list[Outcome]] = {}
    for job, cost in zip(jobs, errors, strict=True):
        if "data" in job.targets:
            outcomes.setdefault(job.weight, []).append(Outcome(verdict(job.segment), cost))
    records = tuple(make_record(base, [weights[name] for name in groups[base]], outcomes[base]) for base in bases)
    return Emission(placements, tensor_sha256, file_sha256, records)


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
    """Sources but for the scales beside codes, which are small and may lie in any other shard."""
    if isinstance(expression, Source):
        yield expression
    for item in expression.inputs[:1] if isinstance(expression, Dequantize) else expression.inputs:
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


def _run(jobs: list[Job], work: Callable[[Job], Errors], threads: int) -> list[Errors]:
    """Results in the order of the jobs; the first failure ends it. The threads share torch's own among them."""
    threads, inner = min(threads, THREADS_MAX), torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(max(inner // threads, 1),))
    try:
        return list(pool.map(work, jobs))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(inner)


def _write(job: Job, read: Read, files: SafetensorsWriter, advance: Callable[[int], None]) -> Errors:
    """Evaluate a job and write its bytes; what rounding cost."""
    try:
        if isinstance(job.segment, Quantize):
            return _write_rounded(job, job.segment, read, files, advance)
        for target in job.targets.values():
            shape = target.expression.shape
            for rows in row_blocks(shape):
                values = evaluate(target.expression, read, rows)
                check_finite(values)
                row_bytes = target.expression.nbytes // shape[0]
                advance(files.write(target.tensor, target.offset + rows[0] * row_bytes, values))
        return Errors()
    except NotFiniteError as error:
        sources = ", ".join(dict.fromkeys(source.name for source in job.segment.sources()))
        raise DscError(f"holds {error}", where=f"weight {job.weight}", details=[("from", sources)]) from error


def _write_rounded(
    job: Job, segment: Quantize, read: Read, files: SafetensorsWriter, advance: Callable[[int], None]
) -> Errors:
    format_, shape = segment.parsed, segment.x.shape
    assert len(shape) == 2, (job.weight, shape)
    blocks = list(row_blocks(shape))
    grid = choose_grid(segment, read, blocks) if format_.kind == "wint4" and len(blocks) > 1 else ""
    found = []
    for rows in blocks:
        made = quantize(evaluate(segment.x, read, rows), format_, grid)
        for part, target in job.targets.items():
            first = rows[0] // 128 if (format_.kind, part) == ("fp8", "scales") else rows[0]
            offset = target.offset + first * (target.expression.nbytes // target.expression.shape[0])
            advance(files.write(target.tensor, offset, made.parts[part]))
        found.append(made.errors)
    total = add_errors(found)
    return replace(total, grids=dict.fromkeys(total.grids, 1))


def choose_grid(segment: Quantize, read: Read, blocks: list[Rows]) -> str:
    """The wint4 grid of a matrix of several pieces, which are read twice: the choice is one for all of it."""
    squares: dict[str, list[float]] = {grid: [] for grid in GRIDS}
    for rows in blocks:
        values = evaluate(segment.x, read, rows)
        for grid, found in squares.items():
            found.append(quantize(values, segment.parsed, grid).errors.square)
    return min(GRIDS, key=lambda grid: math.fsum(squares[grid]))


def check_finite(values: torch.Tensor) -> None:
    """Raise NotFiniteError where floats hold NaN or infinity (float8_e4m3fn has NaN only)."""
    if values.dtype == torch.float8_e4m3fn:
        finite = int((values.view(torch.uint8) & NAN_CODE).max()) < NAN_CODE
    else:
        finite = not values.is_floating_point() or (math.isfinite(values.max()) and math.isfinite(values.min()))
    if not finite:
        raise NotFiniteError("NaN or infinity")
