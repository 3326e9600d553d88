"""An sm_80 engine's kernels on the CPU: every Triton step of a node interpreted, against the op's reference.

As a program, with TRITON_INTERPRET=1 in the environment: `python -m support.interpreted_ops OP...` fails where an op
differs. What is interpreted is what is lowered for sm_80 (sources, tiles, splits, work lists, arguments); decoding is plain
instead of in assembly. CUDA C++ is not interpreted: Moe's work list is made by its source compiled for the CPU, at widths
that no other source of it knows.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.resources
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.communicator import communicating, communicator
from dsc.plugins.gpu_node import TRITON_TYPES, Arch, Compiled, CudaSource, TritonSource
from dsc.plugins.stored import norm_codes
from dsc.runtime.expressions import LETTERS, evaluate, parse_guard
from dsc.runtime.program import Program
from dsc.runtime.steps import Collective, Gemm, Kernel, Matrix, Pointer, Repeat, Scalar, Step
from support.compare import compare
from support.cuda_on_cpu import cuda_on_cpu
from support.gpu import POISON, case_inputs, check_clear, node_program
from support.moe_rows import check_moe_rows
from support.op_cases import ACROSS_RANKS, CASES, Case, Draw, formats_of, model_widths

FORMATS = ("bf16", "fp8", "fp8:ue8m0", "wint8", "wint4:128", "mixed")
QUANTIZE = ("fp8", "fp8:ue8m0")
FEWER = {
    "Embedding": ("bf16",),
    "MlaAttention": ("bf16", "wint8"),
    "Moe": ("bf16", "fp8", "fp8:ue8m0", "wint8", "wint4:64"),
}  # embeddings are not quantized; attention takes long; experts have gate and up in one format
TOKENS = (1, 3, 33)
SMS = 4
_DTYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}


@dataclass
class Sources:
    """Stands in for a CubinCompiler: keeps what would be compiled."""

    arch: Arch
    by_name: dict[str, TritonSource | CudaSource] = field(default_factory=dict)

    def compile(self, source: TritonSource | CudaSource) -> Compiled:
        name = next((n for n, s in self.by_name.items() if s == source), f"kernels/{len(self.by_name)}.cubin")
        self.by_name[name] = source
        return Compiled(name, source.function if isinstance(source, TritonSource) else source.entry, threads=32)

    def build(self) -> None:
        """Nothing is compiled."""


class InterpretedOp:
    """One node, lowered for sm_80 and run on the CPU on poisoned memory."""

    def __init__(self, case: Case, bounds: Mapping[str, int]) -> None:
        self.inputs, attributes = case_inputs(case)
        self.sources: Any = Sources(Arch("sm_80"))
        (self.program,) = lower_gpu([node_program(case.op, self.inputs, attributes, bounds)], self.sources)
        self.memory = {}
        for name, operand in self.program.operands.items():
            if name in self.inputs:
                self.memory[name] = self.inputs[name].clone().reshape(-1).view(torch.uint8)
            elif not operand.alias:
                fill = 0 if operand.role == "zeroed" else POISON
                self.memory[name] = torch.full((operand.bytes + 16,), fill, dtype=torch.uint8)
        for name in self.program.operands:
            self.memory[name] = self.memory[self.program.root(name)]

    def __call__(self) -> dict[str, torch.Tensor]:
        letters = letters_of(self.program, self.inputs) | {"SMS": SMS}
        (node,) = self.program.nodes
        steps = next(v for v in node.variants if parse_guard(v.guard).holds(letters)).steps
        self._run(steps, letters)
        check_clear(self.program, self.memory)
        return {name: self._output(name, letters) for name in self.program.outputs}

    def _output(self, name: str, letters: Mapping[str, int]) -> torch.Tensor:
        operand = self.program.operands[name]
        dtype, shape = getattr(torch, operand.dtype), [evaluate(size, letters) for size in operand.shape]
        return self.memory[name].view(dtype)[: math.prod(shape)].view(shape)

    def _run(self, steps: Sequence[Step], letters: Mapping[str, int]) -> None:
        for step in steps:
            if isinstance(step, Repeat):
                for i in range(evaluate(step.count, letters)):
                    self._run(step.steps, {**letters, step.letter: i})
            elif isinstance(step, Kernel):
                self._launch(step, letters)
            elif isinstance(step, Gemm):
                self._gemm(step, letters)
            elif isinstance(step, Collective):
                self._collective(step, letters)
            else:
                raise AssertionError(f"no node has had a {step.kind}")

    def _launch(self, step: Kernel, letters: Mapping[str, int]) -> None:
        source = self.sources.by_name[step.cubin]
        if isinstance(source, CudaSource):
            self._compiled(source, step, letters)
            return
        function = getattr(importlib.import_module(source.module), source.function)
        given: dict[str, Any] = dict(source.constants)
        for (name, type_), argument in zip(source.signature, step.arguments, strict=True):
            if isinstance(argument, Pointer):
                dtype = getattr(torch, _DTYPES[type_.removeprefix("*")])
                given[name] = self.memory[argument.operand][evaluate(argument.offset, letters) :].view(dtype)
            else:
                assert isinstance(argument, Scalar), argument
                value = argument.value
                given[name] = value if isinstance(value, float) else evaluate(value, letters)
        grid = tuple(evaluate(size, letters) for size in step.grid)
        function[grid](*[given[name] for name in function.arg_names])

    def _compiled(self, source: CudaSource, step: Kernel, letters: Mapping[str, int]) -> None:
        assert source.entry == "moe_plan", f"{source.entry} is CUDA C++"
        path = importlib.resources.files(source.module.rpartition(".")[0]) / source.file
        defines = tuple((name, int(value)) for name, value in source.defines)
        threads, count = step.block[0], len(step.arguments)
        call = cuda_on_cpu(Path(str(path)), source.entry, defines, threads, count, "static")
        values = []
        for argument in step.arguments:
            if isinstance(argument, Pointer):
                values.append(self.memory[argument.operand].data_ptr() + evaluate(argument.offset, letters))
            else:
                assert isinstance(argument, Scalar), argument
                values.append(evaluate(argument.value, letters))
        call(evaluate(step.grid[0], letters), *map(ctypes.c_void_p, values))

    def _collective(self, step: Collective, letters: Mapping[str, int]) -> None:
        assert (step.axis, step.reduce) == ("tensor", "sum"), step
        dtype, count = getattr(torch, step.dtype), evaluate(step.count, letters)
        source, destination = (
            self.memory[at.operand][evaluate(at.offset, letters) :].view(dtype)
            for at in (step.source, step.destination)
        )
        parts = [part.reshape(-1) for part in communicator().all_gather(source[:count])]
        if step.op == "all_gather":
            destination[: count * len(parts)] = torch.cat(parts)
        else:
            assert step.op == "all_reduce", step
            destination[:count] = reduce(torch.add, [part.float() for part in parts]).to(dtype)

    def _gemm(self, step: Gemm, letters: Mapping[str, int]) -> None:
        m, n, k = (evaluate(size, letters) for size in (step.m, step.n, step.k))
        assert (step.batch, step.alpha, step.beta) == (1, 1.0, 0.0), step
        a, b, c = (self._matrix(*args, letters) for args in ((step.a, m, k), (step.b, k, n), (step.c, m, n)))
        c.copy_(a.float() @ b.float())

    def _matrix(self, matrix: Matrix, rows: int, columns: int, letters: Mapping[str, int]) -> torch.Tensor:
        flat = self.memory[matrix.at.operand][evaluate(matrix.at.offset, letters) :].view(getattr(torch, matrix.dtype))
        size = (columns, rows) if matrix.transposed else (rows, columns)
        view = torch.as_strided(flat, size, (evaluate(matrix.stride, letters), 1))
        return view.T if matrix.transposed else view


def letters_of(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The step's letters: the program's bounds, and what the inputs' shapes say."""
    letters = dict(program.letters)
    for name in program.inputs:
        shape = program.operands[name].shape
        letters |= {letter: size for letter, size in zip(shape, inputs[name].shape, strict=True) if letter in LETTERS}
    return letters


def check(op: str, format_: str, dtype: torch.dtype, tokens: int, damaged: bool = False) -> None:
    """Raise AssertionError where the interpreted kernels leave the reference's tolerance; `damaged`: a few inputs are 0."""
    with nullcontext() if op == "Moe" else model_widths():
        case = CASES[op](Draw(tokens, dtype, format_, torch.Generator().manual_seed(tokens + 1)))
    compare_op(case, dtype, format_, tokens, damaged)


def check_split(format_: str, dtype: torch.dtype) -> None:
    """Linear over a width whose sums are of several programs, which count in zeroed memory."""
    draw = Draw(3, dtype, format_, torch.Generator().manual_seed(1))
    case = Case("Linear", {"x": draw.activations(3, 1600), "w": draw.weight(72, 1600)}, {"y": "linear"}, {})
    node = compare_op(case, dtype, format_, 3)
    assert any(operand.role == "zeroed" for operand in node.program.operands.values()), format_


@dataclass(frozen=True)
class Among:
    """A communicator whose other ranks have said all they say."""

    rank: int
    others: Sequence[torch.Tensor]

    @property
    def ranks(self) -> int:
        return len(self.others) + 1

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return [*self.others[: self.rank], x.view_as(self.others[0]), *self.others[self.rank :]]


def check_ranks(rows: int, dtype: torch.dtype) -> None:
    """AllReduce, and GatherLogits with parts that end within a program's block, within and before the last rank."""
    draw = Draw(rows, dtype, "fp32", torch.Generator().manual_seed(rows))
    x, *others = (draw.activations(rows, 512) for _ in range(3))
    case = Case("AllReduce", {"x": x}, {"y": "copy"}, {"ranks": 3})
    with communicating(Among(1, others)):
        compare_op(case, dtype, "fp32", rows)
    for vocabulary in (2400, 1600):
        part, *others = (torch.randn(rows, 896, generator=draw.generator) for _ in range(3))
        attributes = {"ranks": 3, "vocabulary": vocabulary}
        for rank in range(3):
            case = Case("GatherLogits", {"part": part}, {"logits": "copy"}, attributes)
            with communicating(Among(rank, others)):
                compare_op(case, torch.float32, "fp32", rows)


def check_gathered() -> None:
    """A head on so many rows that they are gathered for cuBLAS."""
    draw = Draw(40, torch.bfloat16, "bf16", torch.Generator().manual_seed(2))
    operands = {"hidden": draw.activations(40, 512), "logit_rows": draw.integers(0, 40, 66), "w": draw.weight(112, 512)}
    node = compare_op(Case("LmHead", operands, {"logits": "linear"}, {}), torch.bfloat16, "bf16", 66)
    assert "lmhead/w.gathered" in node.program.operands


def check_codes(op: str, quantize: str, dtype: torch.dtype, tokens: int, width: int) -> None:
    """A norm's codes and scales are those of the y that it made, bit for bit; the last row's are mostly below 2^-6."""
    draw = Draw(tokens, dtype, "bf16", torch.Generator().manual_seed(width))
    operands = {"x": draw.activations(tokens, width), "weight": draw.floats(width) + 0.5}
    operands["x"][:1] = 0.0
    operands["x"][-1:, 1:] /= 500
    if op == "AddRmsNorm":
        operands["residual"] = operands["x"].flip(0)
    case = Case(op, operands, {"y": "norm", "sum": "copy"}, {"epsilon": 1e-6, "quantize": quantize}, ("weight",))
    got, want = InterpretedOp(case, {"T": 64, "B": 4, "R": 64})(), case.bind("reference")()
    what = f"dsc.{op}, {quantize}, {tokens} x {width}, {dtype}"
    compare(case, "y", got["y"], want["y"], dtype, what)
    codes, scales = norm_codes(got["y"], quantize)
    assert torch.equal(got["codes"].view(torch.uint8), codes.view(torch.uint8)), what
    assert torch.equal(got["scales"], scales), what


def compare_op(case: Case, dtype: torch.dtype, format_: str, tokens: int, damaged: bool = False) -> InterpretedOp:
    """Run a case interpreted, compare every output with the reference's; the node that ran."""
    want = case.bind("reference")()
    node = InterpretedOp(case, {"T": 64, "B": 4, "R": 64})
    if damaged:
        node.memory[next(iter(node.inputs))][:64] = 0
    for name, value in node().items():
        what = f"dsc.{case.op}.{name}, {tokens} tokens, {format_}, {dtype}"
        if case.op == "Moe":
            check_moe_rows(value, want[name], case.operands, what)
        else:
            compare(case, name, value, want[name], dtype, what)
    return node


def main(ops: Sequence[str], damaged: bool = False) -> None:
    """Check ops in bfloat16 in every format, and in float32."""
    for op in ops:
        formats = FEWER.get(op) or [f for f in FORMATS if f in formats_of(op)] or ["bf16"]
        kinds = [*((format_, torch.bfloat16) for format_ in formats), ("fp32", torch.float32)]
        for format_, dtype in kinds:
            for tokens in TOKENS:
                check(op, format_, dtype, tokens, damaged)
            if op == "Linear":
                check_split(format_, dtype)
            if op == "LmHead" and (format_, dtype) == ("bf16", torch.bfloat16):
                check_gathered()
        if op in ACROSS_RANKS:
            check_ranks(1, torch.float32)
            check_ranks(5, torch.bfloat16)
        for quantize in QUANTIZE if op.endswith("RmsNorm") else ():
            for dtype in (torch.bfloat16, torch.float32):
                for tokens, width in ((1, 7168), (3, 2048), (33, 200), (3, 96)):
                    check_codes(op, quantize, dtype, tokens, width)
        print(f"{op}: {len(kinds)} kinds fit")


def _parameters(function: InterpretedFunction) -> list[SimpleNamespace]:
    """What a `@triton.jit` function says of its parameters when it is not interpreted."""
    annotations = function.fn.__annotations__
    return [
        SimpleNamespace(name=name, is_constexpr="constexpr" in str(annotations.get(name, "")))
        for name in function.arg_names
    ]


def _mend_interpreter() -> None:
    """Triton 3.6's interpreter cannot multiply bfloat16, rounds to it towards zero, and needs an older numpy for bounds."""
    builder, index, patch = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor, tl.bfloat16
    cast, dot = builder.cast_impl, builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != patch:
            return handle
        values = torch.from_numpy(np.ascontiguousarray(handle.data)).view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(values.reshape(handle.data.shape), tl.float32)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        source = widened(source)
        if dtype.scalar != patch:
            return cast(self, source, dtype)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).float().to(torch.bfloat16)
        return interpreter.TensorHandle(values.view(torch.uint16).numpy().reshape(source.data.shape), patch)

    def create_dot(self: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
        return dot(self, widened(a), widened(b), sums, *options)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        index(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.cast_impl, builder.create_dot, interpreter._patch_lang_tensor = cast_impl, create_dot, patch_tensor
    InterpretedFunction.params = property(_parameters)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    _mend_interpreter()
    main([name for name in sys.argv[1:] if name != "--damaged"], "--damaged" in sys.argv)
