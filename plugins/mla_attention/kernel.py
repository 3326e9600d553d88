"""MlaAttention on GPUs: absorbed in three launches; in mode expanded, long queries expand their context instead."""

from __future__ import annotations

from dsc.plugins.gpu_node import GpuNode
from dsc.plugins.mla_attention.absorbed import Absorbed, compute_dtype
from dsc.plugins.mla_attention.expanded import Expanded
from dsc.plugins.mla_attention.scratch import LONGEST
from dsc.runtime.errors import DscError
from dsc.runtime.steps import Variant

MINIMUM = {"heads": 1, "nope": 16, "rope": 16, "v": 16, "latent_dim": 16}


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """Variants by the step's tokens. float32 is attended absorbed in both modes, and so is what cannot be expanded."""
    _check(node)
    absorbed = Absorbed.of(node)
    expands = node.attributes["mode"] == "expanded" and compute_dtype(node) == "bfloat16"
    if not expands or node.attributes["nope"] != node.attributes["v"] or node.bounds["T"] <= LONGEST:
        return tuple(Variant(absorbed.steps(case), case.guard) for case in absorbed.cases())
    cases = absorbed.cases(LONGEST)
    few = [Variant(absorbed.steps(case), case.guard) for case in cases[:-1]]
    rest = absorbed.steps(cases[-1], LONGEST)
    return (*few, Variant((*rest, *Expanded.of(node, LONGEST).steps())))


def _check(node: GpuNode) -> None:
    for name, least in MINIMUM.items():
        value = int(node.attributes[name])
        if value < least or (value & (value - 1) and name != "heads"):
            raise DscError(f"{node.name}: {name} {value} has no kernel", wanted=f"a power of two from {least} on")
