"""A target of our own, as docs/targets.md asks: programs get steps and a kernel file, a backend executes just those.

One kernel a node. Its file lists the ops it may run; its arguments are the operands' addresses in slot order. The backend
knows the program and these steps only: it gives every operand its memory, the arena's offsets included.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsc.compiler.targets import Lowered
from dsc.plugins.formats import parse_format
from dsc.plugins.schema import Weight, folder_of, load_op
from dsc.plugins.stored import StoredWeight
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.expressions import evaluate
from dsc.runtime.program import Program, ProgramNode
from dsc.runtime.ranks.group import Group
from dsc.runtime.shards import Place
from dsc.runtime.steps import Kernel, Null, Pointer, Variant

CUBIN = "kernels/toy.cubin"


class ToyTarget:
    """The compiler's half."""

    def __init__(self, name: str, allow_kernels: Mapping[str, str]) -> None:
        self.prepared = 0

    def prepare(self, programs: Sequence[Program]) -> None:
        self.prepared = len(programs)

    def finish(self, programs: Sequence[Program], folder: Path) -> Lowered:
        assert self.prepared == len(programs)
        (folder / "kernels").mkdir()
        ops = sorted({node.op for program in programs for node in program.nodes})
        (folder / CUBIN).write_text("\n".join(ops))
        return Lowered([self._lower(program) for program in programs], [{"cubin": CUBIN, "entry": op} for op in ops])

    def _lower(self, program: Program) -> Program:
        return replace(program, nodes=tuple(replace(node, variants=_variants(node)) for node in program.nodes))


def _variants(node: ProgramNode) -> tuple[Variant, ...]:
    arguments = tuple(Pointer(name) if name else Null() for name in (*node.inputs, *node.outputs))
    letter = "R" if node.op in ("Sample", "LmHead") else "T"
    step = Kernel(CUBIN, node.op, grid=(letter, 1, 1), block=(1, 1, 1), arguments=arguments)
    return (Variant((), guard=f"{letter} <= 0"), Variant((step,), guard=f"{letter} >= 1"))


class ToyBackend:
    """The runtime's half: see `dsc.runtime.backends.Backend`."""

    def __init__(
        self,
        folder: EngineFolder,
        device: str | None,
        gpu_memory: float | None,
        least_cache_bytes: int,
        *,
        place: Place,
        group: Group | None,
    ) -> None:
        self.device = torch.device("cpu")
        self.folder = folder

    def program(self, name: str) -> ToyRunner:
        return ToyRunner(self.folder.program(name), self.folder)

    def cache_bytes(self) -> int:
        return 1 << 28

    def resident_weight_bytes(self) -> int:
        return sum(entry.bytes for entry in self.folder.manifest.tensors.values())

    def run_ahead(self, programs: Mapping[str, Any]) -> None:
        """Nothing runs ahead of us."""

    def describe(self) -> dict[str, Any]:
        return {}


class ToyRunner:
    """Executes steps on memory of its own."""

    def __init__(self, program: Program, folder: EngineFolder) -> None:
        self.program = program
        self.executed: tuple[str, ...] = ()
        self._ops = set(folder.kernel(CUBIN).decode().split())
        self._arena = torch.full((max(program.arena_bytes, 1),), 0xFF, dtype=torch.uint8)
        self._weights = {name: folder.tensor(o.tensor) for name, o in program.operands.items() if o.role == "weight"}
        self._state: dict[str, torch.Tensor] = {}

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = dict(state)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        memory = {**self._weights, **{n: t for n, t in self._state.items() if n in self.program.operands}, **inputs}
        letters = {
            letter: size
            for name in self.program.inputs
            for letter, size in zip(self.program.operands[name].shape, memory[name].shape, strict=True)
            if isinstance(letter, str)
        }
        executed = []
        for node in self.program.nodes:
            variant = node.variants[int(letters["R" if node.op in ("Sample", "LmHead") else "T"] > 0)]
            for step in variant.steps:
                assert isinstance(step, Kernel)
                assert step.entry in self._ops
                assert evaluate(step.grid[0], letters) > 0
                self._launch(node, step, memory, letters)
            executed.append(node.name)
        self.executed = tuple(executed)
        return {name: memory[name] for name in self.program.outputs}

    def _launch(
        self, node: ProgramNode, step: Kernel, memory: dict[str, torch.Tensor], letters: Mapping[str, int]
    ) -> None:
        op = load_op(step.entry)
        slots = op.slot_names()
        names = [argument.operand if isinstance(argument, Pointer) else "" for argument in step.arguments]
        given = {slot: memory[name] if name else None for slot, name in zip(slots, names, strict=False)}
        operands: dict[str, Any] = {k: v for k, v in node.attributes.items() if not k.endswith("_format")}
        for tensor in op.inputs:
            value: Any = given[tensor.name]
            if isinstance(tensor, Weight) and value is not None:
                format_ = parse_format(str(node.attributes[tensor.format_attribute]))
                value = StoredWeight(format_, value, given[f"{tensor.name}.scales"])
            operands[tensor.name] = value
        reference = importlib.import_module(f"dsc.plugins.{folder_of(op.name)}.reference").reference
        for name, result in zip(names[len(slots) :], reference(**operands), strict=True):
            memory[name] = self._place(name, result, letters)

    def _place(self, name: str, result: torch.Tensor, letters: Mapping[str, int]) -> torch.Tensor:
        """At its offset in the arena, in the shape that the program states."""
        operand = self.program.operands[name]
        assert tuple(
            evaluate(size, {**operand_letters(result, operand.shape), **letters}) for size in operand.shape
        ) == tuple(result.shape)
        if operand.offset is None:
            return result
        place = self._arena[operand.offset : operand.offset + result.nbytes]
        return place.view(result.dtype).view(result.shape).copy_(result)


def operand_letters(result: torch.Tensor, shape: Sequence[int | str]) -> dict[str, int]:
    """N, which only the caches tell."""
    return {size: result.shape[i] for i, size in enumerate(shape) if size == "N"}
