"""Decode steps one after another on the device: each step's tokens become the next one's inputs there, and the host reads
them a step behind. So the device never waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsc.runtime.cuda.bind import BoundStep
from dsc.runtime.cuda.executor import CudaExecutor

IN_FLIGHT = 2  # steps launched and not read

# Inputs of the advance program -> the program, and the input or output there, whose memory they are.
_SHARED = {
    "chosen": ("sample", "tokens"),
    "tokens": ("main", "tokens"),
    "positions": ("main", "positions"),
    "slots": ("main", "slots"),
    "sequence_lengths": ("main", "sequence_lengths"),
    "places": ("sample", "positions"),
    "block_table": ("main", "block_table"),
}


@dataclass
class _Read:
    """A step's tokens on their way to the host."""

    tokens: torch.Tensor
    done: torch.cuda.Event


class RunAhead:
    """The decode, sample and advance programs of an engine as one CUDA graph per bucket. See `dsc.runtime.backends.Ahead`."""

    def __init__(self, main: CudaExecutor, sample: CudaExecutor, advance: CudaExecutor) -> None:
        self._main, self._sample, self._advance = main, sample, advance
        sample.share({"logits": main.tensor("logits")})
        of = {"main": main, "sample": sample}
        advance.share({name: of[program].tensor(source) for name, (program, source) in _SHARED.items()})
        self._stream = main.shared.stream
        rows = sample.program.letters["R"]
        self._host = [torch.zeros(rows, dtype=torch.int32, pin_memory=True) for _ in range(IN_FLIGHT + 1)]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def fits(self, sequences: int) -> bool:
        """Whether a step of so many sequences is a captured one."""
        return 0 < sequences <= max(self._main.buckets, default=0)

    def forget(self) -> None:
        """Drop what was captured: the caches have moved."""
        self._graphs.clear()

    def burst(
        self,
        inputs: Mapping[str, torch.Tensor],
        rows: Mapping[str, torch.Tensor],
        steps: int,
        take: Callable[[list[int]], bool],
        busy: list[Any] | None = None,
    ) -> None:
        """Run up to `steps` decode steps of one token a sequence.

        inputs  of the first step; the block table holds the blocks of all steps
        rows    inputs of the sample program but the logits
        take    gets each step's tokens in order; False ends the burst (a step already launched is not taken)
        busy    gets two events of each step, for profiles: the device begins its graph, and is done with it
        """
        sequences = len(inputs["tokens"])
        reading: list[_Read] = []
        going = True
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._main.shared.device))
            letters = self._main.stage(inputs)
            logits = self._main.tensor("logits")
            self._sample.stage({**rows, "logits": logits[: sequences * self._vocab].view(sequences, self._vocab)})
            graph = self._graph(letters)
            for step in range(steps):
                if busy is not None:
                    busy.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
                    busy[-1][0].record(self._stream)
                graph.replay()
                if busy is not None:
                    busy[-1][1].record(self._stream)
                reading.append(self._read(sequences, step))
                if len(reading) == IN_FLIGHT:
                    going = take(self._tokens(reading.pop(0)))
                    if not going:
                        break
            while reading and going:
                going = take(self._tokens(reading.pop(0)))
            self._stream.synchronize()
        for program in (self._main, self._sample, self._advance):
            program.executed = program.node_names

    @property
    def _vocab(self) -> int:
        size = self._main.program.operands["logits"].shape[1]
        assert isinstance(size, int), size
        return size

    def _graph(self, letters: Mapping[str, int]) -> torch.cuda.CUDAGraph:
        """The three programs with these letters. The first step's inputs must be in place: main runs once to warm up, on
        all ranks, since all make this step for the first time."""
        bucket = letters["B"]
        if bucket not in self._graphs:
            first = [*self._main.calls(letters), *self._sample.calls({"R": letters["R"]})]
            then = self._advance.calls({"B": bucket, "P": letters["P"]})
            self._call(first)
            self._stream.synchronize()
            self._graphs[bucket] = self._main.shared.graph([*first, *then])
        return self._graphs[bucket]

    def _call(self, steps: list[BoundStep]) -> None:
        for step in steps:
            step.call(self._stream.cuda_stream)

    def _read(self, sequences: int, step: int) -> _Read:
        """Between this step's graph and the next one's, so that neither can change the tokens meanwhile."""
        host = self._host[step % len(self._host)][:sequences]
        host.copy_(self._sample.tensor("tokens")[:sequences], non_blocking=True)
        done = torch.cuda.Event()
        done.record(self._stream)
        return _Read(host, done)

    @staticmethod
    def _tokens(read: _Read) -> list[int]:
        read.done.synchronize()
        tokens: list[int] = read.tokens.tolist()
        return tokens
