"""The output head on the rows whose logits are wanted."""

from dsc.plugins.schema import FLOATS, I32, Cost, Op, Tensor, Weight

OP = Op(
    "LmHead",
    inputs=(Tensor("hidden", "T D", FLOATS), Tensor("logit_rows", "R", I32), Weight("w", "V D")),
    outputs=(Tensor("logits", "R V", ("float32",)),),
    cost=lambda d: Cost(flop=2 * d.R * d.D * d.V, bytes=2 * d.R * d.D + 2 * d.D * d.V + 4 * d.R * d.V),
    doc="""logits = hidden[logit_rows] W^T, summed and returned in float32.""",
)
