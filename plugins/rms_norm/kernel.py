"""RMSNorm on GPUs: one program a row, statistics in float32."""

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode
from dsc.plugins.triton_activations import norm_arguments, store_codes
from dsc.runtime.steps import Variant


@triton.jit
def rms_norm(
    x, weight, y, epsilon, codes, scales, count, D: tl.constexpr, BLOCK: tl.constexpr, UE8M0: tl.constexpr,
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[r] = x[r] / sqrt(mean(x[r]^2) + epsilon) * weight, rounded; with codes e4m3 codes and scales of y too."""
    t = tl.program_id(0)
    row = t.to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    scale = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row + columns, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    inverse = tl.math.rsqrt(tl.sum(values * values, 0) / D + epsilon)
    made = (values * inverse * scale).to(y.dtype.element_ty)
    tl.store(y + row + columns, made, inside)
    if codes is not None:
        store_codes(made, t, codes, scales, count, D, BLOCK, UE8M0, NATIVE)


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """One launch of T programs."""
    width = node.width("D")
    step = node.triton(
        rms_norm,
        ("T",),
        {
            "x": node.at("x"),
            "weight": node.at("weight"),
            "y": node.at("y"),
            "epsilon": float(node.attributes["epsilon"]),
            "D": width,
            "BLOCK": max(128, triton.next_power_of_2(width)),
            **norm_arguments(node),
            "PDL": node.arch.has_pdl,
        },
        num_warps=8 if width > 2048 else 4,
        pdl=True,
    )
    return (Variant((step,)),)
