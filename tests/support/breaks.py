"""Every way to break a fusion site by one edit: an extra cast, a view, swapped operands, a second reader.

graph = graph_before("fuse_qkv", folder)
assert_every_break_is_told(graph, FuseQkv(), "layers.1.")
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx_graphsurgeon as gs
import yaml

from dsc.compiler.config import read_config
from dsc.compiler.importer.model import import_main, import_mtp
from dsc.compiler.ir.graph import Graph, Node, constant, is_weight, op_name, type_of, variable
from dsc.compiler.ir.rewrite import Declined, Pass, Report
from dsc.compiler.ir.weight import ONNX_DTYPES
from dsc.compiler.phases import StepLimits, phase_graphs
from dsc.compiler.pipeline import run_passes
from dsc.compiler.recipe import make_pass
from dsc.plugins.schema import Type
from support.oracle import sources

RECIPE = importlib.resources.files("dsc.recipes") / "tiny-r1-fp32.yaml"
LIMITS = StepLimits(
    batch_tokens=64, sequences=2, context_tokens=256, drafts=1, logit_rows=64, cache_dtype="float32", block_tokens=16
)  # fmt: skip


def imported(folder: Path, model: str = "main", phase: str = "prefill") -> Graph:
    """A checkpoint's graph of a model and phase, as it comes before the first pass."""
    importer = {"main": import_main, "mtp": import_mtp}[model]
    graphs = phase_graphs(importer(read_config(folder), sources(folder), LIMITS.context_tokens), LIMITS)
    return next(graph for graph in graphs if graph.info.phase == phase)


def passes_before(name: str) -> list[Pass]:
    """The passes that the float32 recipe runs before one."""
    entries = [
        entry if isinstance(entry, dict) else {entry: {}} for entry in yaml.safe_load(RECIPE.read_text())["passes"]
    ]
    items = [item for entry in entries for item in entry.items()]
    return [make_pass(*item) for item in items[: [other for other, _ in items].index(name)]]


def graph_before(name: str, folder: Path, model: str = "main", phase: str = "prefill") -> Graph:
    """A checkpoint's graph as the recipe brings it to a pass."""
    graph = imported(folder, model, phase)
    run_passes([graph], passes_before(name))
    return graph


def assert_every_break_is_told(graph: Graph, pass_: Pass, mark: str = "") -> None:
    """Break the site whose nodes carry `mark` in every way: the pass leaves exactly this one, and says where and what."""
    expected = pass_.expected(graph.info)
    site = taken(graph, pass_, mark)
    edits = list(breaks(graph, site))
    assert expected, "no site to break"
    assert len(edits) > len(site), (len(edits), site)
    wrong = []
    for broken in edits:
        report = pass_.run(broken.graph)
        text = said(report)
        if len(report.changed) != expected - 1 or len(report.declined) != 1 or broken.thing not in text:
            wrong.append(f"{broken.edit}: {len(report.changed)} of {expected} changed; {text or 'nothing said'}")
    assert not wrong, "\n".join(wrong)


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
