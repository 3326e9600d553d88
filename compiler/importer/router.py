"""The router in primitive ops: which experts a token goes to, and with which weights. Float32 throughout."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from dsc.compiler.importer.builder import Builder
from dsc.compiler.ir.graph import variable
from dsc.compiler.ir.weight import ONNX_DTYPES
from dsc.plugins.schema import Type


def router(build: Builder, node: str, tensor: str, x: gs.Variable) -> tuple[gs.Variable, gs.Variable]:
    """x [T, D] -> expert ids [T, K] int64 and their weights [T, K].

    DeepseekV3TopkRouter (sigmoid; the bias chooses but does not weigh) and DeepseekV2TopkRouter (softmax). With one
    group nothing is limited, so the group stage is left out: Kimi-K2 and V2-Lite have none.
    """
    spec = build.spec
    weight = build.exact(f"{tensor}.weight", (spec.num_experts, spec.hidden_size))
    logits = build.linear(node, x, weight)
    if spec.scoring == "sigmoid":
        scores = build.op("Sigmoid", f"{node}.scores", [logits], logits.shape)
    else:
        scores = build.op("Softmax", f"{node}.scores", [logits], logits.shape, axis=-1)
    choice = scores
    if spec.router_bias:
        bias = build.exact(f"{tensor}.e_score_correction_bias", (spec.num_experts,))
        choice = build.op("Add", f"{node}.choice", [scores, bias], scores.shape)
    if spec.num_groups > 1:
        choice = limit_groups(build, node, choice)
    ids = top_k(build, f"{node}.ids", choice, spec.experts_per_token)[1]
    weights = build.op("GatherElements", f"{node}.chosen", [scores, ids], ids.shape, axis=1)
    if spec.norm_topk_prob:
        total = build.op("ReduceSum", f"{node}.total", [weights, build.ints(1)], ("T", 1), keepdims=1)
        safe = build.op("Add", f"{node}.safe_total", [total, build.number(1e-20)], ("T", 1))
        weights = build.op("Div", f"{node}.normalized", [weights, safe], ids.shape)
    scale = build.number(spec.routed_scaling_factor)
    return ids, build.op("Mul", f"{node}.weights", [weights, scale], ids.shape)


def limit_groups(build: Builder, node: str, choice: gs.Variable) -> gs.Variable:
    """Set the scores outside the best `topk_groups` groups to -inf.

    A group counts as its two best scores together (top2_sum, V3) or as its best one (max, V2).
    """
    spec = build.spec
    groups, size = spec.num_groups, spec.num_experts // spec.num_groups
    grouped = build.reshape(f"{node}.grouped", choice, ("T", groups, size))
    axis = build.ints(-1)
    if spec.group_score == "top2_sum":
        best = top_k(build, f"{node}.group_best", grouped, 2)[0]
        score = build.op("ReduceSum", f"{node}.group_score", [best, axis], ("T", groups), keepdims=0)
    else:
        score = build.op("ReduceMax", f"{node}.group_score", [grouped, axis], ("T", groups), keepdims=0)
    kept = top_k(build, f"{node}.group_ids", score, spec.topk_groups)[1]
    hot = build.one_hot(f"{node}.group_one_hot", kept, groups)
    members = build.op("ReduceSum", f"{node}.group_members", [hot, build.ints(1)], ("T", groups), keepdims=0)
    mask = build.op("Cast", f"{node}.group_mask", [members], ("T", groups), "bool", to=ONNX_DTYPES["bool"])
    column = build.op("Unsqueeze", f"{node}.group_column", [mask, axis], ("T", groups, 1), "bool")
    outside = build.number(float("-inf"))
    limited = build.op("Where", f"{node}.limited_groups", [column, grouped, outside], grouped.shape)
    return build.reshape(f"{node}.limited", limited, choice.shape)


def top_k(build: Builder, name: str, x: gs.Variable, k: int) -> tuple[gs.Variable, gs.Variable]:
    """The k largest along the last axis and their indices (of equal ones the lower index first)."""
    shape = (*x.shape[:-1], k)
    values, indices = variable(f"{name}.values", Type("float32", shape)), variable(name, Type("int64", shape))
    build.graph.add("TopK", [x, build.ints(k)], [values, indices], name, axis=-1, largest=1, sorted=1)
    return values, indices
