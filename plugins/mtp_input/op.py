"""The entrance of a multi-token-prediction layer: two norms and a concatenation."""

from dsc.plugins.schema import FLOATS, Cost, Op, Tensor

OP = Op(
    "MtpInput",
    inputs=(
        Tensor("embedding", "T D", FLOATS),
        Tensor("hidden", "T D", FLOATS),
        Tensor("embedding_norm", "D", FLOATS),
        Tensor("hidden_norm", "D", FLOATS),
    ),
    outputs=(Tensor("y", "T 2*D", FLOATS, like="embedding"),),
    attributes={"epsilon": float},
    cost=lambda d: Cost(flop=8 * d.T * d.D, bytes=2 * (4 * d.T * d.D + 2 * d.D)),
    doc="""y = [RMSNorm(embedding, embedding_norm), RMSNorm(hidden, hidden_norm)]: DeepSeek's enorm, then hnorm.""",
)
