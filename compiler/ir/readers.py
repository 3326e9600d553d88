"""Who reads a tensor, looking through casts and views: how a site with several results is found from one of them."""

from __future__ import annotations

from collections.abc import Iterator

from dsc.compiler.ir.graph import Node, Tensor, op_name
from dsc.compiler.ir.match import TRANSPARENT


def readers(tensor: Tensor, op: str) -> list[Node]:
    """Nodes of an op that read a tensor, directly or behind casts and views, each once, the nearest first."""
    found: list[Node] = []
    for node in _walk(tensor, op):
        if not any(node is known for known in found):  # gs compares nodes by value
            found.append(node)
    return found


def _walk(tensor: Tensor, op: str) -> Iterator[Node]:
    passed_on = []
    for node in tensor.outputs:
        if op_name(node) == op:
            yield node
        elif op_name(node) in TRANSPARENT:
            passed_on.extend(node.outputs)
    for further in passed_on:
        yield from _walk(further, op)
