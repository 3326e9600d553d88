"""Verify a graph: names, order, plugin schemas, standard ops through onnx, aliases. A fault here is a pass's bug."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from dsc.compiler.ir.graph import (
    DOMAIN,
    Graph,
    Node,
    Tensor,
    is_plugin,
    is_weight,
    op_name,
    schema_of,
    type_of,
)
from dsc.compiler.ir.text import declare_weights
from dsc.plugins.schema import SchemaError


@dataclass(frozen=True)
class GraphFault:
    """What is wrong, and at which node ("" for the graph as a whole)."""

    node: str
    text: str


class VerifyError(AssertionError):
    """A broken graph: names the graph, the pass that left it so, and every fault."""

    def __init__(self, graph: str, after: str, faults: list[GraphFault]) -> None:
        self.graph, self.after, self.faults = graph, after, tuple(faults)
        lines = [f"  {fault.node}: {fault.text}" if fault.node else f"  {fault.text}" for fault in faults]
        super().__init__("\n".join([f"graph {graph} is broken {after}", *lines]))


def verify(graph: Graph, after: str = "") -> None:
    """Check a whole graph.

    after    the pass that ran last, for the message
    raises   VerifyError with all faults; onnx's own checks run only where ours find none
    """
    faults = [*_names(graph), *_order(graph), *_outputs(graph)]
    if not faults:
        faults = list(_plugins(graph))
    if not faults:
        faults = [*_aliases(graph), *_standard(graph)]
    if faults:
        raise VerifyError(graph.name, f"after {after}" if after else "as given", faults)


def _names(graph: Graph) -> Iterator[GraphFault]:
    """Node names are there and unique; one tensor name is one tensor (or one weight expression)."""
    nodes: set[str] = set()
    tensors: dict[str, Tensor] = {}
    for node in graph.nodes:
        if not node.name:
            yield GraphFault("", f"a node {op_name(node)} has no name")
        elif node.name in nodes:
            yield GraphFault(node.name, "two nodes have this name")
        nodes.add(node.name)
        for tensor in [*node.inputs, *node.outputs]:
            known = tensors.setdefault(tensor.name, tensor)
            if not tensor.is_empty() and not _same(known, tensor):
                yield GraphFault(
                    node.name, f"two tensors are named {tensor.name}: {type_of(known)} and {type_of(tensor)}"
                )
    for tensor in [*graph.gs.inputs, *graph.gs.outputs]:
        if not _same(tensors.setdefault(tensor.name, tensor), tensor):
            yield GraphFault("", f"the graph's {tensor.name} is not the tensor of that name in its nodes")


def _same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if not (isinstance(one, gs.Constant) and isinstance(other, gs.Constant)):
        return False
    if is_weight(one) and is_weight(other):
        return bool(one._values.same(other._values))
    if is_weight(one) or is_weight(other):
        return False
    return type_of(one) == type_of(other) and bool(np.array_equal(one.values, other.values))


def _order(graph: Graph) -> Iterator[GraphFault]:
    """Every tensor read is an input, a constant or made by an earlier node; every one made has a type."""
    made = {id(tensor) for tensor in graph.gs.inputs}
    later = {id(tensor): node for node in graph.nodes for tensor in node.outputs}
    for tensor in graph.gs.inputs:
        if id(tensor) in later:
            yield GraphFault(later[id(tensor)].name, f"makes the graph's input {tensor.name}")
    for node in graph.nodes:
        for tensor in node.inputs:
            if isinstance(tensor, gs.Constant) or tensor.is_empty() or id(tensor) in made:
                continue
            if id(tensor) in later:
                yield GraphFault(node.name, f"reads {tensor.name}, which {later[id(tensor)].name} makes later")
            else:
                yield GraphFault(node.name, f"reads {tensor.name}, which nothing makes")
        for tensor in node.outputs:
            if tensor.is_empty():
                continue
            if id(tensor) in made:
                yield GraphFault(node.name, f"makes {tensor.name} a second time")
            if tensor.dtype is None or tensor.shape is None:
                yield GraphFault(node.name, f"{tensor.name} has no type")
            made.add(id(tensor))


def _outputs(graph: Graph) -> Iterator[GraphFault]:
    inputs = {id(tensor) for tensor in graph.gs.inputs}
    for tensor in graph.gs.outputs:
        if id(tensor) not in inputs and not tensor.inputs:
            yield GraphFault("", f"nothing makes the graph's output {tensor.name}")
        elif tensor.dtype is None or tensor.shape is None:
            yield GraphFault("", f"the graph's output {tensor.name} has no type")


def _plugins(graph: Graph) -> Iterator[GraphFault]:
    """Plugin nodes keep their schemas, and the types recorded are those inferred."""
    for node in graph.nodes:
        if not is_plugin(node):
            continue
        try:
            types, _ = schema_of(node).check([type_of(tensor) for tensor in node.inputs], node.attrs)
        except SchemaError as error:
            yield GraphFault(node.name, str(error))
            continue
        if len(types) != len(node.outputs):
            yield GraphFault(node.name, f"{op_name(node)} has {len(types)} outputs, the node {len(node.outputs)}")
            continue
        for tensor, inferred in zip(node.outputs, types, strict=True):
            if type_of(tensor) not in (None, inferred):
                yield GraphFault(node.name, f"{tensor.name} is recorded as {type_of(tensor)}, its op makes {inferred}")


def _aliases(graph: Graph) -> Iterator[GraphFault]:
    """What an output aliases is a graph input or itself such an output, and only the node that aliases it reads it."""
    inputs = {id(tensor) for tensor in graph.gs.inputs}
    aliases: set[int] = set()
    for node in graph.nodes:
        for tensor, source in _aliased(node):
            if id(source) not in inputs and id(source) not in aliases:
                yield GraphFault(node.name, f"{tensor.name} is the memory of {source.name}, which is no input's")
            others = sorted({str(reader.name) for reader in source.outputs if reader is not node})
            if others:
                yield GraphFault(node.name, f"overwrites {source.name}, which {', '.join(others)} also reads")
            aliases.add(id(tensor))


def _aliased(node: Node) -> Iterator[tuple[Tensor, Tensor]]:
    """Each output of a node that is an input's memory, with that input."""
    if is_plugin(node):
        schema = schema_of(node)
        for tensor, declared in zip(node.outputs, schema.outputs_of(node.attrs), strict=True):
            if declared.alias:
                yield tensor, node.inputs[schema.slot(declared.alias)]


def _standard(graph: Graph) -> Iterator[GraphFault]:
    """onnx's checker and strict shape inference on the standard nodes alone.

    Weights and what plugin ops make stand as inputs: no data is needed, and onnx, which stops telling anything behind
    the first op it does not know, sees only ops it knows.
    """
    if all(is_plugin(node) for node in graph.nodes):
        return
    model = graph.to_onnx()
    proto = declare_weights(model.graph)
    types = {info.name: info for info in [*proto.value_info, *proto.output]}
    given = {info.name for info in proto.input}
    made = [name for node in proto.node if node.domain == DOMAIN for name in node.output if name]
    proto.input.extend(types[name] for name in [*graph.weights(), *made] if name not in given)
    standard = [node for node in proto.node if node.domain != DOMAIN]
    given.update(info.name for info in proto.input)
    inner = [info for info in proto.value_info if info.name not in given]
    del proto.node[:], proto.value_info[:]
    proto.node.extend(standard)
    proto.value_info.extend(inner)
    try:
        onnx.checker.check_model(model)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        yield GraphFault("", " ".join(str(error).split()))
