"""The sum of what the ranks have."""

from dsc.plugins.schema import FLOATS, Cost, Op, Tensor

OP = Op(
    "AllReduce",
    inputs=(Tensor("x", "T D", FLOATS),),
    outputs=(Tensor("y", "T D", FLOATS, like="x"),),
    attributes={"ranks": int},
    # What leaves a rank and reaches it, when each sums its part of the rows and gathers the others'.
    cost=lambda d: Cost(flop=d.T * d.D, bytes=4 * 2 * d.T * d.D),
    doc="""y = the sum of every rank's x, on every rank, and on every rank the same bits.

    Ranks are added in their order, in float32; the sum is rounded once. On GPUs the collective's library has an order of
    its own, and may round between.
    """,
)
