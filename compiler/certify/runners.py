"""Run a program a segment at a time, with one segment's weights in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from dsc.compiler.certify.segments import Segment, cut
from dsc.compiler.certify.steps import Step
from dsc.runtime.program import Program

Values = Mapping[str, torch.Tensor]
RunSegment = Callable[[Values], dict[str, torch.Tensor]]
Bind = Callable[[Program], RunSegment]


class Runner:
    """One program of one side, cut into segments.

    steps  how the rows are cut; every step is run through a segment before the next segment's weights are touched
    """

    def __init__(self, program: Program, steps: Sequence[Step], bind: Bind) -> None:
        self.segments = cut(program)
        self._steps, self._bind = steps, bind

    def run(self, segment: Segment, *starts: Values) -> list[dict[str, torch.Tensor]]:
        """A segment on all rows of each start, bound once: its outputs by name, rows [T, ...] in order."""
        run, results = self._bind(segment.program), []
        for carried in starts:
            found = [run(self._inputs(segment, step, carried)) for step in self._steps]
            results.append({name: torch.cat([outputs[name] for outputs in found]) for name in segment.gives})
        return results

    def head(self, segment: Segment, rows_at_once: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """hidden rows [R, D] -> logits [R, V], at most `rows_at_once` of them in one call."""
        run = self._bind(segment.program)
        (hidden,) = segment.carried
        dtype = _dtype(segment.program, hidden)
        limit = min(rows_at_once, *(segment.program.letters.get(letter, rows_at_once) for letter in "TR"))

        def logits(rows: torch.Tensor) -> torch.Tensor:
            pieces = []
            for piece in torch.split(rows, limit):
                at = torch.arange(len(piece), dtype=torch.int32)
                pieces.append(run({hidden: piece.to(dtype), "logit_rows": at})[segment.gives[0]])
            return torch.cat(pieces)

        return logits

    def _inputs(self, segment: Segment, step: Step, carried: Values) -> dict[str, torch.Tensor]:
        values = {}
        for name in segment.program.inputs:
            operand = segment.program.operands[name]
            if operand.role == "state":
                values[name] = torch.zeros(step.num_blocks, int(operand.shape[1]), dtype=torch.uint8)
            elif name in step.inputs:
                values[name] = step.inputs[name]
            else:
                values[name] = carried[name][step.rows].to(_dtype(segment.program, name))
        return values


def _dtype(program: Program, name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, program.operands[name].dtype)
    return dtype
