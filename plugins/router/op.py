"""Choose the experts of each token and their weights."""

from dsc.plugins.schema import F32, FLOATS, I32, Cost, Op, Tensor

OP = Op(
    "Router",
    inputs=(
        Tensor("x", "T D", FLOATS),
        Tensor("w", "E D", FLOATS),
        Tensor("bias", "E", F32, optional=True),
        Tensor("slots", "T", I32),
        Tensor("expert_map", "1 E", I32, optional=True),
    ),
    outputs=(Tensor("ids", "T top_k", I32), Tensor("weights", "T top_k", F32)),
    attributes={
        "top_k": int,
        "groups": int,
        "topk_groups": int,
        "scoring": str,  # sigmoid or softmax
        "group_score": str,  # top2_sum, max or none
        "normalize": int,
        "scale": float,
    },
    cost=lambda d: Cost(flop=2 * d.T * d.E * d.D, bytes=2 * d.T * d.D + 4 * d.E * d.D + 8 * d.T * d.top_k),
    doc="""s = scoring(x w^T), float32 throughout; choice = s + bias, for the selection only.

    With group_score other than none, the E experts are `groups` equal groups; a group's score is the sum of its two
    best choices (top2_sum) or its best one (max), and only experts of the `topk_groups` best groups stay. ids are the
    top_k best remaining experts, best first; among equals the lower index comes first, for groups and experts alike.
    weights = s[ids], over (their sum + 1e-20) with normalize 1, times scale.
    Rows with slot -1 are padding: ids -1, weights 0.
    With expert_map, ids are what it says of the chosen experts: their places on this rank, -1 for those of other ranks.
    DeepseekV3TopkRouter and DeepseekV2Moe of transformers; DeepSeek-V3 inference/model.py, Gate.
    """,
)
