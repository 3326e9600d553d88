"""Fuse the gate of a SwiGLU MLP into one plugin op."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo, type_of
from dsc.compiler.ir.match import sites
from dsc.compiler.ir.pattern import Any, P
from dsc.compiler.ir.rewrite import Pass, Report

GATE, UP = Any("gate"), Any("up")
SWIGLU = P("Mul", P("Mul", GATE, P("Sigmoid", GATE)), UP)


@dataclass(frozen=True)
class FuseSwiglu(Pass):
    """Mul(Mul(gate, Sigmoid(gate)), up) -> dsc.Swiglu(gate, up), each [T, F].

    An activation with a second reader stays: fusing it would compute it twice.
    """

    takes = ("Sigmoid",)

    def expected(self, info: GraphInfo) -> int:
        shared = info.num_moe_layers if info.spec.num_shared_experts and "fuse_moe" not in info.done else 0
        return info.num_dense_layers + shared  # fuse_moe takes the shared experts, where it ran before

    def run(self, graph: Graph) -> Report:
        report = Report()
        for site in sites(graph, SWIGLU, report):
            gate, up, old = site["gate"], site["up"], site.root
            if len(gate.shape) != 2:
                report.decline(old, "the gate is not one MLP's", "[T, F]", str(type_of(gate)))
                continue
            node = graph.plugin("Swiglu", {"gate": gate, "up": up}, {}, str(old.name), {"y": old.outputs[0]})
            graph.remove(site.nodes)
            report.change(node)
        return report
