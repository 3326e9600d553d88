"""AllReduce on GPUs: one collective, whose library adds in an order of its own."""

from dsc.plugins.gpu_node import GpuNode
from dsc.runtime.steps import Collective, Variant


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """x and y may be one place or two."""
    x, y = node.at("x"), node.at("y")
    count = f"T*{node.width('D')}"
    return (Variant((Collective("all_reduce", "tensor", x.pointer, y.pointer, x.dtype, count),)),)
