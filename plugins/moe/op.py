"""Mixture of experts after the router: routed experts and the shared expert, their weights in any storage formats."""

from typing import Any

from dsc.plugins.activation_codes import TAKEN_DOC, taken
from dsc.plugins.schema import F32, FLOATS, I32, Cost, Op, Tensor, Weight


def cost(d: Any) -> Cost:
    """Every token passes K experts, of which a rank of several groups has its share, and the shared one; no more experts are
    read than there are (token, expert) pairs.
    """
    shared, pairs = getattr(d, "FS", 0), d.T * d.K / getattr(d, "expert_groups", 1)
    read = min(d.E, pairs) * d.F + shared
    return Cost(flop=6 * d.D * (pairs * d.F + d.T * shared), bytes=2 * (2 * d.T * d.D + 3 * d.D * read) + 8 * d.T * d.K)


OP = Op(
    "Moe",
    inputs=(
        Tensor("x", "T D", FLOATS),
        Tensor("ids", "T K", I32),
        Tensor("weights", "T K", F32),
        Weight("gate", "E F D"),
        Weight("up", "E F D"),
        Weight("down", "E D F"),
        Weight("shared_gate", "FS D", optional=True),
        Weight("shared_up", "FS D", optional=True),
        Weight("shared_down", "D FS", optional=True),
        *taken("D"),
    ),
    outputs=(Tensor("y", "T D", FLOATS, like="x"),),
    optional={"expert_groups": int},
    cost=cost,
    doc=f"""y[t] = sum over k of weights[t, k] * expert(ids[t, k])(x[t]) + shared(x[t]).

    An expert is down(silu(gate x) * up x). An id of -1 adds nothing. The shared expert has weight 1 and its three
    operands come together or not at all; an absent one's `shared_*_format` is not looked at.
    expert_groups says that the layer's experts are spread over so many groups of ranks, E of them here: an id is -1 the more
    often, which changes no result, and what kernels are best.
    With fp8 weights what enters a product is quantized first, 1x128, the intermediate as well as x.
    {TAKEN_DOC}
    """,
)
