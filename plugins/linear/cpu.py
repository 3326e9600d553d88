"""Linear on CPUs: the kernel of the weight's format."""

from __future__ import annotations

import torch

from dsc.plugins.cpu_linear import bind_product
from dsc.plugins.cpu_node import CpuNode, Run
from dsc.plugins.stored import given_codes


def bind(node: CpuNode) -> Run:
    """One product, its weight packed once for all graphs."""
    product = bind_product(node, "w", getattr(torch, node.types["x"].dtype))
    return lambda step, x, codes, scales: (product(x, given_codes(codes, scales)),)
