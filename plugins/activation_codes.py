"""Operands of activations quantized for fp8 weights: what a norm makes beside its result, and what a product takes of it.

A leaf: imports only the standard library and `schema`.
"""

from typing import Any

from dsc.plugins.schema import F32, Tensor

E4M3 = ("float8_e4m3fn",)
QUANTIZE = {"quantize": ("fp8", "fp8:ue8m0")}  # a norm's optional attribute, and its outputs where it has it
MADE = (Tensor("codes", "T D", E4M3, when="quantize"), Tensor("scales", "(D+127)//128 T", F32, when="quantize"))
MADE_DOC = """With quantize, the format of the fp8 weights that are to multiply y: codes and scales are y, as it is rounded,
    quantized 1x128 (`dsc.plugins.stored.norm_codes`)."""
TAKEN_DOC = "x_codes and x_scales are x quantized so by the norm that made it: nothing else may be given."


def taken(width: str) -> tuple[Tensor, Tensor]:
    """Optional inputs of an op that multiplies x [T, width]."""
    dims = (f"T {width}", f"({width}+127)//128 T")
    return Tensor("x_codes", dims[0], E4M3, optional=True), Tensor("x_scales", dims[1], F32, optional=True)


def made_bytes(d: Any) -> float:
    """Bytes of a norm's codes and scales; d has the op's letters and, where the node has it, `quantize`."""
    return d.T * (d.D + 4 * -(-d.D // 128)) if getattr(d, "quantize", "") else 0
