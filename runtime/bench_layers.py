"""Where a step's time goes: launches and seconds of each layer, on GPUs of each op too."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch

from dsc.plugins.cpu_node import Run
from dsc.runtime.executor import Executor
from dsc.runtime.program import Program, ProgramNode, layer_of
from dsc.runtime.ranks.group import alone

REPLAYS = 20
WARM_SECONDS = 0.02
LONG_SECONDS = 3e-4  # what a graph must take for the host's part in a replay not to show


@dataclass(frozen=True)
class Part:
    """Nodes that are timed together. `launches` is None on CPUs."""

    name: str
    seconds: float
    launches: int | None


class TimedExecutor(Executor):
    """A program on the CPU, with the seconds of each node's last run."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seconds: dict[str, float] = {}
        super().__init__(*args, **options)

    def _bind(self, node: ProgramNode, frees: list[str]) -> Any:
        call = super()._bind(node, frees)
        return replace(call, run=self._timed(call.name, call.run))

    def _timed(self, name: str, run: Run) -> Run:
        def timed(*operands: Any) -> tuple[torch.Tensor, ...]:
            begin = time.perf_counter()
            results = run(*operands)
            self.seconds[name] = time.perf_counter() - begin
            return results

        return timed


def cpu_parts(
    runner: TimedExecutor, inputs: Mapping[str, torch.Tensor], steps: int, name_of: Callable[[str], str] = layer_of
) -> list[Part]:
    """Median seconds of each part of a step, in order."""
    found: dict[str, list[float]] = {}
    for _ in range(steps):
        runner.run(inputs)
        sums: dict[str, float] = {}
        for node, seconds in runner.seconds.items():
            sums[name_of(node)] = sums.get(name_of(node), 0.0) + seconds
        for name, seconds in sums.items():
            found.setdefault(name, []).append(seconds)
    return [Part(name, statistics.median(times), None) for name, times in found.items()]


class GpuCall(Protocol):
    """One bound call (`dsc.runtime.cuda.bind.BoundStep`)."""

    @property
    def node(self) -> str: ...

    @property
    def call(self) -> Callable[[int], object]: ...


# The least of the ranks' numbers: what is replayed holds collectives, so all replay it as often.
Agree = Callable[[int], int]


def gpu_parts(
    calls: Sequence[GpuCall],
    stream: torch.cuda.Stream,
    name_of: Callable[[str], str] = layer_of,
    agree: Agree = alone,
) -> list[Part]:
    """Seconds of each part of a step, each replayed as a CUDA graph of its own right behind itself.

    A part whose weights fit in the chip's L2 cache looks faster than it is in a step.
    """
    groups: dict[str, list[GpuCall]] = {}
    for call in calls:
        groups.setdefault(name_of(call.node), []).append(call)
    return [Part(name, calls_seconds(group, stream, agree), len(group)) for name, group in groups.items()]


def calls_seconds(calls: Sequence[GpuCall], stream: torch.cuda.Stream, agree: Agree = alone) -> float:
    """Median device time of some calls in a CUDA graph, which holds them often enough to hide its own launch."""
    seconds = graph_seconds(capture(calls, stream), stream, REPLAYS // 4, agree)
    repeats = agree(math.ceil(LONG_SECONDS / max(seconds, 1e-7)))
    if repeats == 1:
        return graph_seconds(capture(calls, stream), stream, agree=agree)
    return graph_seconds(capture([*calls] * repeats, stream), stream, agree=agree) / repeats


def capture(calls: Sequence[GpuCall], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A CUDA graph of some calls, after one run of them."""
    with torch.cuda.stream(stream):
        for step in calls:
            step.call(stream.cuda_stream)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for step in calls:
                step.call(stream.cuda_stream)
    return graph


def graph_seconds(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, replays: int = REPLAYS, agree: Agree = alone
) -> float:
    """Median device time of a replay."""
    with torch.cuda.stream(stream):
        begin = time.monotonic()
        while agree(time.monotonic() - begin < WARM_SECONDS):
            graph.replay()
            stream.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        stream.synchronize()
    return statistics.median(float(a.elapsed_time(b)) / 1e3 for a, b in pairwise(events))


@dataclass(frozen=True)
class LaunchCost:
    """Host seconds of one launch: each by itself, and as a part of a CUDA graph's replay."""

    launches: int
    eager: float
    graph: float


def launch_cost(calls: Sequence[GpuCall], graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> LaunchCost:
    """What the host spends to have a step's kernels launched, without waiting for them."""
    times: dict[str, list[float]] = {"eager": [], "graph": []}
    with torch.cuda.stream(stream):
        for _ in range(5):
            for name in times:
                stream.synchronize()
                begin = time.perf_counter()
                if name == "graph":
                    graph.replay()
                else:
                    for step in calls:
                        step.call(stream.cuda_stream)
                times[name].append((time.perf_counter() - begin) / max(len(calls), 1))
        stream.synchronize()
    return LaunchCost(len(calls), *(statistics.median(times[name]) for name in ("eager", "graph")))


def has_experts(program: Program, part: str) -> bool:
    """Whether a layer, or a node, has experts."""
    return any(node.op == "Moe" and part in (node.name, layer_of(node.name)) for node in program.nodes)
