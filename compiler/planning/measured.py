"""What kernels were measured to take: tables of microseconds by op, formats, widths and step, one file a GPU.

`benchmarks/kernel_tables.py` makes the files from what `dsc bench --nodes --json` prints. A step that lies between two measured
ones is interpolated; an op of other widths takes the time of the measured one that is nearest by its least work, scaled by it.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from dsc.compiler.planning.ops import PlannedOp
from dsc.compiler.planning.work import Step, work
from dsc.runtime.bench_floor import Rates

FOLDER = "dsc.compiler.planning.kernel_times"
TOKEN_US = 0.01  # orders steps whose least work is the same
OTHER_WIDTHS, OTHER_FORMATS = "other widths", "other formats"
# Most of what attention reads is cache: its heads matter more. Codes that a norm makes are left to its readers elsewhere.
MINOR = ("kv_b_format", "quantize")
OTHER_GROUP = 0.5  # how far apart 4-bit formats of two group sizes are, where another format is 1


@dataclass(frozen=True)
class Estimate:
    """Microseconds of an op in a step. `scaled` says from what: other widths, formats or steps; "" where it was measured."""

    us: float
    scaled: str = ""


@dataclass(frozen=True)
class Entry:
    """One measured op with its microseconds by step."""

    op: PlannedOp
    points: Mapping[Step, float]


@dataclass(frozen=True)
class Source:
    """What was measured of one engine.

    steps  microseconds of whole steps; sampling is in those of decode, the host's part is not
    gaps   microseconds of a decode step in which the device waits for the host, by its sequences
    """

    engine: str
    date: str
    steps: Mapping[Step, float]
    gaps: Mapping[int, float]
    entries: tuple[Entry, ...]

    def without(self, step: Step) -> Source:
        """The same without one step."""
        entries = [Entry(e.op, {s: us for s, us in e.points.items() if s != step}) for e in self.entries]
        steps = {s: us for s, us in self.steps.items() if s != step}
        return replace(self, steps=steps, entries=tuple(e for e in entries if e.points))


@dataclass(frozen=True)
class Table:
    """All that was measured on one GPU."""

    gpu: str
    rates: Rates
    sources: tuple[Source, ...]

    @property
    def dates(self) -> tuple[str, ...]:
        """When it was measured."""
        return tuple(sorted({source.date for source in self.sources}))

    def estimate(self, op: PlannedOp, step: Step) -> Estimate | None:
        """Time of an op, None where no op of its kind was measured in such a step."""
        found = [e for e in self._entries if e.op.op == op.op and _serves(e, op, step)]
        if not found:
            return None
        same = [e for e in found if (e.op.widths, e.op.formats) == (op.widths, op.formats)]
        same = same or [e for e in found if (e.op.widths, _but_codes(e.op)) == (op.widths, _but_codes(op))]
        if same:
            times = [self._at(entry, step) for entry in same]
            scaled = next((time.scaled for time in times if time.scaled), "")
            return Estimate(statistics.fmean(time.us for time in times), scaled)
        least = min(_distance(entry.op, op) for entry in found)
        found = [entry for entry in found if _distance(entry.op, op) == least]
        us = self._scaled(op, step, [(entry.op, self._at(entry, step).us) for entry in found])
        formats = any(_but_codes(entry.op) == _but_codes(op) for entry in found)
        return Estimate(us, OTHER_WIDTHS if formats else OTHER_FORMATS)

    def gap_us(self, sequences: int) -> float:
        """What the host adds to a decode step: the mean of the nearest measured numbers of sequences."""
        found = [(abs(math.log(n / sequences)), us) for source in self.sources for n, us in source.gaps.items()]
        near = min((distance for distance, _ in found), default=0.0)
        return statistics.fmean(us for distance, us in found if distance == near) if found else 0.0

    @cached_property
    def _entries(self) -> tuple[Entry, ...]:
        return tuple(entry for source in self.sources for entry in source.entries)

    @cached_property
    def _fixed(self) -> Mapping[str, float]:
        """Microseconds of each op whatever its work: the least that a call took beyond it."""
        beyond: dict[str, float] = {}
        for entry in self._entries:
            us = min(us - self._work_us(entry.op, step) for step, us in entry.points.items())
            beyond[entry.op.op] = max(0.0, min(us, beyond.get(entry.op.op, us)))
        return beyond

    def _work_us(self, op: PlannedOp, step: Step) -> float:
        return work(op, step, self.rates).seconds * 1e6

    def _by_work(self, op: str, us: float, ratio: float) -> float:
        """A measured time for `ratio` times the work."""
        fixed = min(self._fixed[op], us)
        return fixed + (us - fixed) * ratio

    def _scaled(self, op: PlannedOp, step: Step, times: Sequence[tuple[PlannedOp, float]]) -> float:
        """From ops of other widths: between the two around it by their work, else from the nearest."""
        wanted = self._work_us(op, step)
        found = sorted((self._work_us(other, step), us) for other, us in times)
        for (low, before), (high, after) in pairwise(found):
            if low <= wanted <= high:
                return before + (after - before) * (wanted - low) / (high - low) if high > low else before
        least, us = found[0] if wanted < found[0][0] else found[-1]
        return self._by_work(op.op, us, wanted / least)

    # -- one entry, any step

    def _at(self, entry: Entry, step: Step) -> Estimate:
        points = [(point, us) for point, us in entry.points.items() if point.phase == step.phase]
        if entry.op.op == "MlaAttention":
            return self._attention_at(entry.op, points, step)
        return self._tokens_at(entry.op, points, step)

    def _tokens_at(self, op: PlannedOp, points: Sequence[tuple[Step, float]], step: Step) -> Estimate:
        """By the step's tokens; times of several contexts are one."""
        by_tokens: dict[int, list[tuple[Step, float]]] = {}
        for point, us in points:
            by_tokens.setdefault(point.tokens, []).append((point, us))
        found = [(held[0][0], statistics.fmean(us for _, us in held)) for _, held in sorted(by_tokens.items())]
        for (low, before), (high, after) in pairwise(found):
            if low.tokens <= step.tokens <= high.tokens:
                start, stop, at = (self._work_us(op, s) + TOKEN_US * s.tokens for s in (low, high, step))
                return Estimate(before + (after - before) * (at - start) / (stop - start))
        end, us = found[0] if step.tokens < found[0][0].tokens else found[-1]
        if end.tokens == step.tokens:
            return Estimate(us)
        ratio = self._work_us(op, step) / self._work_us(op, end)
        return Estimate(self._by_work(op.op, us, ratio), f"{step.phase} of {_tokens(end.tokens)}")

    def _attention_at(self, op: PlannedOp, points: Sequence[tuple[Step, float]], step: Step) -> Estimate:
        """By sequences at each measured context around the step's, then by context; of a prefill, from the nearest by work."""
        if step.phase == "prefill":
            wanted = self._work_us(op, step)
            near, us = min(points, key=lambda point: abs(math.log(self._work_us(op, point[0]) / wanted)))
            same = (near.sequences, near.queries, near.context) == (step.sequences, step.queries, step.context)
            told = "" if same else f"prefill of {near.sequences} x {_tokens(near.queries)}"
            return Estimate(self._by_work(op.op, us, wanted / self._work_us(op, near)), told)
        contexts = sorted({point.context for point, _ in points})
        times = {}
        for context in contexts:
            held = [(point, us) for point, us in points if point.context == context]
            times[context] = self._tokens_at(op, held, replace(step, context=context))
        for low, high in pairwise(contexts):
            if low <= step.context <= high:
                share = (step.context - low) / (high - low)
                scaled = times[low].scaled or times[high].scaled
                return Estimate(times[low].us + (times[high].us - times[low].us) * share, scaled)
        end = contexts[0] if step.context < contexts[0] else contexts[-1]
        if end == step.context:
            return times[end]
        ratio = self._work_us(op, step) / self._work_us(op, replace(step, context=end))
        return Estimate(self._by_work(op.op, times[end].us, ratio), f"context {end:,}")


def load_table(gpu: str, rates: Rates) -> Table | None:
    """The table of a GPU by its name in `dsc.compiler.planning.gpus`; None where nothing was measured on it."""
    file = importlib.resources.files(FOLDER) / f"{gpu}.json"
    return read_table(json.loads(file.read_text(encoding="utf-8")), rates) if file.is_file() else None


def read_table(data: Mapping[str, Any], rates: Rates) -> Table:
    """A table from its JSON data (`benchmarks/kernel_tables.py` tells what is in it)."""
    return Table(data["gpu"], rates, tuple(map(_source, data["sources"])))


def _source(data: Mapping[str, Any]) -> Source:
    steps = [Step(s["phase"], s["sequences"], s["queries"], s["context"]) for s in data["steps"]]
    entries = []
    for item in data["ops"]:
        op = PlannedOp(item["name"], item["op"], item["count"], item["widths"], item["formats"])
        entries.append(Entry(op, {s: us for s, us in zip(steps, item["us"], strict=True) if us is not None}))
    gaps: dict[int, list[float]] = {}
    for step in data["steps"]:
        if step["phase"] == "decode":
            gaps.setdefault(step["sequences"], []).append(step["gap_us"])
    return Source(
        engine=data["engine"],
        date=data["date"],
        steps={step: sum(e.op.count * e.points[step] for e in entries if step in e.points) for step in steps},
        gaps={sequences: statistics.fmean(held) for sequences, held in gaps.items()},
        entries=tuple(entries),
    )


def _serves(entry: Entry, op: PlannedOp, step: Step) -> bool:
    """Whether an entry ran in such a phase, and in the same way: what ranks exchange, among as many."""
    same = entry.op.formats.get("mode") == op.formats.get("mode") and entry.op.widths.get("ranks") == op.widths.get(
        "ranks"
    )
    return same and any(point.phase == step.phase for point in entry.points)


def _but_codes(op: PlannedOp) -> Mapping[str, str]:
    """Formats, except for the codes that a norm makes: where it was measured without, its readers were measured making them."""
    return {name: text for name, text in op.formats.items() if name != "quantize"}


def _distance(measured: PlannedOp, op: PlannedOp) -> float:
    """How many formats differ, of those that matter."""
    names = sorted({*measured.formats, *op.formats} - {*MINOR})
    return sum(_apart(measured.formats.get(name, ""), op.formats.get(name, "")) for name in names)


def _apart(one: str, other: str) -> float:
    if one == other:
        return 0.0
    return OTHER_GROUP if one.partition(":")[0] == other.partition(":")[0] else 1.0


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' if count != 1 else ''}"


def scaled_words(estimates: Sequence[tuple[PlannedOp, Estimate]]) -> Iterator[str]:
    """Sentences on what was scaled: how much of the time, and which ops from what."""
    found: dict[str, set[str]] = {}
    for op, estimate in estimates:
        if estimate.scaled:
            found.setdefault(estimate.scaled, set()).add(op.op)
    if found:
        total = sum(op.count * estimate.us for op, estimate in estimates)
        scaled = sum(op.count * estimate.us for op, estimate in estimates if estimate.scaled)
        yield f"{scaled / total:.0%} of these times were not measured as they are but scaled by an op's least work"
    for words, ops in sorted(found.items()):
        yield f"scaled from {words}: {', '.join(sorted(ops))}"
