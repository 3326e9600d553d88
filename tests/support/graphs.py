"""Graphs as text for the tests of passes: run passes on a text through the door of `dsc opt`, compare with another text."""

from __future__ import annotations

from dsc.compiler.ir.graph import Graph
from dsc.compiler.ir.text import from_text, to_text
from dsc.compiler.opt import opt, parse_pass
from dsc.compiler.pipeline import Run
from dsc.compiler.recipe import Allowance


def run_pass(text: str, name: str, allow: int = 0) -> tuple[Graph, Run]:
    """Run one pass, contract and all, on a text with an optional header (see `dsc.compiler.ir.text.header`).

    allow   the number of sites that the pass may miss
    """
    allowed = {parse_pass(name).name: Allowance(allow, "a test")} if allow else None
    graph, report = opt(text, [parse_pass(name)], allow=allowed)
    return graph, report.passes[0].runs[0]


def assert_same(graph: Graph, text: str) -> None:
    """The graph is the text's, whatever the layout and the order of declarations."""
    wanted = from_text(text, graph.info)
    assert to_text(graph) == to_text(wanted)
