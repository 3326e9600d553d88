"""Rows of Moe against its reference where hidden values are fp8: what differs by a rounding may become another code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsc.plugins.stored import StoredWeight, linear
from support.tolerances import TOLERANCES, check_rows


def check_moe_rows(got: torch.Tensor, want: torch.Tensor, operands: Mapping[str, Any], what: str) -> None:
    """Every row of y by the tolerance of moe, with fp8 by that and one hidden value in the next code; then the median row
    keeps the tolerance of bfloat16 by itself.

    operands   the node's by name, weights as StoredWeight, without a shared expert None
    """
    flips = _largest_flips(operands)
    dtype = str(got.dtype).removeprefix("torch.")
    if flips is None:
        check_rows(got, want, "moe", dtype, what)
        return
    size = want.double().norm(dim=-1)
    errors = torch.where((got == want).all(-1), 0.0, (got - want).double().norm(dim=-1) / size)
    limits = TOLERANCES["moe", dtype] + (flips / size).nan_to_num(0.0)
    assert (errors <= limits).all(), f"{what}: worst row {errors.max():.2e}"
    assert errors.median() <= TOLERANCES["moe", "bfloat16"], f"{what}: median row {errors.median():.2e}"


def _largest_flips(operands: Mapping[str, Any]) -> torch.Tensor | None:
    """How far a row moves, at most, when one hidden value of one of its experts falls to the neighbour of its e4m3 code:
    neighbours are up to an eighth apart, and a few outliers carry a SwiGLU's row. None without fp8.

    The sums of fp8 tensor cores are cut off at about 2^-13 of their largest product, and a value near the border of two
    codes needs no more. Noise of 1e-4 in the reference's own hidden values moves its worst row of 520 by 2.8e-2.
    """

    def flips(x: torch.Tensor, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> torch.Tensor:
        hidden = torch.nn.functional.silu(linear(x, gate)) * linear(x, up)
        return (hidden.abs() / 8 * down.dequantize().norm(dim=0)).amax(-1).double()

    x, ids, routing = operands["x"], operands["ids"], operands["weights"]
    gate, up, down = (operands[name] for name in ("gate", "up", "down"))
    shared = [operands[f"shared_{name}"] for name in ("gate", "up", "down")]
    moved, found = torch.zeros(len(x), dtype=torch.float64), False
    if down.format.kind == "fp8":
        found = True
        for expert in sorted(set(ids.flatten().tolist()) - {-1}):
            rows, column = torch.nonzero(ids == expert, as_tuple=True)
            of_expert = flips(x[rows], gate[expert], up[expert], down[expert]) * routing[rows, column]
            moved[rows] = moved[rows].maximum(of_expert)
    if shared[2] is not None and shared[2].format.kind == "fp8":
        found = True
        moved = moved.maximum(flips(x, *shared))
    return moved if found else None
