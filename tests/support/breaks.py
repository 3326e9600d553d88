"""Every way to break a fusion site by one edit: an extra cast, a view, swapped operands, a second reader.

    for broken in breaks(graph, site):        # site: names of the nodes that the pass takes
        report = FuseSwiglu().run(broken.graph)
        broken.node, broken.thing             # what the message must name: the node beside the edit, and what was put there
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from dsc.compiler.ir.graph import Graph, Node, constant, is_weight, op_name, type_of, variable
from dsc.compiler.ir.rewrite import Declined, Pass, Report
from dsc.compiler.ir.weight import ONNX_DTYPES
from dsc.plugins.schema import Type


@dataclass(frozen=True)
class Broken:
    """A copy of a graph with one edit, told in words."""

    graph: Graph
    edit: str
    thing: str  # what the message must say


def breaks(graph: Graph, site: set[str]) -> Iterator[Broken]:
    """One copy per edit: each edge between two nodes of the site, or from a tensor that several of them read; each pair of
    operands; each result that the site reads itself.
    """
    for node in graph.nodes:
        if node.name not in site:
            continue
        for index, tensor in enumerate(node.inputs):
            if not isinstance(tensor, gs.Constant) and (_is_made_by(tensor, site) or _num_readers(tensor, site) > 1):
                yield _cast(graph, node, index)
                yield _view(graph, node, index)
        if len(node.inputs) == 2 and not any(map(_is_small, node.inputs)):
            yield _swap(graph, node)
        for index, tensor in enumerate(node.outputs):
            if any(reader.name in site for reader in tensor.outputs):
                yield _second_reader(graph, node, index)


def taken(graph: Graph, pass_: Pass, mark: str) -> set[str]:
    """Names of the nodes that a pass takes out of a graph and that carry `mark`; the graph is left alone."""
    copy = graph.copy(graph.name)
    before = {(str(node.name), op_name(node)) for node in copy.nodes}
    pass_.run(copy)
    copy.tidy()
    after = {(str(node.name), op_name(node)) for node in copy.nodes}
    return {name for name, _ in before - after if mark in name}


def said(report: Report) -> str:
    """All that a report declines, as text."""
    return "\n".join(_text(declined) for declined in report.declined)


def _text(declined: Declined) -> str:
    return f"{declined.node}: {declined.reason}; wanted {declined.wanted}; got {declined.got}"


def _is_made_by(tensor: gs.Variable, site: set[str]) -> bool:
    return bool(tensor.inputs) and tensor.inputs[0].name in site


def _num_readers(tensor: gs.Variable, site: set[str]) -> int:
    return sum(reader.name in site for reader in tensor.outputs)


def _cast(graph: Graph, node: Node, index: int) -> Broken:
    copy = graph.copy(graph.name)
    type_ = type_of(node.inputs[index])
    assert type_ is not None
    to = "bfloat16" if type_.dtype == "float32" else "int32"
    _insert(copy, node, index, "Cast", [], Type(to, type_.shape), to=ONNX_DTYPES[to])
    return Broken(copy, f"a cast before operand {index} of {op_name(node)} {node.name}", "extra")


def _view(graph: Graph, node: Node, index: int) -> Broken:
    copy = graph.copy(graph.name)
    type_ = type_of(node.inputs[index])
    assert type_ is not None
    shape = constant("extra_shape", [d if isinstance(d, int) else -1 for d in type_.shape], "int64")
    _insert(copy, node, index, "Reshape", [shape], type_)
    return Broken(copy, f"a view before operand {index} of {op_name(node)} {node.name}", "extra")


def _insert(
    graph: Graph, node: Node, index: int, op: str, more: list[gs.Constant], type_: Type, **attributes: int
) -> None:
    reader = _named(graph, str(node.name))
    result = variable("extra", type_)
    graph.add(op, [reader.inputs[index], *more], [result], "extra", **attributes)
    reader.inputs[index] = result


def _swap(graph: Graph, node: Node) -> Broken:
    copy = graph.copy(graph.name)
    found = _named(copy, str(node.name))
    first, second = found.inputs
    found.inputs = [second, first]
    return Broken(copy, f"the operands of {op_name(node)} {node.name} swapped", str(node.name))


def _second_reader(graph: Graph, node: Node, index: int) -> Broken:
    copy = graph.copy(graph.name)
    tensor = _named(copy, str(node.name)).outputs[index]
    result = variable("extra", Type("float32", tuple(tensor.shape)))
    copy.add("Neg", [tensor], [result], "extra")
    copy.add_output(result)
    return Broken(copy, f"a second reader of {tensor.name}", "Neg extra")


def _named(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name == name)


def _is_small(tensor: gs.Variable | gs.Constant) -> bool:
    return isinstance(tensor, gs.Constant) and not is_weight(tensor)
