"""Fuse the choice of rows and the output head into one plugin op."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.match import describe, sites
from dsc.compiler.ir.pattern import Any, P, W
from dsc.compiler.ir.rewrite import Pass, Report

CHOSEN = P("Gather", Any("hidden"), Any("rows"), axis=0)
PATTERN = P("Gemm", CHOSEN, W("head"), transB=1)


@dataclass(frozen=True)
class FuseLmHead(Pass):
    """Gemm(Gather(hidden, rows), head) -> dsc.LmHead(hidden, rows, head): logits [R, V], float32 whatever hidden is."""

    takes = ("Gather",)

    def expected(self, info: GraphInfo) -> int:
        return 1  # every model ends in one head

    def run(self, graph: Graph) -> Report:
        report = Report()
        for site in sites(graph, PATTERN, report):
            if site["rows"] is not graph.input("logit_rows"):
                gather, got = site.matched[CHOSEN], describe(site["rows"])
                report.decline(gather, "the rows are not those asked for", "input logit_rows", got)
                continue
            inputs = {"hidden": site["hidden"], "logit_rows": site["rows"], "w": site["head"]}
            name, logits = str(site.root.name), site.root.outputs[0]
            node = graph.plugin("LmHead", inputs, {"w_format": "fp32"}, name, {"logits": logits})
            graph.remove(site.nodes)
            report.change(node)
        return report
