"""One plugin op on a GPU: a program of a single node, compiled for the device at hand, run on poisoned memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.gpu_node import Arch
from dsc.plugins.schema import Attribute, Dim, Type, load_op
from dsc.runtime.expressions import LETTERS
from dsc.runtime.program import Operand, Program, ProgramNode, nbytes

if TYPE_CHECKING:
    from dsc.runtime.cuda.bind import BoundStep
    from support.op_cases import Case

POISON = 0xFF  # as float32 and bfloat16 a NaN, as int32 -1


def hopper_compiler(arch: str) -> CubinCompiler:
    """A compiler for the GPU that tests run on, of what an engine for `arch` consists of."""
    return CubinCompiler(Arch(arch), chip=None if Arch(arch).capability == 90 else Arch("sm_90"))


def case_inputs(case: Case) -> tuple[dict[str, torch.Tensor], Mapping[str, Attribute]]:
    """Inputs by slot and attributes of a case of `support.op_cases`, as GpuOp takes them."""
    node = case.bind("reference")
    slots = {name: node._slot(name) for name in node.op.slot_names()}
    return {name: tensor for name, tensor in slots.items() if tensor is not None}, node.attributes


def check_clear(program: Program, memory: Mapping[str, torch.Tensor]) -> None:
    """After a step, zeroed operands are zero again: the next step finds them as the first one did."""
    zeroed = [name for name, operand in program.operands.items() if operand.role == "zeroed"]
    left = {name: count for name in zeroed if (count := int(memory[name].view(torch.uint8).count_nonzero()))}
    assert not left, f"{program.name}: bytes that are not zero after the step: {left}"


class Cubins:
    """The kernels of a CubinCompiler as an engine folder would serve them."""

    def __init__(self, compiler: CubinCompiler) -> None:
        self._cubins = {built.compiled.cubin: built.cubin for built in compiler.built.values()}

    def kernel(self, name: str) -> bytes:
        return self._cubins[name]


class GpuOp:
    """`GpuOp("RmsNorm", {"x": x, "weight": w}, {"epsilon": 1e-6})()` -> outputs by operand name.

    inputs    by slot name (`w`, `w.scales`); the tensors' dtypes and shapes are the node's types
    bounds    letters larger than the inputs', to run a step smaller than planned
    arch      whose sources to take; those of another architecture than Hopper are compiled for Hopper all the same
    """

    def __init__(
        self,
        op: str,
        inputs: Mapping[str, torch.Tensor],
        attributes: Mapping[str, Attribute],
        *,
        bounds: Mapping[str, int] | None = None,
        arch: str = "sm_90a",
    ) -> None:
        # Programs of one node are also compiled where no cuda-bindings are installed.
        from dsc.runtime.cuda.executor import CudaExecutor, CudaShared

        self.inputs = dict(inputs)
        program = node_program(op, self.inputs, attributes, bounds or {})
        compiler = hopper_compiler(arch)
        (self.program,) = lower_gpu([program], compiler)
        self.compiler = compiler
        device = torch.device("cuda")
        arena = torch.full((max(self.program.arena_bytes, 1),), POISON, dtype=torch.uint8, device=device)
        weights = {name: tensor.to(device).reshape(-1) for name, tensor in self.inputs.items()}
        self.executor = CudaExecutor(self.program, CudaShared(device, weights, Cubins(compiler), arena))
        self.states = {n: weights[n].view(self.inputs[n].shape) for n in program.inputs if self._role(n) == "state"}
        self.executor.set_state(self.states)

    def _role(self, name: str) -> str:
        return self.program.operands[name].role

    def __call__(self, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run once; inputs may be changed by name. Outputs are poisoned before and copied after, zeroed memory is checked."""
        for name, operand in self.program.operands.items():
            if operand.role == "output":
                self.executor._tensors[name].view(torch.uint8).fill_(POISON)
        given = {n: changed.get(n, self.inputs[n]).cuda() for n in self.program.inputs if n not in self.states}
        outputs = self.executor.run(given)
        torch.cuda.synchronize()
        check_clear(self.program, self.executor._tensors)
        return {name: tensor.clone() for name, tensor in outputs.items()}

    def calls(self) -> list[BoundStep]:
        """The bound calls of the last shape, for timing inside a CUDA graph."""
        given = {n: self.inputs[n] for n in self.program.inputs if n not in self.states}
        return self.executor.calls(self.executor._pad(self.executor._letters(given)))


def node_program(
    op_name: str, inputs: Mapping[str, torch.Tensor], attributes: Mapping[str, Attribute], bounds: Mapping[str, int]
) -> Program:
    """A program of one node: what changes from step to step are inputs at their bounds, the rest are weights."""
    op = load_op(op_name)
    slots = op.slot_names()
    letters: dict[str, int] = {}
    types: dict[str, Type] = {}
    symbols = {t.name: t.dims.split() for t in op.inputs}
    for slot, tensor in inputs.items():
        shape: list[Dim] = list(tensor.shape)
        for i, symbol in enumerate(symbols.get(slot, [])):
            if symbol in LETTERS:
                letters[symbol] = max(bounds.get(symbol, 0), tensor.shape[i])
                shape[i] = symbol
        types[slot] = Type(str(tensor.dtype).removeprefix("torch."), tuple(shape))
    if "Q" in bounds:
        letters["Q"] = bounds["Q"]
    made, _ = op.check([types.get(slot) for slot in slots], attributes)
    operands: dict[str, Operand] = {}
    aliased = {t.alias: t.name for t in op.outputs if t.alias}
    for slot, type_ in types.items():
        # Letters only bound inputs that change from step to step; the rest has its place like a weight.
        role = "state" if slot in aliased else "input" if any(isinstance(d, str) for d in type_.shape) else "weight"
        size = nbytes(type_.dtype, type_.shape, letters)
        operands[slot] = Operand(type_.dtype, type_.shape, role, size, tensor=slot if role == "weight" else "")
    outputs = op.outputs_of(attributes)
    for tensor, type_ in zip(outputs, made, strict=True):
        size = nbytes(type_.dtype, type_.shape, letters)
        operands[tensor.name] = Operand(
            type_.dtype, type_.shape, "state" if tensor.alias else "output", size, alias=tensor.alias
        )
    step = [slot for slot in slots if slot in operands and operands[slot].role != "weight"]
    return Program(
        name=op_name,
        onnx_sha256="",
        letters=letters,
        inputs=tuple(step),
        outputs=tuple(t.name for t in outputs),
        operands=operands,
        nodes=(
            ProgramNode(
                name=op_name.lower(),
                op=op_name,
                inputs=tuple(slot if slot in operands else "" for slot in slots),
                outputs=tuple(t.name for t in outputs),
                attributes=dict(attributes),
            ),
        ),
    )
