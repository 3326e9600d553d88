"""Put the plugin op in the place of the norms that no other pass took."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.match import attribute, sites
from dsc.compiler.ir.pattern import ANY, Any, OneOf, P, W
from dsc.compiler.ir.rewrite import Pass, Report

RMS_NORM = P("RMSNormalization", Any("x"), W("weight"), axis=OneOf((-1, 1)), epsilon=ANY)


@dataclass(frozen=True)
class InsertRmsNorm(Pass):
    """RMSNormalization(x, weight) -> dsc.RmsNorm(x, weight), x [T, D]."""

    takes = ("RMSNormalization",)

    def expected(self, info: GraphInfo) -> int:
        """All norms of the model, less those that the fusing passes have taken."""
        spec, done = info.spec, info.done
        norms = 0 if info.model == "sample" else 1  # the one that no residual connection precedes
        if "fuse_add_rms_norm" not in done:
            norms += 2 * info.num_layers
        if "fuse_qkv" not in done:
            norms += (1 if spec.q_lora_rank is None else 2) * info.num_layers
        if info.model == "mtp" and "fuse_mtp_input" not in done:
            norms += 2
        return norms

    def run(self, graph: Graph) -> Report:
        report = Report()
        for site in sites(graph, RMS_NORM, report):
            norm = site.root
            inputs = {"x": site["x"], "weight": site["weight"]}
            epsilon = float(attribute(norm, "epsilon"))
            node = graph.plugin("RmsNorm", inputs, {"epsilon": epsilon}, str(norm.name), {"y": norm.outputs[0]})
            graph.remove(site.nodes)
            report.change(node)
        return report
