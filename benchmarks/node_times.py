"""What the benchmarks of single nodes on a GPU share: ways of one node that take turns in CUDA graphs, and their table."""

from __future__ import annotations

import faulthandler
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.gpu import Cubins, node_program

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.gpu_node import Arch
from dsc.plugins.schema import Attribute
from dsc.runtime.program import Program

ROUNDS = 9
SECONDS = 90  # a case with a kernel that never ends ends the run
Calls = Sequence[Callable[[int], object]]


@contextmanager
def changed(module: ModuleType, settings: Mapping[str, object]) -> Iterator[None]:
    """A module with other globals for a while."""
    before = {name: getattr(module, name) for name in settings}
    for name, value in settings.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@dataclass
class Case:
    """One node, all of whose ways are timed: operands by slot, the letter that counts tokens and its bound.

    module    whose globals `ways` change
    """

    op: str
    title: str
    module: ModuleType
    ways: Mapping[str, Mapping[str, object]]
    given: Mapping[str, torch.Tensor]
    attributes: Mapping[str, Attribute]
    letter: str
    most: int

    def lowered(self) -> dict[str, tuple[Program, CubinCompiler]]:
        """The program of the node by way, kernels compiled."""
        made = {}
        for name, settings in self.ways.items():
            compiler = CubinCompiler(Arch("sm_90a"))
            with changed(self.module, settings):
                node = node_program(self.op, self.given, self.attributes, {self.letter: self.most})
                (program,) = lower_gpu([node], compiler)
            spilled = {b.compiled.entry: b.resources for b in compiler.built.values() if b.resources.stack_bytes}
            assert not spilled, (self.op, self.title, name, spilled)
            made[name] = program, compiler
        return made


class Bound:
    """A program with its memory: what is given, an arena, and memory of its own for what stays zero between steps."""

    def __init__(self, program: Program, compiler: CubinCompiler, given: Mapping[str, torch.Tensor]) -> None:
        from dsc.runtime.cuda.bind import Binder
        from dsc.runtime.cuda.driver import Library

        arena = torch.full((max(program.arena_bytes, 1),), 0xFF, dtype=torch.uint8, device="cuda")
        self.zeroed = []
        tensors = {}
        for name, operand in program.operands.items():
            if name in given:
                tensors[name] = given[name]
            elif operand.offset is not None:
                tensors[name] = arena[operand.offset : operand.offset + operand.bytes]
            else:
                tensors[name] = torch.zeros(operand.bytes, dtype=torch.uint8, device="cuda")
                self.zeroed.append(tensors[name])
        cubins, libraries = Cubins(compiler), dict[str, Library]()

        def library(name: str) -> Library:
            if name not in libraries:
                libraries[name] = Library(cubins.kernel(name), name)
            return libraries[name]

        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.binder = Binder(program, tensors, library, sms)

    def calls(self, letters: Mapping[str, int]) -> list[Callable[[int], object]]:
        """The launches of a step."""
        return [step.call for step in self.binder.bind(letters)]


def run(calls: Calls, stream: torch.cuda.Stream) -> None:
    """Launch a step behind what the default stream did, and wait for it."""
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call(stream.cuda_stream)
    stream.synchronize()


def microseconds(every: Mapping[str, Calls], copies: int, stream: torch.cuda.Stream) -> dict[str, float]:
    """Of one call: medians of graphs that take turns, each with the calls for all copies."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, calls in every.items():
        run(calls, stream)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):  # without the garbage collection of torch.cuda.graph
            graphs[name].capture_begin()
            for call in calls:
                call(stream.cuda_stream)
            graphs[name].capture_end()
    times: dict[str, list[float]] = {name: [] for name in every}
    with torch.cuda.stream(stream):
        for _ in range(ROUNDS + 2):
            for name, graph in graphs.items():
                graph.replay()  # the clock and the caches as this way leaves them
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                stream.synchronize()
                times[name].append(begin.elapsed_time(end) / copies * 1e3)
    return {name: statistics.median(found[2:]) for name, found in times.items()}


@dataclass
class Times:
    """What was measured: a line a way, printed as it comes, and written to `file`."""

    tokens: Sequence[int]
    file: Path | None = None
    records: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, case: Case, times: Callable[[], Iterator[tuple[str, str, int, float, float, float]]]) -> None:
        """Add what a case yields: title, way, tokens, microseconds, error and its limit."""
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        first = len(self.records)
        for row in times():
            self.records.append(dict(zip(("case", "way", "tokens", "us", "error", "limit"), row, strict=True)))
        for title, way, cells in self._lines(first):
            print(f"{title} {way}: {' '.join(cells)}", flush=True)
        if self.file is not None:
            self.file.write_text(json.dumps(self.records, indent=1))
        torch.cuda.empty_cache()

    def _lines(self, first: int = 0) -> Iterator[tuple[str, str, list[str]]]:
        found: dict[tuple[str, str], dict[int, str]] = {}
        for r in self.records[first:]:
            wrong = "" if r["error"] <= r["limit"] else f" WRONG {r['error']:.1e}"
            found.setdefault((r["case"], r["way"]), {})[r["tokens"]] = f"{r['us']:.1f}{wrong}"
        for (title, way), row in found.items():
            yield title, way, [row.get(count, "-") for count in self.tokens]

    def show(self) -> None:
        """The table of all."""
        table = Table("case", "way", *map(str, self.tokens))
        for title, way, cells in self._lines():
            table.add_row(title, way, *cells)
        Console(width=180).print(table)
