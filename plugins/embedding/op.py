"""Look up the rows of tokens in a table."""

from dsc.plugins.schema import FLOATS, I32, Cost, Op, Tensor, Weight

OP = Op(
    "Embedding",
    inputs=(Tensor("tokens", "T", I32), Weight("table", "V D")),
    outputs=(Tensor("y", "T D", FLOATS, like="dtype"),),
    attributes={"dtype": str},
    cost=lambda d: Cost(flop=0, bytes=2 * 2 * d.T * d.D + 4 * d.T),
    doc="""y[t] = table[tokens[t]], dequantized, in `dtype`. Tokens lie in 0..V-1; the caller has checked them.""",
)
