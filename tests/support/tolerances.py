"""THE table of tolerances: by kind of op and dtype, on the relative L2 error of the worst token row.

Rounding to bfloat16 costs a value at most 2^-8 = 3.9e-3 and a row about 1.7e-3; a row in which one value outweighs the
others comes near the first, once for each side. Entries follow from how often a kind rounds; nothing is fitted to a kernel.
"""

from __future__ import annotations

import math

import torch

TOLERANCES = {
    ("copy", "float32"): 0.0,  # data movement, and one rounding that both sides do alike
    ("copy", "bfloat16"): 0.0,
    ("elementwise", "float32"): 1e-6,
    ("elementwise", "bfloat16"): 1e-2,  # the result, and one rounding between two factors
    ("norm", "float32"): 2e-6,
    ("norm", "bfloat16"): 4e-3,  # the result
    ("linear", "float32"): 5e-6,  # sums of a few thousand products in another order
    ("linear", "bfloat16"): 6e-3,  # the result
    ("router", "float32"): 2e-6,
    ("attention", "float32"): 1e-5,
    ("attention", "bfloat16"): 1.2e-2,  # probabilities, keys or queries rounded on the way
    ("moe", "float32"): 1e-5,
    ("moe", "bfloat16"): 1.2e-2,  # hidden values twice, every expert's output, the sum
    ("logprob", "float32"): 1e-5,
    # Logits of bfloat16 rows, by the head's format. They are float32 and not rounded, but tensor cores add products of e4m3
    # with 13 bits, a few tokens times integer codes are integers of 15 bits, and many tokens take 4-bit weights in bfloat16.
    ("logits", "bf16"): 1e-5,
    ("logits", "fp32"): 1e-5,
    ("logits", "fp8"): 3e-4,
    ("logits", "wint8"): 3e-4,
    ("logits", "wint4"): 3e-3,
}


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest relative L2 error of a row (the last axis); infinite where a row of zeros or a NaN is not met.

    Rows that are NaN throughout on both sides count as equal.
    """
    assert got.shape == want.shape, (got.shape, want.shape)
    if got.numel() == 0:
        return 0.0
    got, want = got.double().reshape(-1, got.shape[-1]), want.double().reshape(-1, want.shape[-1])
    same = (got == want).all(-1) | (got.isnan().all(-1) & want.isnan().all(-1))
    errors = torch.where(same, 0.0, (got - want).norm(dim=-1) / want.norm(dim=-1))
    return float(errors.nan_to_num(nan=math.inf).max())


def check_rows(got: torch.Tensor, want: torch.Tensor, kind: str, dtype: str, what: str = "") -> None:
    """Every row within the table's entry for a kind of op that computes in `dtype` (logits: whose weight has that format)."""
    error, limit = worst_row(got, want), TOLERANCES[kind, dtype]
    assert error <= limit, f"{what}: worst row {error:.2e}, {kind} in {dtype} allows {limit:.2e}"


# How far, in logits, an engine's choice may lie below the reference's best one, by the recipe's format. A format's
# rounding moves every logit; on a text of 4096 tokens the worst were 0.22, 1.54, 0.61 and 2.89.
LOGIT_GAPS = {"fp32": 1e-3, "bf16": 0.5, "fp8": 2.5, "wint8": 1.0, "wint4": 4.0}
# The same between two engines of one recipe, whose stored weights are equal: only sums and activations are rounded otherwise.
# On 256 tokens an H200 was 0, 0.128, 0.188, 0.062 and 1.094 below the CPU engine's best.
ENGINE_LOGIT_GAPS = {"fp32": 1e-3, "bf16": 0.25, "fp8": 0.5, "wint8": 0.25, "wint4": 1.5}
