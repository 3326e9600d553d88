"""Who reads a tensor, looking through casts and views: how a site with several results is found from one of them."""

from __future__ import annotations

from dsc.compiler.ir.graph import Node, Tensor, op_name
from dsc.compiler.ir.match import TRANSPARENT


def readers(tensor: Tensor, op: str) -> list[Node]:
    """Nodes of an op that read a tensor, directly or behind casts and views, each once, the nearest first."""
    found: dict[int, Node] = {}  # by identity: gs compares nodes by value
    passed_on = [tensor]
    for carrier in passed_on:  # the list grows as it is walked
        for node in carrier.outputs:
            if op_name(node) == op:
                found.setdefault(id(node), node)
            elif op_name(node) in TRANSPARENT:
                passed_on.extend(node.outputs)
    return list(found.values())
