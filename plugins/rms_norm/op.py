"""Root-mean-square normalization."""

from dsc.plugins.activation_codes import MADE, MADE_DOC, QUANTIZE, made_bytes
from dsc.plugins.schema import FLOATS, Cost, Op, Tensor

OP = Op(
    "RmsNorm",
    inputs=(Tensor("x", "T D", FLOATS), Tensor("weight", "D", FLOATS)),
    outputs=(Tensor("y", "T D", FLOATS, like="x"), *MADE),
    attributes={"epsilon": float},
    optional=QUANTIZE,
    cost=lambda d: Cost(flop=4 * d.T * d.D, bytes=2 * 2 * d.T * d.D + 4 * d.D + made_bytes(d)),
    doc=f"""y = x / sqrt(mean(x^2) + epsilon) * weight over each row, in float32 whatever the dtypes; rounded once, at the end.
    {MADE_DOC}

    Zhang and Sennrich 2019, arXiv 1910.07467.
    """,
)
