"""A linear layer without bias, its weight in any storage format."""

from dsc.plugins.activation_codes import TAKEN_DOC, taken
from dsc.plugins.schema import FLOATS, Cost, Op, Tensor, Weight

OP = Op(
    "Linear",
    inputs=(Tensor("x", "T I", FLOATS), Weight("w", "O I"), *taken("I")),
    outputs=(Tensor("y", "T O", FLOATS, like="x"),),
    cost=lambda d: Cost(flop=2 * d.T * d.I * d.O, bytes=2 * (d.T * d.I + d.T * d.O + d.I * d.O)),
    doc=f"""y = x W^T, W [O, I] dequantized, products summed in float32.

    With fp8 weights the rows of x are quantized first, 1x128 (`dsc.plugins.stored.quantize_activations`).
    {TAKEN_DOC}
    """,
)
