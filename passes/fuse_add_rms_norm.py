"""Fuse the residual connection with the norm that reads it."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.match import attribute, sites
from dsc.compiler.ir.pattern import ANY, Any, OneOf, P, W
from dsc.compiler.ir.rewrite import Pass, Report

SUM = P("Add", Any("residual"), Any("x"), name="sum", shared=True)
ADD_RMS_NORM = P("RMSNormalization", SUM, W("weight"), axis=OneOf((-1, 1)), epsilon=ANY)


@dataclass(frozen=True)
class FuseAddRmsNorm(Pass):
    """RMSNormalization(Add(residual, x), weight) -> dsc.AddRmsNorm(x, residual, weight) with outputs y and sum.

    The first operand of the Add is the residual stream, the second what a layer adds to it. The sum may have other
    readers (the next residual connection): they read the op's second output.
    """

    takes = ("Add",)

    def expected(self, info: GraphInfo) -> int:
        return 2 * info.num_layers  # every norm of the residual stream but the first one; the final norm included

    def run(self, graph: Graph) -> Report:
        report = Report()
        for site in sites(graph, ADD_RMS_NORM, report):
            norm, add = site.root, site.node("sum")
            inputs = {"x": site["x"], "residual": site["residual"], "weight": site["weight"]}
            epsilon = float(attribute(norm, "epsilon"))
            results = {"y": norm.outputs[0], "sum": add.outputs[0]}
            node = graph.plugin("AddRmsNorm", inputs, {"epsilon": epsilon}, str(norm.name), results)
            graph.remove([norm, add])
            report.change(node)
        return report
