"""Single changes to a graph, each of which a pass must not overlook: an extra cast, a view, a second reader, swapped operands."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from dsc.compiler.ir.graph import Graph, Node, is_weight, type_of, variable
from dsc.compiler.ir.weight import ONNX_DTYPES

KINDS = ("cast", "view", "reader", "swap")
EXTRA = "n17"  # the node that a change adds


def changes(graph: Graph, kind: str) -> Iterator[tuple[str, int]]:
    """Every place, as (node name, operand index), where a change of this kind says something else."""
    for node in graph.nodes:
        for index, tensor in enumerate(node.inputs):
            if _applies(node, index, tensor, kind):
                yield str(node.name), index


def _applies(node: Node, index: int, tensor: gs.Variable | gs.Constant, kind: str) -> bool:
    if kind == "swap":  # a sum of two has no order
        ordered = node.op != "Add" and len(node.inputs) >= 2 and index == 0
        return ordered and type_of(tensor) == type_of(node.inputs[1])
    if kind == "reader":
        return bool(tensor.inputs)
    if kind == "cast" and (node.op == "Cast" or (tensor.inputs and tensor.inputs[0].op == "Cast")):
        return False  # of two casts in a row either may be the extra one
    return is_weight(tensor) or not isinstance(tensor, gs.Constant)


def change(graph: Graph, kind: str, place: tuple[str, int]) -> tuple[Graph, str]:
    """A changed copy of a graph, and the name that the error must have in it."""
    changed = graph.copy(graph.name)
    name, index = place
    node = next(node for node in changed.nodes if node.name == name)
    tensor = node.inputs[index]
    if kind == "swap":
        node.inputs[0], node.inputs[1] = node.inputs[1], tensor
        return changed, name
    type_ = type_of(tensor)
    assert type_ is not None, place
    out = variable(f"{EXTRA}.out", type_)
    if kind == "cast":
        changed.add("Cast", [tensor], [out], EXTRA, to=ONNX_DTYPES[type_.dtype])
    else:
        changed.add("Identity", [tensor], [out], EXTRA)
    if kind == "reader":
        changed.add_output(out)
    else:
        node.inputs[index] = out
    return changed, EXTRA
