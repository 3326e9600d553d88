"""Run a program on the CPU: every node is bound once, a step is one pass over a flat list of calls."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dsc.plugins.cpu_node import CpuNode, Run, StepMemo, keep
from dsc.plugins.formats import parse_format
from dsc.plugins.schema import Op, Tensor, Type, Weight, folder_of, load_op
from dsc.plugins.stored import StoredWeight
from dsc.runtime.errors import DscError
from dsc.runtime.expressions import LETTERS, evaluate
from dsc.runtime.program import Program, ProgramNode
from dsc.runtime.weights import TensorSource, Weights, part_name

POISON = 0xFF  # as float32 and bfloat16 a NaN, as int32 -1
MAX_SIZES = 1024  # of steps, remembered as fitting
_ABSENT = 0  # the place that always holds None

_Given = tuple[str, torch.dtype, torch.Size]


@dataclass(frozen=True, slots=True)
class _Call:
    """One bound node: places of its operands in the step's values, and the places nobody reads after it."""

    name: str
    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]


class Executor:
    """A program bound to its weights.

    shared   weights of the engine's other programs; packed and kept once
    arena    for tests: put every intermediate at its planned offset, poison memory before it is written and after its
             last reader, so that a wrong memory plan shows in the results

    `executed` names the nodes of the last step, in order.
    """

    def __init__(
        self,
        program: Program,
        source: TensorSource,
        device: str = "cpu",
        shared: Weights | None = None,
        arena: bool = False,
    ) -> None:
        if device != "cpu":
            raise DscError(f"programs of target cpu cannot run on {device}", wanted="cpu", got=device)
        self.program = program
        self.executed: tuple[str, ...] = ()
        self._weights = shared if shared is not None else Weights(source)
        self._places = {name: place for place, name in enumerate(program.operands, _ABSENT + 1)}
        self._state: dict[str, torch.Tensor] = {}
        self._inputs = [(name, self._places[name], *_checked(program, name)) for name in program.inputs]
        last = last_reads(program)
        self._calls = [self._bind(node, last[i]) for i, node in enumerate(program.nodes)]
        self._names = tuple(node.name for node in program.nodes)
        self._fitting: set[tuple[_Given, ...]] = set()
        self._arena = _Arena(program, self._places) if arena else None

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Caches for all steps to come; a step's inputs may leave them out then."""
        self._state = {name: tensor for name, tensor in state.items() if name in self._places}
        letters: dict[str, int] = {}
        for name, _, dtype, shape in self._inputs:
            if name in self._state:
                self._check(name, self._state[name], dtype, shape, letters)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One step. Inputs by name, caches are written in place. Raises DscError naming an input that does not fit."""
        values: list[torch.Tensor | None] = [None] * (len(self._places) + 1)
        given = []
        for name, place, *_ in self._inputs:
            tensor = inputs.get(name)
            if tensor is None:
                tensor = self._state.get(name)
                if tensor is None:
                    raise self._fault(name, "is missing", ", ".join(n for n, *_ in self._inputs), "")
            else:
                given.append((name, tensor.dtype, tensor.shape))
            values[place] = tensor
        self._check_all(inputs, tuple(given))
        if self._arena is None:
            self._run(values)
        else:
            self._arena.run(self._calls, values)
        self.executed = self._names
        return {name: values[self._places[name]] for name in self.program.outputs}  # type: ignore[misc]

    def _run(self, values: list[torch.Tensor | None]) -> None:
        step = StepMemo()
        for call in self._calls:
            results = call.run(step, *[values[place] for place in call.reads])
            for place, result in zip(call.writes, results, strict=True):
                values[place] = result
            for place in call.frees:
                values[place] = None

    # -- inputs

    def _check_all(self, inputs: Mapping[str, torch.Tensor], given: tuple[_Given, ...]) -> None:
        """All inputs, once for each of the sizes that steps come in."""
        if given in self._fitting:
            return
        letters: dict[str, int] = {}
        for name, _, dtype, shape in self._inputs:
            tensor = inputs.get(name)
            if tensor is not None:
                self._check(name, tensor, dtype, shape, letters)
        if "B1" in letters and letters["B1"] != letters.get("B", letters["B1"] - 1) + 1:
            raise self._fault("query_starts", "has another length", f"{letters['B']} + 1", str(letters["B1"]))
        if len(self._fitting) == MAX_SIZES:
            self._fitting.clear()
        self._fitting.add(given)

    def _check(
        self, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | str, ...], letters: dict[str, int]
    ) -> None:
        if tensor.dtype is not dtype:
            raise self._fault(name, "is of another dtype", _dtype_name(dtype), _dtype_name(tensor.dtype))
        got = tensor.shape
        if len(got) != len(shape):
            raise self._fault(name, "is of another shape", _shown(shape), str(list(got)))
        for want, size in zip(shape, got, strict=True):
            if isinstance(want, str):
                if want in LETTERS:
                    known = letters.setdefault(want, size)
                    if known == size:
                        bound = self.program.letters.get(want, size)
                        # The runtime sizes the caches; every other letter has the bound the memory plan was made for.
                        if size <= bound or want == "N":
                            continue
                        raise self._fault(name, f"is too large: {want}", f"{LETTERS[want]} <= {bound}", str(size))
                    raise self._fault(name, f"does not fit the other inputs: {want}", str(known), str(size))
                want = evaluate(want, letters)
            if want != size:
                raise self._fault(name, "is of another shape", _shown(shape), str(list(got)))

    def _fault(self, name: str, what: str, wanted: str, got: str) -> DscError:
        return DscError(f"{self.program.name}: input {name} {what}", wanted=wanted, got=got)

    # -- binding

    def _bind(self, node: ProgramNode, frees: list[str]) -> _Call:
        op = self._checked_op(node)
        slots = dict(zip(op.slot_names(), (*node.inputs, *[""] * len(op.slot_names())), strict=False))
        constant = {slot for slot, name in slots.items() if name and self.program.operands[name].role == "weight"}
        cpu_node = self._cpu_node(op, node, slots, constant)
        step_operands = [t.name for t in op.inputs if t.name not in constant and (slots[t.name] or _of_step(t))]
        try:
            run = _find_bind(node.op)(cpu_node) or _reference_run(op, cpu_node, step_operands)
        except KeyError as error:
            raise self._misfit(node, f"its input {error.args[0]} is no weight") from error
        return _Call(
            name=node.name,
            run=run,
            reads=tuple(self._places.get(slots[name], _ABSENT) for name in step_operands),
            writes=tuple(self._places[name] for name in node.outputs),
            frees=tuple(self._places[name] for name in frees),
        )

    def _checked_op(self, node: ProgramNode) -> Op:
        """The op of a node, whose attributes and operands are as its schema says; DscError otherwise."""
        operands = self.program.operands

        def type_of(name: str) -> Type | None:
            return Type(operands[name].dtype, operands[name].shape) if name else None

        try:
            op = load_op(node.op)
            given, _ = op.check([type_of(name) for name in node.inputs], node.attributes)
            if given != (made := [type_of(name) for name in node.outputs]):
                raise self._misfit(node, f"it gives {_types(given)}, not {_types(made)}")
        except (ValueError, TypeError, IndexError) as error:  # SchemaError, or what a schema reckons with
            raise self._misfit(node, str(error)) from error
        slots = dict(zip(op.slot_names(), node.inputs, strict=False))
        for weight in op.weights:
            if slots.get(weight.name) and operands[slots[weight.name]].role != "weight":
                raise self._misfit(node, f"its input {weight.name} is no weight")
        return op

    def _misfit(self, node: ProgramNode, got: str) -> DscError:
        return DscError(f"{self.program.name}: node {node.name} does not fit its op dsc.{node.op}", got=got)

    def _cpu_node(self, op: Op, node: ProgramNode, slots: Mapping[str, str], constant: set[str]) -> CpuNode:
        operands = self.program.operands
        parts = {slot: operands[slots[slot]] for slot in constant}
        weights, constants = {}, {}
        for tensor in op.inputs:
            if tensor.name not in constant:
                continue
            if isinstance(tensor, Weight):
                scales = parts.get(f"{tensor.name}.scales")
                weights[tensor.name] = StoredWeight(
                    parse_format(str(node.attributes[tensor.format_attribute])),
                    self._weights.stored(parts[tensor.name]),
                    None if scales is None else self._weights.stored(scales),
                )
            else:
                constants[tensor.name] = self._weights.constant(parts[tensor.name])
        named = {**slots, **dict(zip((t.name for t in op.outputs), node.outputs, strict=False))}
        types = {slot: Type(operands[name].dtype, operands[name].shape) for slot, name in named.items() if name}
        return CpuNode(
            name=node.name,
            op=node.op,
            attributes=node.attributes,
            types=types,
            weights=weights,
            constants=constants,
            tensor_names={name: part_name(parts[name]) for name in (*weights, *constants)},
            packs=self._weights.packs,
        )


def _types(types: Sequence[Type | None]) -> str:
    return ", ".join(map(str, types)) or "nothing"


class _Arena:
    """One block of memory in which every intermediate has its planned place."""

    def __init__(self, program: Program, places: Mapping[str, int]) -> None:
        self._memory = torch.full((max(program.arena_bytes, 1),), POISON, dtype=torch.uint8)
        self._spans = {
            places[name]: (operand.offset, operand.bytes)
            for name, operand in program.operands.items()
            if operand.offset is not None
        }

    def run(self, calls: list[_Call], values: list[torch.Tensor | None]) -> None:
        step = StepMemo()
        for call in calls:
            for place in call.writes:
                self._poison(place)
            results = call.run(step, *[values[place] for place in call.reads])
            for place, result in zip(call.writes, results, strict=True):
                values[place] = self._put(call.name, place, result)
            for place in call.frees:
                self._poison(place)
                values[place] = None

    def _poison(self, place: int) -> None:
        if place in self._spans:
            offset, size = self._spans[place]
            self._memory[offset : offset + size] = POISON

    def _put(self, node: str, place: int, tensor: torch.Tensor) -> torch.Tensor:
        if place not in self._spans:
            return tensor
        offset, size = self._spans[place]
        assert tensor.nbytes <= size, f"{node}: {tensor.nbytes} bytes, {size} planned"
        target = self._memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return target.copy_(tensor)


def last_reads(program: Program) -> list[list[str]]:
    """Per node, the intermediates whose memory no later node reads, aliases counted as their root."""
    last: dict[str, int] = {}
    members: dict[str, set[str]] = {}
    for i, node in enumerate(program.nodes):
        for name in (*filter(None, node.inputs), *node.outputs):
            last[program.root(name)] = i
            members.setdefault(program.root(name), set()).add(name)
    frees: list[list[str]] = [[] for _ in program.nodes]
    for root, i in last.items():
        if program.operands[root].role == "activation" and root not in program.outputs:
            frees[i].extend(sorted(members[root]))
    return frees


def _of_step(tensor: Tensor) -> bool:
    """Whether an operand would come with each step, were it not absent: one of its sizes is a letter of the step."""
    return any(dim in LETTERS for dim in tensor.dims.split())


def _checked(program: Program, name: str) -> tuple[torch.dtype, tuple[int | str, ...]]:
    operand = program.operands[name]
    return getattr(torch, operand.dtype), operand.shape


def _shown(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _find_bind(op_name: str) -> Callable[[CpuNode], Run | None]:
    """`bind` of the op's cpu.py; one that binds nothing where the op has none."""
    name = f"dsc.plugins.{folder_of(load_op(op_name).name)}.cpu"
    if importlib.util.find_spec(name) is None:
        return lambda node: None
    bind: Callable[[CpuNode], Run | None] = importlib.import_module(name).bind
    return bind


def _reference_run(op: Op, node: CpuNode, step_operands: list[str]) -> Run:
    """The op's reference as a call; weights stay as they are stored."""
    reference: Any = importlib.import_module(f"dsc.plugins.{folder_of(op.name)}.reference").reference
    formats = {weight.format_attribute for weight in op.weights}
    fixed: dict[str, Any] = {name: value for name, value in node.attributes.items() if name not in formats}
    for tensor in op.inputs:
        if tensor.name in node.weights:
            fixed[tensor.name] = node.pack(tensor.name, keep)
        elif tensor.name not in step_operands:
            fixed[tensor.name] = node.constants.get(tensor.name)

    def run(step: StepMemo, *operands: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = reference(**fixed, **dict(zip(step_operands, operands, strict=True)))
        return results

    return run
