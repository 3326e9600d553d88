"""Put the plugin op in the place of the linear layers that no other pass took."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.match import sites
from dsc.compiler.ir.pattern import Any, P, W
from dsc.compiler.ir.rewrite import Pass, Report
from dsc.runtime.spec import ModelSpec

LINEAR = P("Gemm", Any("x"), W("w", rank=2), transB=1)


@dataclass(frozen=True)
class InsertLinear(Pass):
    """Gemm(x, w, transB=1) -> dsc.Linear(x, w), w [O, I] as stored; its format is fp32 until quantize_weights."""

    takes = ("Gemm",)

    def expected(self, info: GraphInfo) -> int:
        """All linear layers of the model, less those that the fusing passes have taken."""
        if info.model == "sample":
            return 0
        dense, moe = info.num_dense_layers, info.num_moe_layers
        linears = info.num_layers * _of_attention(info.spec, info.done) + 3 * dense
        linears += 0 if "fuse_lm_head" in info.done else 1
        linears += 1 if info.model == "mtp" else 0  # eh_proj
        if "fuse_moe" not in info.done:
            linears += moe * (4 if info.spec.num_shared_experts else 1)  # the router's, and the shared expert's
        return linears

    def run(self, graph: Graph) -> Report:
        report = Report()
        for site in sites(graph, LINEAR, report):
            gemm = site.root
            inputs = {"x": site["x"], "w": site["w"]}
            node = graph.plugin("Linear", inputs, {"w_format": "fp32"}, str(gemm.name), {"y": gemm.outputs[0]})
            graph.remove(site.nodes)
            report.change(node)
        return report


def _of_attention(spec: ModelSpec, done: tuple[str, ...]) -> int:
    """Linear layers of one attention: o_proj, q_b; q_a or q_proj and kv_a before fuse_qkv; kv_b before its pass."""
    linears = 1 + (0 if spec.q_lora_rank is None else 1)
    linears += 0 if "fuse_qkv" in done else 2
    return linears + (0 if "insert_mla_attention" in done else 1)
