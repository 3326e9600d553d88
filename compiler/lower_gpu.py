"""A program for a GPU: every node gets its kernels' steps, and the arena the scratch memory they ask for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsc.compiler.codegen import CubinCompiler
from dsc.plugins.gpu_node import GpuNode
from dsc.plugins.schema import Type, folder_of, load_op
from dsc.runtime.errors import DscError, raise_all
from dsc.runtime.program import Operand, Program, ProgramNode, nbytes

ALIGN = 256


def lower_gpu(programs: list[Program], compiler: CubinCompiler) -> list[Program]:
    """The same programs with kernels, compiled for the compiler's target.

    Raises DscError naming every op that has no kernel.
    """
    raise_all(f"target {compiler.arch.name}", _missing(programs, compiler.arch.name))
    for program in programs:
        _lower_program(program, compiler)
    compiler.build()
    return [_lower_program(program, compiler) for program in programs]


def kernel_report(compiler: CubinCompiler, allowed: Mapping[str, str]) -> list[dict[str, Any]]:
    """One record a cubin: what must be known of it and takes a disassembler.

    [{cubin, entry, registers, stack_bytes, static_shared_bytes, tensor_cores, fp8, remedy, allowed}]: opcodes that multiply
    matrices, instructions on 8-bit floats with their modifiers, what kept the kernel from spilling where it would have, and
    why it may spill or miss its instruction (mostly both "")
    """
    contents = compiler.contents()
    return [
        {
            "cubin": built.compiled.cubin,
            "entry": built.compiled.entry,
            "registers": built.resources.registers,
            "stack_bytes": built.resources.stack_bytes,
            "static_shared_bytes": built.resources.shared_bytes,
            "tensor_cores": sorted({name.partition(".")[0] for name in contents[source].tensor_cores}),
            "fp8": list(contents[source].fp8),
            "remedy": built.remedy,
            "allowed": allowed.get(built.compiled.entry, ""),
        }
        for source, built in sorted(compiler.built.items(), key=lambda item: item[1].compiled.cubin)
    ]


def _missing(programs: list[Program], target: str) -> list[DscError]:
    ops = sorted({node.op for program in programs for node in program.nodes})
    return [
        DscError(f"op {op} has no kernel for target {target}", wanted=f"plugins/{folder_of(op)}/kernel.py")
        for op in ops
        if importlib.util.find_spec(f"dsc.plugins.{folder_of(op)}.kernel") is None
    ]


def _lower_program(program: Program, compiler: CubinCompiler) -> Program:
    operands = dict(program.operands)
    nodes = []
    base = -(-program.arena_bytes // ALIGN) * ALIGN
    end = base
    for node in program.nodes:
        gpu_node = _gpu_node(program, node, compiler)
        variants = importlib.import_module(f"dsc.plugins.{folder_of(node.op)}.kernel").lower(gpu_node)
        nodes.append(replace(node, variants=tuple(variants)))
        at = base  # scratch lives while its node runs, so every node's begins at the same place
        for name, type_ in gpu_node.scratch.items():
            size = nbytes(type_.dtype, type_.shape, program.letters)
            operands[name] = Operand(type_.dtype, type_.shape, "scratch", size, offset=at)
            at += -(-size // ALIGN) * ALIGN
        end = max(end, at)
        for name, type_ in gpu_node.zeroed.items():
            size = nbytes(type_.dtype, type_.shape, program.letters)
            operands[name] = Operand(type_.dtype, type_.shape, "zeroed", size)
    lowered = replace(program, operands=operands, nodes=tuple(nodes), arena_bytes=end)
    lowered.check(program.name)
    return lowered


def _gpu_node(program: Program, node: ProgramNode, compiler: CubinCompiler) -> GpuNode:
    op = load_op(node.op)
    slots = op.slot_names()
    types = {
        name: Type(program.operands[name].dtype, program.operands[name].shape)
        for name in (*filter(None, node.inputs), *node.outputs)
    }
    _, bound = op.check([types[name] if name else None for name in node.inputs], node.attributes)
    return GpuNode(
        name=node.name,
        op=node.op,
        attributes=node.attributes,
        dims=bound,
        inputs={slot: name for slot, name in zip(slots, node.inputs, strict=False) if name},
        outputs={
            operand.name: name for operand, name in zip(op.outputs_of(node.attributes), node.outputs, strict=True)
        },
        types=types,
        arch=compiler.arch,
        compiler=compiler,
        bounds=program.letters,
    )
