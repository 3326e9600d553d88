"""Graphs for the tests of passes: as text, through the door of `dsc opt`; and those of whole models."""

from __future__ import annotations

from pathlib import Path

from dsc.compiler.config import read_config
from dsc.compiler.importer.model import import_main, import_mtp
from dsc.compiler.ir.graph import Graph
from dsc.compiler.ir.rewrite import find_pass
from dsc.compiler.ir.text import from_text, to_text
from dsc.compiler.opt import LIMITS, opt, parse_pass
from dsc.compiler.phases import phase_graphs
from dsc.compiler.pipeline import Run, check_final, run_passes
from dsc.compiler.recipe import Allowance
from support.oracle import sources

# Every pass before dtypes and formats, in the recipes' order.
FUSING_PASSES = (
    "insert_embedding",
    "fuse_mtp_input",
    "fuse_lm_head",
    "fuse_add_rms_norm",
    "fuse_qkv",
    "insert_mla_attention",
    "fuse_moe",
    "fuse_swiglu",
    "insert_rms_norm",
    "insert_linear",
)


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


def import_all(folder: Path) -> list[Graph]:
    """`main`, and `mtp` where there is one."""
    spec, source = read_config(folder), sources(folder)
    graphs = [import_main(spec, source, 256)]
    return graphs if not spec.num_mtp_layers else [*graphs, import_mtp(spec, source, 256)]


def lower(graphs: list[Graph], names: tuple[str, ...] = FUSING_PASSES) -> list[Graph]:
    """Run the passes and the final check on every phase of imported graphs."""
    phases = [phase for graph in graphs for phase in phase_graphs(graph, LIMITS)]
    run_passes(phases, [find_pass(name)() for name in names])
    check_final(phases)
    return phases
