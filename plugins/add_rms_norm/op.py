"""The residual connection and the norm that reads it, in one op."""

from dsc.plugins.activation_codes import MADE, MADE_DOC, QUANTIZE, made_bytes
from dsc.plugins.schema import FLOATS, Cost, Op, Tensor

OP = Op(
    "AddRmsNorm",
    inputs=(
        Tensor("x", "T D", FLOATS),
        Tensor("residual", "T D", FLOATS, like="x"),
        Tensor("weight", "D", FLOATS),
    ),
    outputs=(Tensor("y", "T D", FLOATS, like="x"), Tensor("sum", "T D", FLOATS, like="x"), *MADE),
    attributes={"epsilon": float},
    optional=QUANTIZE,
    cost=lambda d: Cost(flop=5 * d.T * d.D, bytes=4 * 2 * d.T * d.D + 4 * d.D + made_bytes(d)),
    doc=f"""sum = x + residual, rounded to x's dtype; y = RmsNorm(sum, weight) of the rounded sum, as a model that keeps its
    residual stream in that dtype computes it. Statistics in float32.
    {MADE_DOC}
    """,
)
