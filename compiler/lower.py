"""A final graph becomes a program: operands with roles and places, plugin nodes in order, nothing of ONNX left."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from dsc.compiler.ir.graph import Graph, Node, Tensor, is_plugin, is_weight, op_name, schema_of, type_of
from dsc.compiler.memory import check_places
from dsc.runtime.errors import DscError, raise_all
from dsc.runtime.expressions import LETTERS
from dsc.runtime.program import Operand, Program, ProgramNode, nbytes


def lower(graph: Graph, onnx_sha256: str) -> Program:
    """The program of a graph whose memory is planned; `onnx_sha256` ties it to the graph's file.

    Raises DscError for nodes that are no plugin ops, constants that are no weights, and a plan of another graph.
    """
    raise_all(f"{graph.name} cannot be lowered", _faults(graph))
    aliases = _aliases(graph)
    operands: dict[str, Operand] = {}
    for tensor in _tensors(graph):
        if tensor.name not in operands:
            operands[tensor.name] = _operand(graph, tensor, aliases)
    in_arena = [(o.offset, o.bytes) for o in operands.values() if o.offset is not None]
    program = Program(
        name=graph.name,
        onnx_sha256=onnx_sha256,
        letters={letter: bound for letter, bound in graph.info.bounds.items() if letter in LETTERS},
        inputs=tuple(tensor.name for tensor in graph.gs.inputs),
        outputs=tuple(tensor.name for tensor in graph.gs.outputs),
        operands=operands,
        nodes=tuple(_node(node) for node in graph.gs.nodes),
        arena_bytes=max((offset + size for offset, size in in_arena), default=0),
    )
    program.check(graph.name)
    check_places(program)
    return program


def _faults(graph: Graph) -> list[DscError]:
    faults = []
    for node in graph.gs.nodes:
        if not is_plugin(node):
            got = f"{op_name(node)}"
            faults.append(
                DscError("is left in the graph", where=f"{graph.name}: {node.name}", wanted="plugin ops only", got=got)
            )
        for tensor in node.inputs:
            if not tensor.is_empty() and not is_weight(tensor) and isinstance(tensor, gs.Constant):
                where = f"{graph.name}: {node.name} reads {tensor.name}"
                faults.append(
                    DscError("a constant that is no weight cannot be stored", where=where, got=str(type_of(tensor)))
                )
    return faults


def _tensors(graph: Graph) -> list[Tensor]:
    """Every tensor of the graph in order of first sight; repetitions stay."""
    inside = [tensor for node in graph.gs.nodes for tensor in (*node.inputs, *node.outputs) if not tensor.is_empty()]
    return [*graph.gs.inputs, *inside]


def _aliases(graph: Graph) -> dict[str, str]:
    """Outputs that are the memory of an input, by name."""
    found = {}
    for node in graph.gs.nodes:
        schema = schema_of(node)
        for operand, tensor in zip(schema.outputs_of(node.attrs), node.outputs, strict=True):
            if operand.alias:
                found[tensor.name] = node.inputs[schema.slot(operand.alias)].name
    return found


def _operand(graph: Graph, tensor: Tensor, aliases: dict[str, str]) -> Operand:
    type_ = type_of(tensor)
    assert type_ is not None, tensor.name
    size = nbytes(type_.dtype, type_.shape, graph.info.bounds)
    if is_weight(tensor):
        return Operand(type_.dtype, type_.shape, "weight", size, tensor=tensor.name, cuts=tensor._values.cuts)
    alias = aliases.get(tensor.name, "")
    root = alias
    while root in aliases:
        root = aliases[root]
    given = any(tensor is i for i in graph.gs.inputs)
    # An input that a node writes through an alias lives across steps: a cache.
    if (given and tensor.name in aliases.values()) or (root and any(root == i.name for i in graph.gs.inputs)):
        return Operand(type_.dtype, type_.shape, "state", size, alias=alias)
    if given:
        return Operand(type_.dtype, type_.shape, "input", size)
    if graph.is_output(tensor):
        assert not alias, (tensor.name, alias)
        return Operand(type_.dtype, type_.shape, "output", size)
    offset = None if alias else graph.memory_plan.get(tensor.name)
    if offset is None and not alias:
        raise DscError(f"{tensor.name} has no place", where=graph.name, try_="plan_memory as the last pass")
    return Operand(type_.dtype, type_.shape, "activation", size, alias=alias, offset=offset)


def _node(node: Node) -> ProgramNode:
    slots = schema_of(node).slot_names()
    names = ["" if tensor.is_empty() else str(tensor.name) for tensor in node.inputs]
    return ProgramNode(
        name=str(node.name),
        op=str(node.op),
        inputs=(*names, *[""] * (len(slots) - len(names))),
        outputs=tuple(str(tensor.name) for tensor in node.outputs),
        attributes=dict(sorted(node.attrs.items())),
    )
