"""The feed-forward half of a layer: one SwiGLU MLP, or routed experts and a shared one."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from dsc.compiler.importer.builder import Builder
from dsc.compiler.importer.router import router
from dsc.compiler.ir.weight import Stack


def feed_forward(build: Builder, layer: int, x: gs.Variable) -> gs.Variable:
    """x [T, D] -> [T, D]: dense in the first layers, a mixture of experts in the others."""
    node, tensor = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    if build.spec.is_moe(layer):
        return mixture(build, node, tensor, x)
    return dense(build, node, tensor, x, build.spec.intermediate_size, "dense_mlp")


def dense(build: Builder, node: str, tensor: str, x: gs.Variable, width: int, weight_class: str) -> gs.Variable:
    """down(silu(gate x) * up x)."""
    hidden = build.spec.hidden_size
    gate, up = (build.weight(f"{tensor}.{part}_proj.weight", (width, hidden), weight_class) for part in ("gate", "up"))
    down = build.weight(f"{tensor}.down_proj.weight", (hidden, width), weight_class)
    gated = build.linear(f"{node}.gate_proj", x, gate)
    raised = build.linear(f"{node}.up_proj", x, up)
    return build.linear(f"{node}.down_proj", build.swiglu(f"{node}.swiglu", gated, raised), down)


def mixture(build: Builder, node: str, tensor: str, x: gs.Variable) -> gs.Variable:
    """sum over the chosen experts of weight * expert(x), plus the shared expert, unscaled.

    Every expert runs on every token and the weights of those not chosen are 0: slow, and without a data-dependent shape.
    """
    spec = build.spec
    ids, weights = router(build, f"{node}.gate", f"{tensor}.gate", x)
    outputs = experts(build, f"{node}.experts", f"{tensor}.experts", x)
    experts_weight = spread(build, f"{node}.experts", ids, weights)
    weighted = build.op("Mul", f"{node}.experts.weighted", [outputs, experts_weight], outputs.shape)
    routed = build.op("ReduceSum", f"{node}.routed", [weighted, build.ints(0)], x.shape, keepdims=0)
    if not spec.num_shared_experts:
        return routed
    shared = dense(
        build, f"{node}.shared_experts", f"{tensor}.shared_experts", x, spec.shared_intermediate_size, "shared_experts"
    )
    return build.op("Add", f"{node}.sum", [routed, shared], x.shape)


def experts(build: Builder, node: str, tensor: str, x: gs.Variable) -> gs.Variable:
    """x [T, D] -> every expert's output [E, T, D], by batched products over stacked weights."""
    spec = build.spec
    hidden, width, count = spec.hidden_size, spec.moe_intermediate_size, spec.num_experts

    def product(part: str, inputs: gs.Variable, rows: int, cols: int) -> gs.Variable:
        stacked = build.make_weight(
            f"{tensor}.{part}_proj.weight",
            lambda: Stack(tuple(build.matrix(f"{tensor}.{e}.{part}_proj.weight", (rows, cols)) for e in range(count))),
            "experts",
        )
        turned = build.op("Transpose", f"{node}.{part}_turned", [stacked], (count, cols, rows), perm=[0, 2, 1])
        return build.op("MatMul", f"{node}.{part}_proj", [inputs, turned], (count, "T", rows))

    gate, up = product("gate", x, width, hidden), product("up", x, width, hidden)
    return product("down", build.swiglu(f"{node}.swiglu", gate, up), hidden, width)


def spread(build: Builder, node: str, ids: gs.Variable, weights: gs.Variable) -> gs.Variable:
    """Weights [T, K] at ids [T, K] -> one weight for every expert and token [E, T, 1], 0 where not chosen."""
    count, chosen = build.spec.num_experts, build.spec.experts_per_token
    hot = build.one_hot(f"{node}.one_hot", ids, count)
    column = build.op("Unsqueeze", f"{node}.weight_column", [weights, build.ints(-1)], ("T", chosen, 1))
    placed = build.op("Mul", f"{node}.placed", [hot, column], hot.shape)
    dense_weights = build.op("ReduceSum", f"{node}.token_weights", [placed, build.ints(1)], ("T", count), keepdims=0)
    turned = build.op("Transpose", f"{node}.expert_weights", [dense_weights], (count, "T"), perm=[1, 0])
    return build.op("Unsqueeze", f"{node}.expert_column", [turned, build.ints(-1)], (count, "T", 1))
