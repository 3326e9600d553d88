"""The prefill steps that `dsc bench` times: whole prompts of random tokens from an empty cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsc.runtime.batch import Batch, Segment
from dsc.runtime.bench_floor import StepFacts, step_floor
from dsc.runtime.bench_nodes import node_times
from dsc.runtime.bench_points import PrefillNodes, PrefillPoint
from dsc.runtime.bench_routing import experts_hit, spreads
from dsc.runtime.bench_steps import Bench

ROUNDS = 3  # after one that warms up


@dataclass(frozen=True)
class _Timed:
    """Some prompts at once: seconds, their floor, the experts that each layer's first chunk hits, times of nodes."""

    seconds: float
    floor: float | None
    experts: dict[str, float]
    nodes: list[PrefillNodes]


class PrefillBench:
    """Batches of prompts: as many at once as fill the engine's largest step, a prompt longer than it in several steps.

    Batches repeat steps of few sizes, so each size is timed once.
    """

    def __init__(self, bench: Bench, nodes: bool) -> None:
        self._bench, self._nodes = bench, nodes
        self._timed: dict[tuple[int, int], _Timed] = {}

    def measure(self, batch: int, context: int) -> PrefillPoint:
        """`batch` prompts of `context` tokens, all of them until the last one's logits."""
        engine = self._bench.engine
        limits = engine.manifest.limits
        prompts = max(1, min(batch, limits.batch_tokens // context, limits.sequences, self._bench.room(context)))
        repeats, rest = divmod(batch, prompts)
        full = self._time(prompts, context)
        parts = [full] * repeats + ([self._time(rest, context)] if rest else [])
        independent = self._bench.independent(prompts * self._chunks(context)[0][1])
        floors = [part.floor for part in parts if part.floor is not None]
        return PrefillPoint(
            batch=batch,
            prompts=prompts,
            context=context,
            seconds=sum(part.seconds for part in parts),
            seconds_at_once=full.seconds,
            floor=sum(floors) if floors else None,
            experts=full.experts,
            independent=independent,
            valid=spreads(full.experts, independent),
            memory_bytes=self._bench.memory(),
            nodes=full.nodes,
        )

    def _time(self, prompts: int, context: int) -> _Timed:
        if (prompts, context) not in self._timed:
            with self._bench.blocks(prompts, context) as blocks:
                self._timed[prompts, context] = self._measure(context, blocks)
        return self._timed[prompts, context]

    def _measure(self, context: int, blocks: list[list[int]]) -> _Timed:
        seconds = [self._run(context, blocks) for _ in range(1 + ROUNDS)][1:]
        program = self._bench.engine.programs["main.prefill"].program
        inputs = self._first_chunk(context, blocks).inputs()
        hits = experts_hit(self._bench.engine.backend, program, self._bench.engine.cache.tensors, [inputs])
        counts = sorted({len(blocks), 1}) if self._nodes and self._bench.on_gpu else []
        nodes = [self._node_times(context, blocks[:count], hits) for count in counts]
        floor = None
        if self._bench.rates is not None:
            floor = sum(
                node.seconds
                for start, tokens in self._chunks(context)
                for node in step_floor(program, StepFacts.prefill(len(blocks), start, tokens), self._bench.rates)
            )
        return _Timed(statistics.median(seconds), floor, hits, nodes)

    def _chunks(self, context: int) -> list[tuple[int, int]]:
        """First token and number of tokens of each step of a prompt."""
        size = self._bench.engine.manifest.limits.batch_tokens
        return [(start, min(size, context - start)) for start in range(0, context, size)]

    def _run(self, context: int, blocks: list[list[int]]) -> float:
        tokens = self._tokens(len(blocks), context)
        self._bench.wait()
        begin = time.perf_counter()
        for start, count in self._chunks(context):
            segments = [Segment(t[start : start + count], start, b) for t, b in zip(tokens, blocks, strict=True)]
            self._bench.engine.models["main"].run(self._bench.builder.build(segments), "prefill")
        self._bench.wait()
        return time.perf_counter() - begin

    def _node_times(self, context: int, blocks: list[list[int]], hits: Mapping[str, float]) -> PrefillNodes:
        executor: Any = self._bench.engine.programs["main.prefill"]
        inputs = self._first_chunk(context, blocks).inputs()
        executor.run(inputs)
        self._bench.wait()
        parts = self._bench.gpu_nodes(executor, executor.calls(executor.letters(inputs)))
        tokens = self._chunks(context)[0][1]
        facts = StepFacts.prefill(len(blocks), 0, tokens, hits)
        return PrefillNodes(len(blocks), tokens, node_times(executor.program, facts, parts, self._bench.rates))

    def _first_chunk(self, context: int, blocks: list[list[int]]) -> Batch:
        _, count = self._chunks(context)[0]
        tokens = self._tokens(len(blocks), count)
        return self._bench.builder.build([Segment(t, 0, held) for t, held in zip(tokens, blocks, strict=True)])

    def _tokens(self, prompts: int, count: int) -> list[list[int]]:
        size = (prompts, count)
        found: list[list[int]] = torch.randint(
            self._bench.engine.spec.vocab_size, size, generator=self._bench.random
        ).tolist()
        return found
