"""From the steps of a program to calls: expressions evaluated, addresses put in, so that a launch is one driver call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import ScalingType

from dsc.runtime.cuda import driver
from dsc.runtime.cuda.call import Call
from dsc.runtime.errors import DscError
from dsc.runtime.executor import last_reads
from dsc.runtime.expressions import evaluate, parse_guard
from dsc.runtime.program import Program, ProgramNode
from dsc.runtime.steps import (
    SCALED_ROWS,
    Argument,
    Collective,
    Copy,
    Fill,
    Gemm,
    Kernel,
    Matrix,
    Null,
    Pointer,
    Repeat,
    Scalar,
    Step,
    Variant,
)

if TYPE_CHECKING:  # what only ranks need takes long to import
    from dsc.runtime.cuda.collectives import Collectives

_Single = Kernel | Gemm | Collective | Fill | Copy  # every step but a repeat
_SCALARS: dict[str, Callable[[Any], Any]] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}


@dataclass(frozen=True)
class BoundStep:
    """One call with the node it belongs to and a name for profiles."""

    node: str
    name: str
    call: Call


@dataclass(frozen=True)
class Binder:
    """Binds the nodes of one program.

    tensors      every operand's memory, as torch tensors on the device at the letters' bounds
    library      a loaded cubin by its name in the engine
    collectives  how the other ranks are reached; None where there is one
    """

    program: Program
    tensors: Mapping[str, torch.Tensor]
    library: Callable[[str], driver.Library]
    num_sms: int
    collectives: Collectives | None = None

    def bind(self, letters: Mapping[str, int]) -> list[BoundStep]:
        """All calls of a step whose letters have these values, in order."""
        values = {**letters, "SMS": self.num_sms}
        bound: list[BoundStep] = []
        behind_others = False  # several kernels and events of a library: nothing may start before they end
        for node in self.program.nodes:
            for step, at in _flat(self._variant(node, values).steps, values):
                call = self._step(node, step, at, behind_others)
                if call is not None:
                    bound.append(BoundStep(node.name, _name(step), call))
                    behind_others = isinstance(step, Collective)
        return bound

    def _variant(self, node: ProgramNode, values: Mapping[str, int]) -> Variant:
        for variant in node.variants:
            if parse_guard(variant.guard).holds(values):
                return variant
        raise DscError(f"{self.program.name}: {node.name} has no variant for this step", got=str(dict(values)))

    def _step(self, node: ProgramNode, step: _Single, values: Mapping[str, int], behind_others: bool) -> Call | None:
        """The call of one step; None where it has nothing to do."""
        if isinstance(step, Kernel):
            return self._kernel(step, values, step.pdl and not behind_others)
        if isinstance(step, Gemm):
            return self._gemm(step, values)
        if isinstance(step, Fill):
            return self._fill(step, values)
        if isinstance(step, Copy):
            return self._copy(step, values)
        return self._collective(node, step, values)

    def _address(self, pointer: Pointer, values: Mapping[str, int]) -> int:
        return self.tensors[pointer.operand].data_ptr() + evaluate(pointer.offset, values)

    def _kernel(self, step: Kernel, values: Mapping[str, int], pdl: bool) -> Call | None:
        grid = [evaluate(size, values) for size in step.grid]
        if 0 in grid:
            return None  # nothing to do; the driver refuses an empty grid
        function = self.library(step.cubin).function(step.entry, step.shared_bytes)
        config = driver.launch_config(grid, step.block, step.shared_bytes, step.cluster, pdl, step.cooperative)
        holders = [self._argument(argument, values) for argument in step.arguments]
        pointers = (ctypes.c_void_p * max(len(holders), 1))(*[address for address, _ in holders])
        entry = step.entry

        def call(stream: int, keep: Any = holders) -> None:
            driver.launch(config, function, pointers, stream, entry)

        return call

    def _argument(self, argument: Argument, values: Mapping[str, int]) -> tuple[int, Any]:
        """The address of an argument's value, and what must be kept alive for it."""
        if isinstance(argument, Pointer):
            value: Any = ctypes.c_uint64(self._address(argument, values))
        elif isinstance(argument, Scalar):
            text = argument.value
            value = _SCALARS[argument.dtype](text if isinstance(text, float) else evaluate(text, values))
        elif isinstance(argument, Null):
            value = ctypes.c_uint64(0)
        else:
            made = driver.tensor_map(
                argument.dtype,
                self._address(Pointer(argument.operand, argument.offset), values),
                [evaluate(d, values) for d in argument.dims],
                [evaluate(s, values) for s in argument.strides],
                argument.box,
                argument.swizzle,
                argument.l2_bytes,
                argument.out_of_bounds == "nan",
            )
            return int(made.getPtr()), made
        return ctypes.addressof(value), value

    def _bytes(self, pointer: Pointer, count: int, values: Mapping[str, int]) -> torch.Tensor:
        whole = self.tensors[pointer.operand].view(-1).view(torch.uint8)
        start = evaluate(pointer.offset, values)
        return whole[start : start + count]

    def _fill(self, step: Fill, values: Mapping[str, int]) -> Call:
        target = self._bytes(step.destination, evaluate(step.bytes, values), values)
        return lambda stream: target.fill_(step.value)

    def _copy(self, step: Copy, values: Mapping[str, int]) -> Call:
        count = evaluate(step.bytes, values)
        source, target = self._bytes(step.source, count, values), self._bytes(step.destination, count, values)
        return lambda stream: target.copy_(source)

    def _collective(self, node: ProgramNode, step: Collective, values: Mapping[str, int]) -> Call | None:
        where = f"{self.program.name}: {node.name}"
        if self.collectives is None:
            raise DscError(f"{where}: a collective step needs several ranks", got="one rank")
        if step.axis not in ("tensor", "world") or step.op not in ("all_reduce", "all_gather"):
            got = f"{step.op} over {step.axis}"
            raise DscError(
                f"{where}: GPUs have no such step", wanted="all_reduce or all_gather over all ranks", got=got
            )
        count = evaluate(step.count, values)
        if not count:
            return None
        every = count * self.collectives.ranks if step.op == "all_gather" else count
        source = self._elements(step.source, step.dtype, count, values)
        destination = self._elements(step.destination, step.dtype, every, values)
        if step.op == "all_gather":
            return self.collectives.all_gather(source, destination)
        spent = step.source.operand in self._spent[node.name]
        return self.collectives.all_reduce(source, destination, step.reduce, spent)

    def _elements(self, pointer: Pointer, dtype: str, count: int, values: Mapping[str, int]) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        found = self._bytes(pointer, count * kind.itemsize, values).view(kind)
        assert found.numel() == count, (pointer, count, found.shape)
        return found

    @cached_property
    def _spent(self) -> dict[str, list[str]]:
        """By node, operands that nobody reads after it, so that it may leave anything in them."""
        return dict(zip((node.name for node in self.program.nodes), last_reads(self.program), strict=True))

    def _matrix(self, matrix: Matrix, rows: int, cols: int, batch: int, values: Mapping[str, int]) -> torch.Tensor:
        dtype = getattr(torch, matrix.dtype)
        flat = self.tensors[matrix.at.operand].view(-1).view(torch.uint8)[evaluate(matrix.at.offset, values) :]
        flat = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        if matrix.transposed:
            rows, cols = cols, rows
        strides = (evaluate(matrix.batch_stride, values), evaluate(matrix.stride, values), 1)
        view = torch.as_strided(flat, (batch, rows, cols), strides)
        return view.transpose(1, 2) if matrix.transposed else view

    def _gemm(self, step: Gemm, values: Mapping[str, int]) -> Call:
        m, n, k, batch = (evaluate(size, values) for size in (step.m, step.n, step.k, step.batch))
        a, b = self._matrix(step.a, m, k, batch, values), self._matrix(step.b, k, n, batch, values)
        c = self._matrix(step.c, m, n, batch, values)
        if step.a_scales is not None and step.b_scales is not None:
            assert m % SCALED_ROWS == 0, (step.m, m)
            groups = -(-k // 128)
            a_scales = self._matrix(Matrix(step.a_scales, "float32", m, transposed=True), m, groups, 1, values)
            b_scales = Matrix(step.b_scales, "float32", groups, transposed=True)
            return _scaled(a[0], b[0], c[0], a_scales[0], self._matrix(b_scales, groups, -(-n // 128), 1, values)[0])
        if step.beta == 0.0 and step.alpha == 1.0:
            if a.dtype != c.dtype:  # sums are stored as they are
                assert batch == 1, (step.a, step.c)
                return lambda stream: torch.mm(a[0], b[0], c.dtype, out=c[0])
            if batch == 1:
                return lambda stream: torch.mm(a[0], b[0], out=c[0])
            return lambda stream: torch.bmm(a, b, out=c)
        return lambda stream: torch.baddbmm(c, a, b, beta=step.beta, alpha=step.alpha, out=c)


def _name(step: _Single) -> str:
    if isinstance(step, Kernel):
        return step.entry
    return step.op if isinstance(step, Collective) else step.kind


def _flat(steps: tuple[Step, ...], values: Mapping[str, int]) -> Iterator[tuple[_Single, Mapping[str, int]]]:
    """The steps with those of a repeat as often as they run, and the values that each reads."""
    for step in steps:
        if isinstance(step, Repeat):
            for i in range(evaluate(step.count, values)):
                yield from _flat(step.steps, {**values, step.letter: i})
        else:
            yield step, values


def _scaled(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor) -> Call:
    """c = a b of e4m3 codes by cuBLASLt: torch.nn.functional.scaled_mm with memory for its result, which it cannot be given."""
    recipes = [ScalingType.BlockWise1x128.value], [ScalingType.BlockWise128x128.value]
    multiply = partial(torch.ops.aten._scaled_mm_v2.out, a, b, [a_scales], recipes[0], [], [b_scales], recipes[1], [])
    return lambda stream: multiply(None, c.dtype, out=c)
