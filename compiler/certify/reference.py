"""The unquantized model, a segment at a time: the plugins' reference.py on the checkpoint's values, in float32.

A weight is evaluated when it is read, a matrix or one expert of a stack at a time, and let go with the node that reads it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dsc.compiler.certify.runners import Bind, RunSegment, Values
from dsc.compiler.certify.segments import HEAD_OPS
from dsc.compiler.evaluate import evaluate, row_blocks
from dsc.compiler.ir.simplify import simplify
from dsc.compiler.ir.weight import Expression, Stack, WeightValues
from dsc.compiler.unpack import Read
from dsc.plugins.formats import Format
from dsc.plugins.schema import Weight, folder_of, load_op
from dsc.runtime.executor import last_reads
from dsc.runtime.program import Program, ProgramNode

CPU = torch.device("cpu")


def bind_reference(weights: Mapping[str, WeightValues], read: Read, device: torch.device = CPU) -> Bind:
    """Segments of a program whose weights are expressions of source tensors, computed on `device`; results on the CPU."""

    def read_there(name: str, rows: slice | None) -> torch.Tensor:
        with CPU:  # files are read into its memory, whatever the default is
            return read(name, rows).to(device)

    def bind(program: Program) -> RunSegment:
        return _Reference(program, weights, read_there, device)

    return bind


class SourceWeight:
    """A `StoredWeight` of a checkpoint's values in float32, evaluated where `read` puts the source tensors.

    keeps  hold the values once they were asked for
    """

    format = Format("fp32")

    def __init__(self, expression: Expression, read: Read, device: torch.device, keeps: bool = False) -> None:
        self._expression, self._read, self._device, self._keeps = expression, read, device, keeps
        self._values: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._expression.shape

    def __getitem__(self, expert: int) -> SourceWeight:
        assert isinstance(self._expression, Stack), self._expression
        return SourceWeight(self._expression.parts[expert], self._read, self._device)

    def dequantize(self) -> torch.Tensor:
        if self._values is not None:
            return self._values
        values = torch.empty(self.shape, dtype=torch.float32, device=self._device)
        for start, stop in row_blocks(self.shape):
            values[start:stop] = evaluate(self._expression, self._read, (start, stop))
        if self._keeps:
            self._values = values
        return values

    def dequantize_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows one by one: an embedding needs few of its many."""
        unique, places = torch.unique(rows, return_inverse=True)
        values = [evaluate(self._expression, self._read, (row, row + 1)).float() for row in unique.tolist()]
        return torch.cat(values)[places]


class _Reference:
    """Nodes of a program by their reference.py. The head's weight is kept: it is run on some rows after the other."""

    def __init__(self, program: Program, weights: Mapping[str, WeightValues], read: Read, device: torch.device) -> None:
        self._program, self._weights, self._read, self._device = program, weights, read, device
        self._frees = last_reads(program)
        self._made: dict[str, Any] = {}

    def __call__(self, inputs: Values) -> dict[str, torch.Tensor]:
        values = {name: rows.to(self._device) for name, rows in inputs.items()}
        with _whole_float32(), self._device:  # what a reference makes itself is made there too
            for node, frees in zip(self._program.nodes, self._frees, strict=True):
                values.update(zip(node.outputs, self._call(node, values), strict=True))
                for name in frees:
                    del values[name]
        return {name: values[name].to(CPU) for name in self._program.outputs}

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
                stored = self._program.operands[name].tensor
                operands[tensor.name] = self._weight(stored, isinstance(tensor, Weight), node.op in HEAD_OPS)
            else:
                operands[tensor.name] = values[name]
        reference: Any = importlib.import_module(f"dsc.plugins.{folder_of(op.name)}.reference").reference
        results: tuple[torch.Tensor, ...] = reference(**operands)
        return results

    def _weight(self, name: str, quantizable: bool, keeps: bool) -> Any:
        if name not in self._made:
            expression = simplify(self._weights[name].expression)
            self._made[name] = (
                SourceWeight(expression, self._read, self._device, keeps)
                if quantizable
                else evaluate(expression, self._read).to(self._device)
            )
        return self._made[name]


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Products of float32 in float32: no TF32, and no bfloat16, whatever the process has allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
