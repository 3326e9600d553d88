"""Run a program a segment at a time, with one segment's weights in memory: the engine's as stored, and the reference.

The reference is the plugins' reference.py on the checkpoint's values, each weight evaluated when it is read: a matrix, or
one expert of a stack, at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from dsc.compiler.certify.segments import Segment, cut
from dsc.compiler.certify.steps import Step
from dsc.compiler.evaluate import Read, evaluate
from dsc.compiler.ir.simplify import simplify
from dsc.compiler.ir.weight import Expression, Stack, WeightValues
from dsc.plugins.formats import Format
from dsc.plugins.schema import Weight, folder_of, load_op
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.executor import Executor
from dsc.runtime.program import Program, ProgramNode

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


def bind_engine(folder: EngineFolder) -> Bind:
    """Segments of an engine on the CPU, weights as stored; pages of one segment are given back before the next."""
    layouts = {entry.layout for entry in folder.manifest.tensors.values()} - {"row_major"}
    if layouts:
        raise DscError(
            f"weights laid out for the kernels of {folder.manifest.target} cannot be run on the CPU",
            where=str(folder.path),
            wanted="row_major",
            got=", ".join(sorted(layouts)),
        )

    def bind(program: Program) -> RunSegment:
        folder.release_pages()
        executor = Executor(program, folder)
        folder.release_pages()  # of what is packed now
        return executor.run

    return bind


def bind_reference(weights: Mapping[str, WeightValues], read: Read) -> Bind:
    """Segments of a program whose weights are expressions of source tensors, by the plugins' references."""
    return lambda program: _ReferenceRun(program, weights, read)


class SourceWeight:
    """A `StoredWeight` of a checkpoint's values in float32, read when asked. A matrix is kept once it was; experts are not."""

    format = Format("fp32")

    def __init__(self, expression: Expression, read: Read) -> None:
        self._expression, self._read = expression, read

    @property
    def shape(self) -> tuple[int, ...]:
        return self._expression.shape

    def __getitem__(self, expert: int) -> SourceWeight:
        assert isinstance(self._expression, Stack), self._expression
        return SourceWeight(self._expression.parts[expert], self._read)

    @cached_property
    def _values(self) -> torch.Tensor:
        return evaluate(self._expression, self._read).float()

    def dequantize(self) -> torch.Tensor:
        return self._values

    def dequantize_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows one by one: an embedding needs few of its many."""
        unique, places = torch.unique(rows, return_inverse=True)
        values = [evaluate(self._expression, self._read, (row, row + 1)).float() for row in unique.tolist()]
        return torch.cat(values)[places]


class _ReferenceRun:
    """Nodes of a program by their reference.py."""

    def __init__(self, program: Program, weights: Mapping[str, WeightValues], read: Read) -> None:
        self._program, self._weights, self._read = program, weights, read
        self._made: dict[str, Any] = {}

    def __call__(self, inputs: Values) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = dict(inputs)
        for node in self._program.nodes:
            values.update(zip(node.outputs, self._call(node, values), strict=True))
        return {name: values[name] for name in self._program.outputs}

    def _call(self, node: ProgramNode, values: Values) -> tuple[torch.Tensor, ...]:
        op = load_op(node.op)
        slots = dict(zip(op.slot_names(), node.inputs, strict=False))
        formats = {weight.format_attribute for weight in op.weights}
        operands: dict[str, Any] = {name: value for name, value in node.attributes.items() if name not in formats}
        for tensor in op.inputs:
            name = slots.get(tensor.name, "")
            if not name:
                operands[tensor.name] = None
            elif self._program.operands[name].role == "weight":
                operands[tensor.name] = self._weight(self._program.operands[name].tensor, isinstance(tensor, Weight))
            else:
                operands[tensor.name] = values[name]
        reference: Any = importlib.import_module(f"dsc.plugins.{folder_of(op.name)}.reference").reference
        results: tuple[torch.Tensor, ...] = reference(**operands)
        return results

    def _weight(self, name: str, quantizable: bool) -> Any:
        if name not in self._made:
            expression = simplify(self._weights[name].expression)
            self._made[name] = SourceWeight(expression, self._read) if quantizable else evaluate(expression, self._read)
        return self._made[name]
