"""Fuse a mixture of experts into two plugin ops: the router, and the experts with the shared one."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.match import Match, sites
from dsc.compiler.ir.pattern import Any, C, Output, P, Pattern, W
from dsc.compiler.ir.rewrite import Pass, Report
from dsc.compiler.ir.weight import ONNX_DTYPES
from dsc.runtime.spec import ModelSpec


def mixture(spec: ModelSpec) -> P:
    """sum over experts of weight * expert(x), plus shared(x), as the importer writes it for this model."""
    x = Any("x")
    ids, weights = router(spec, x)
    hot = P("OneHot", ids, C(spec.num_experts), C([0, 1]), axis=-1)
    placed = P("Mul", hot, P("Unsqueeze", weights, C([-1])))
    of_experts = P("Transpose", P("ReduceSum", placed, C([1]), keepdims=0), perm=[1, 0])
    expert = P("MatMul", swiglu(stacked(x, "gate"), stacked(x, "up")), turned("down"))
    routed = P("ReduceSum", P("Mul", expert, P("Unsqueeze", of_experts, C([-1]))), C([0]), keepdims=0)
    if not spec.num_shared_experts:
        return routed
    shared = P("Gemm", swiglu(linear(x, "shared_gate"), linear(x, "shared_up")), W("shared_down"), transB=1)
    return P("Add", routed, shared)


def router(spec: ModelSpec, x: Any) -> tuple[Output, P]:
    """Ids and weights of the chosen experts."""
    logits = linear(x, "router")
    scores = P("Sigmoid", logits) if spec.scoring == "sigmoid" else P("Softmax", logits, axis=-1)
    choice = P("Add", scores, W("bias")) if spec.router_bias else scores
    if spec.num_groups > 1:
        choice = best_groups(spec, choice)
    ids = P("TopK", choice, C(spec.experts_per_token), axis=-1)[1]
    weights = P("GatherElements", scores, ids, axis=1)
    if spec.norm_topk_prob:
        total = P("Add", P("ReduceSum", weights, C([1]), keepdims=1), C(1e-20))
        weights = P("Div", weights, total)
    return ids, P("Mul", weights, C(spec.routed_scaling_factor, "routed_scaling_factor"))


def best_groups(spec: ModelSpec, choice: P) -> P:
    """The choice with -inf outside the best groups."""
    groups, size = spec.num_groups, spec.num_experts // spec.num_groups
    grouped = P("Reshape", choice, C([-1, groups, size]))
    if spec.group_score == "top2_sum":
        score = P("ReduceSum", P("TopK", grouped, C(2), axis=-1), C([-1]), keepdims=0)
    else:
        score = P("ReduceMax", grouped, C([-1]), keepdims=0)
    hot = P("OneHot", P("TopK", score, C(spec.topk_groups), axis=-1)[1], C(groups), C([0, 1]), axis=-1)
    members = P("Cast", P("ReduceSum", hot, C([1]), keepdims=0), to=ONNX_DTYPES["bool"])
    limited = P("Where", P("Unsqueeze", members, C([-1])), grouped, C(float("-inf")))
    return P("Reshape", limited, C([-1, spec.num_experts]))


def linear(x: Pattern, weight: str) -> P:
    return P("Gemm", x, W(weight), transB=1)


def turned(weight: str) -> P:
    return P("Transpose", W(weight, rank=3), perm=[0, 2, 1])


def stacked(x: Pattern, weight: str) -> P:
    return P("MatMul", x, turned(weight))


def swiglu(gate: P, up: P) -> P:
    return P("Mul", P("Mul", gate, P("Sigmoid", gate)), up)


@dataclass(frozen=True)
class FuseMoe(Pass):
    """Router and experts in primitive ops -> dsc.Router(x) and dsc.Moe(x, ids, weights, experts, shared expert).

    The shared expert goes into dsc.Moe, so fuse_swiglu, which runs later, finds the dense layers only.
    """

    takes = ("Softmax", "Sigmoid", "TopK", "OneHot", "GatherElements", "MatMul")

    def expected(self, info: GraphInfo) -> int:
        return info.num_moe_layers

    def run(self, graph: Graph) -> Report:
        report = Report()
        if graph.info.num_moe_layers:
            for site in sites(graph, mixture(graph.info.spec), report):
                _rewrite(graph, site, report)
        return report


def _rewrite(graph: Graph, site: Match, report: Report) -> None:
    spec = graph.info.spec
    prefix, output = str(site.root.name).rpartition(".")[0], site.root.outputs[0]
    graph.remove(site.nodes)
    chosen = graph.plugin(
        "Router",
        {"x": site["x"], "w": site["router"], "bias": site.tensors.get("bias"), "slots": graph.input("slots")},
        {
            "top_k": spec.experts_per_token,
            "groups": spec.num_groups,
            "topk_groups": spec.topk_groups,
            "scoring": spec.scoring,
            "group_score": spec.group_score if spec.num_groups > 1 else "none",
            "normalize": int(spec.norm_topk_prob),
            "scale": spec.routed_scaling_factor,
        },
        f"{prefix}.router",
        {},
    )
    parts = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")
    ids, weights = chosen.outputs
    node = graph.plugin(
        "Moe",
        {"x": site["x"], "ids": ids, "weights": weights, **{part: site.tensors.get(part) for part in parts}},
        {f"{part}_format": "fp32" for part in parts},
        f"{prefix}.moe",
        {"y": output},
    )
    report.change(node, f"router {chosen.name}")
