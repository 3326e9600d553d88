"""Residual add and RMSNorm on GPUs: one program a row, statistics in float32."""

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode
from dsc.plugins.triton_activations import norm_arguments, store_codes
from dsc.runtime.steps import Variant


@triton.jit
def add_rms_norm(
    x, residual, weight, y, total, epsilon, codes, scales, count, D: tl.constexpr, BLOCK: tl.constexpr, UE8M0: tl.constexpr,
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """total[r] = x[r] + residual[r], rounded; y[r] = total[r] / sqrt(mean(total[r]^2) + epsilon) * weight.

    With codes, e4m3 codes and scales of y, as it was rounded, too.
    """
    t = tl.program_id(0)
    row = t.to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    scale = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row + columns, inside, 0.0).to(tl.float32)
    values += tl.load(residual + row + columns, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + row + columns, rounded, inside)
    values = rounded.to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(values * values, 0) / D + epsilon)
    made = (values * inverse * scale).to(y.dtype.element_ty)
    tl.store(y + row + columns, made, inside)
    if codes is not None:
        store_codes(made, t, codes, scales, count, D, BLOCK, UE8M0, NATIVE)


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """One launch of T programs."""
    width = node.width("D")
    step = node.triton(
        add_rms_norm,
        ("T",),
        {
            **{name: node.at(name) for name in ("x", "residual", "weight", "y")},
            "total": node.at("sum"),
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
