"""Fuse the choice of rows and the output head into one plugin op."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.match import sites
from dsc.compiler.ir.pattern import Any, P, W
from dsc.compiler.ir.rewrite import Pass, Report

HIDDEN, ROWS, HEAD = Any("hidden"), Any("rows"), W("head")
PATTERN = P("Gemm", P("Gather", HIDDEN, ROWS, axis=0), HEAD, transB=1)


@dataclass(frozen=True)
class FuseLmHead(Pass):
    """Gemm(Gather(hidden, rows), head) -> dsc.LmHead(hidden, rows, head): logits [R, V], float32 whatever hidden is."""

    def expected(self, info: GraphInfo) -> int:
        return 1  # every model ends in one head

    def run(self, graph: Graph) -> Report:
        report = Report()
        for site in sites(graph, PATTERN, report):
            inputs = {"hidden": site["hidden"], "logit_rows": site["rows"], "w": site["head"]}
            name, logits = str(site.root.name), site.root.outputs[0]
            node = graph.plugin("LmHead", inputs, {"w_format": "fp32"}, name, {"logits": logits})
            graph.remove(site.nodes)
            report.change(node)
        return report
