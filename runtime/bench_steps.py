"""The decode steps that `dsc bench` times, of one engine, and what those of prefill need as well.

Every sequence has its own random tokens. For decode steps the cache holds random latents (N(0, 1), as norms leave them)
instead of computed ones: filling it would take longer than all else, and no kernel's time depends on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dsc.runtime.batch import Batch, BatchBuilder, Segment
from dsc.runtime.bench_floor import Rates, StepFacts, independent_hits, step_floor
from dsc.runtime.bench_layers import (
    GpuCall,
    LaunchCost,
    Part,
    TimedExecutor,
    cpu_parts,
    gpu_parts,
    graph_seconds,
    has_experts,
    launch_cost,
)
from dsc.runtime.bench_nodes import node_times, timed_layers
from dsc.runtime.bench_points import DecodePoint, LayerTime, Plan
from dsc.runtime.bench_routing import experts_hit, spreads
from dsc.runtime.engine import Engine
from dsc.runtime.errors import DscError
from dsc.runtime.program import layer_of

WARM_STEPS = 2
# Whose experts are counted: a layer's mean of fewer strays from what independent routing hits, a rank's part of it more.
ROUTING_STEPS = 16


class Bench:
    """One engine under measurement. Its cache is overwritten."""

    def __init__(self, engine: Engine, rates: Rates | None) -> None:
        self.engine, self.rates = engine, rates
        self.on_gpu = engine.backend.device.type == "cuda"
        limits, self._block_tokens = engine.manifest.limits, engine.manifest.kv_cache.block_tokens
        self.builder = BatchBuilder(limits.batch_tokens, limits.sequences, self._block_tokens)
        self.random = torch.Generator().manual_seed(0)
        latents = torch.Generator(engine.backend.device).manual_seed(0)  # every rank has the same
        for cache in engine.cache.tensors.values():
            cache.view(getattr(torch, engine.manifest.kv_cache.dtype)).normal_(generator=latents)

    def independent(self, tokens: int) -> float:
        """Experts of this rank that so many tokens reach by independent routing."""
        spec = self.engine.spec
        return independent_hits(spec.num_experts, spec.experts_per_token, tokens) / self._expert_groups

    @property
    def _expert_groups(self) -> int:
        return self.engine.manifest.parallel.expert  # each has its own experts, and counts no others

    # -- decode

    def decode(self, batch: int, context: int, plan: Plan) -> DecodePoint:
        """Measure one point."""
        with self.blocks(batch, context) as blocks:
            return self._decode(batch, context, blocks, plan)

    def _decode(self, batch: int, context: int, blocks: list[list[int]], plan: Plan) -> DecodePoint:
        program = self.engine.programs["main.decode"].program
        times, busy = self._step_times(context, blocks, WARM_STEPS + plan.steps)
        draws = (self._batch(context, blocks).inputs() for _ in range(ROUTING_STEPS * self._expert_groups))
        hits = experts_hit(self.engine.backend, program, self.engine.cache.tensors, draws)
        independent = self.independent(batch)
        facts = StepFacts.decode(batch, context, hits)
        floors: dict[str, float] = {}
        if self.rates is not None:
            for floor in step_floor(program, facts, self.rates):
                floors[floor.node] = floor.seconds
        step = self._batch(context, blocks)
        timing = self._gpu(step, plan.nodes) if self.on_gpu else self._cpu(step, plan)
        return DecodePoint(
            batch=batch,
            context=context,
            seconds=statistics.median(times[WARM_STEPS:]),
            floor=sum(floors.values()) if floors else None,
            experts=hits,
            independent=independent,
            valid=spreads(hits, independent),
            memory_bytes=self.memory(),
            device_seconds=statistics.median(busy[WARM_STEPS:]) if busy else timing.device,
            sample_seconds=timing.sample,
            layers=[self._layer(part, floors) for part in timing.layers],
            nodes=node_times(program, facts, timing.nodes, self.rates),
            launch=timing.launch,
        )

    def _step_times(self, context: int, blocks: list[list[int]], steps: int) -> tuple[list[float], list[float]]:
        """Seconds of each of some steps as the serving loop has them; the last one's context is `context`.

        Second, of each step the seconds in which the device was busy with it; none where steps do not run ahead.
        """
        ahead = self.engine.ahead
        if ahead is None or not ahead.fits(len(blocks)) or context <= steps:
            return [self._step(context, blocks) for _ in range(steps)], []
        times = [time.perf_counter()]

        def take(tokens: list[int]) -> bool:
            assert len(tokens) == len(blocks), (len(tokens), len(blocks))
            times.append(time.perf_counter())
            return True

        inputs = self._batch(context - steps, blocks).inputs()
        rows = self._sampling(torch.empty(len(blocks), 0))
        del rows["logits"]
        busy: list[Any] = []
        ahead.burst(inputs, rows, steps, take, busy)
        return [after - before for before, after in pairwise(times)], [a.elapsed_time(b) / 1e3 for a, b in busy]

    def _step(self, context: int, blocks: list[list[int]]) -> float:
        """Seconds of one step as a serving loop has it, greedy."""
        begin = time.perf_counter()
        logits, _ = self.engine.models["main"].run(self._batch(context, blocks), "decode")
        tokens = self.engine.programs["sample"].run(self._sampling(logits))["tokens"].tolist()
        assert len(tokens) == len(blocks), (len(tokens), len(blocks))
        return time.perf_counter() - begin

    def _batch(self, context: int, blocks: list[list[int]]) -> Batch:
        """The last token of every sequence, another at random each time."""
        tokens = torch.randint(self.engine.spec.vocab_size, (len(blocks),), generator=self.random).tolist()
        return self.builder.build(
            [Segment([token], context - 1, held) for token, held in zip(tokens, blocks, strict=True)]
        )

    def _sampling(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Greedy rows, each the last of its sequence."""
        rows, words = len(logits), -(-self.engine.spec.vocab_size // 32)
        zeros, ints = torch.zeros(rows), torch.zeros(rows, dtype=torch.int32)
        return {
            "logits": logits, "temperature": zeros, "top_p": torch.ones(rows), "top_k": ints, "min_p": zeros,
            "seeds": torch.zeros(rows, dtype=torch.int64), "positions": ints, "drafts": ints - 1,
            "token_mask": torch.full((rows, words), -1, dtype=torch.int32),
        }  # fmt: skip

    def _cpu(self, step: Batch, plan: Plan) -> _Timing:
        backend: Any = self.engine.backend
        runner = backend.bind(self.engine.programs["main.decode"].program, TimedExecutor)
        runner.set_state(self.engine.cache.tensors)
        layers = cpu_parts(runner, step.inputs(), min(plan.steps, 5))
        nodes = cpu_parts(runner, step.inputs(), min(plan.steps, 5), str) if plan.nodes else []
        return _Timing(layers=layers, nodes=nodes)

    def _gpu(self, step: Batch, nodes: bool) -> _Timing:
        main: Any = self.engine.programs["main.decode"]
        sample: Any = self.engine.programs["sample"]
        stream: torch.cuda.Stream = main.shared.stream
        inputs = step.inputs()
        outputs = main.run(inputs)
        sampling = self._sampling(outputs["logits"])
        sample.run(sampling)
        torch.cuda.synchronize()
        letters = main.letters(inputs)
        calls, graph = main.calls(letters), main.capture(letters)
        agree = self.engine.agree_least
        main_seconds = graph_seconds(graph, stream, agree=agree)
        sample_seconds = graph_seconds(sample.capture(sample.letters(sampling)), stream, agree=agree)
        return _Timing(
            layers=gpu_parts(calls, stream, agree=agree),
            nodes=self.gpu_nodes(main, calls) if nodes else [],
            device=main_seconds + sample_seconds,
            sample=sample_seconds,
            launch=launch_cost(calls, graph, stream),
        )

    def gpu_nodes(self, executor: Any, calls: Sequence[GpuCall]) -> list[Part]:
        """Nodes of a few layers, in order: each reads what the one before it has left."""
        chosen = timed_layers(executor.program)
        own = [call for call in calls if layer_of(call.node) in chosen]
        return gpu_parts(own, executor.shared.stream, str, self.engine.agree_least)

    def _layer(self, part: Part, floors: Mapping[str, float]) -> LayerTime:
        program = self.engine.programs["main.decode"].program
        own = [seconds for node, seconds in floors.items() if layer_of(node) == part.name]
        moe = has_experts(program, part.name)
        return LayerTime(part.name, part.seconds, sum(own) if floors else None, part.launches, moe)

    # -- memory

    @contextmanager
    def blocks(self, sequences: int, context: int) -> Iterator[list[list[int]]]:
        """The cache's blocks for steps of so many sequences, given back after them; nothing keeps what gradients would need."""
        count = -(-context // self._block_tokens)
        taken = self.engine.cache.pool.take(sequences * count)
        if taken is None:
            raise DscError(
                "the cache is too small for the batch",
                wanted=f"{sequences * count * self._block_tokens:,} tokens: {sequences} sequences of {context}",
                got=f"{self.engine.cache.capacity_tokens:,} tokens",
            )
        try:
            with torch.inference_mode():
                yield [taken[i * count : (i + 1) * count] for i in range(sequences)]
        finally:
            self.engine.cache.pool.give(taken)

    def room(self, context: int) -> int:
        return self.engine.cache.pool.num_free // -(-context // self._block_tokens)

    def memory(self) -> int:
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info(self.engine.backend.device)
            return total - free
        return self.engine.resident_weight_bytes() + self.engine.cache.nbytes

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class _Timing:
    layers: list[Part]
    nodes: list[Part]
    device: float | None = None
    sample: float | None = None
    launch: LaunchCost | None = None
