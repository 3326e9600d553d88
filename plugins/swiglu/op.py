"""The gate of a SwiGLU MLP."""

from dsc.plugins.schema import FLOATS, Cost, Op, Tensor

OP = Op(
    "Swiglu",
    inputs=(Tensor("gate", "T F", FLOATS), Tensor("up", "T F", FLOATS, like="gate")),
    outputs=(Tensor("y", "T F", FLOATS, like="gate"),),
    cost=lambda d: Cost(flop=5 * d.T * d.F, bytes=3 * 2 * d.T * d.F),
    doc="""y = gate * sigmoid(gate) * up. Shazeer 2020, arXiv 2002.05202.""",
)
