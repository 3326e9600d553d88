"""Fuse the entrance of the MTP layer, two norms and a concatenation, into one plugin op."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.match import Match, attribute, describe, sites
from dsc.compiler.ir.pattern import ANY, Any, P, W
from dsc.compiler.ir.rewrite import Pass, Report

ENORM = P("RMSNormalization", Any("embedding"), W("enorm"), axis=-1, epsilon=ANY, name="embedding_normed")
HNORM = P("RMSNormalization", Any("hidden"), W("hnorm"), axis=-1, epsilon=ANY, name="hidden_normed")
PATTERN = P("Concat", ENORM, HNORM, axis=1)


@dataclass(frozen=True)
class FuseMtpInput(Pass):
    """Concat(RMSNorm(embedding), RMSNorm(hidden)) -> dsc.MtpInput(embedding, hidden, enorm, hnorm) [T, 2 D].

    The embedding comes first and `hidden` is the graph's input, the main model's rows: swapped halves fit every shape.
    """

    takes = ("Concat",)

    def expected(self, info: GraphInfo) -> int:
        return 1 if info.model == "mtp" else 0

    def run(self, graph: Graph) -> Report:
        report = Report()
        for site in sites(graph, PATTERN, report):
            if _differs(graph, site, report):
                continue
            inputs = {
                "embedding": site["embedding"],
                "hidden": site["hidden"],
                "embedding_norm": site["enorm"],
                "hidden_norm": site["hnorm"],
            }
            attributes = {"epsilon": attribute(site.node("embedding_normed"), "epsilon")}
            node = graph.plugin("MtpInput", inputs, attributes, "mtp.input", {"y": site.root.outputs[0]})
            graph.remove(site.nodes)
            report.change(node)
        return report


def _differs(graph: Graph, site: Match, report: Report) -> bool:
    """Decline a site whose halves or epsilons are not the layer's."""
    hidden = graph.input("hidden")
    if site["hidden"] is not hidden:
        swapped = site["embedding"] is hidden
        reason = "the halves of Concat are swapped" if swapped else "the second half is not the main model's hidden"
        got = f"{describe(site['embedding'])}, then {describe(site['hidden'])}"
        report.decline(site.root, reason, "the embedding, then input hidden", got)
        return True
    epsilons = [attribute(site.node(half), "epsilon") for half in ("embedding_normed", "hidden_normed")]
    if epsilons[0] != epsilons[1]:
        report.decline(
            site.root, "the two norms have different epsilons", "one epsilon", " and ".join(map(str, epsilons))
        )
        return True
    return False
