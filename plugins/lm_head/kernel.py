"""LmHead on GPUs: Linear's kernels on the rows whose logits are wanted, their sums stored in float32."""

from dsc.plugins.gpu_node import GpuNode
from dsc.plugins.linear.kernel import multiply
from dsc.runtime.steps import Variant


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """The tile that suits the number of rows."""
    return multiply(node, "hidden", "w", "logits", count="R", rows="logit_rows")
