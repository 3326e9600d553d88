"""Put the plugin op in the place of the embedding look-up."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.match import sites
from dsc.compiler.ir.pattern import Any, P, W
from dsc.compiler.ir.rewrite import Pass, Report

EMBEDDING = P("Gather", W("table", rank=2), Any("tokens"), axis=0)


@dataclass(frozen=True)
class InsertEmbedding(Pass):
    """Gather(table, tokens, axis=0) -> dsc.Embedding(tokens, table), table [V, D].

    A Gather of rows of an activation is no embedding: fuse_lm_head takes it.
    """

    takes = ("Gather",)

    def expected(self, info: GraphInfo) -> int:
        return 0 if info.model == "sample" else 1

    def run(self, graph: Graph) -> Report:
        report = Report()
        for site in sites(graph, EMBEDDING, report):
            gather = site.root
            inputs = {"tokens": site["tokens"], "table": site["table"]}
            attributes = {"dtype": "float32", "table_format": "fp32"}
            node = graph.plugin("Embedding", inputs, attributes, str(gather.name), {"y": gather.outputs[0]})
            graph.remove(site.nodes)
            report.change(node)
        return report
