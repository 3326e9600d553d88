"""Round matrices to FP8 (e4m3) in blocks of 128x128, as round_integers.py rounds to integers: some rows at a time, in TorchScript.

Legend: N rows, K columns of a matrix, which 128 divides here; g blocks along a row.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch

from dsc.compiler.float8 import HALF_EXPONENT, SIGN_AND_VALUE
from dsc.compiler.round_integers import (
    BUFFERS,
    RUN_ELEMENTS,
    SMALLEST_SCALE,
    SUMMED_COLUMNS,
    Rounded,
    add_up,
    row_powers,
    square_sums,
)
from dsc.plugins.stored import FP8_BLOCK, FP8_MAX


def round_fp8(x: torch.Tensor) -> Rounded:
    """float32 [N, K] of any K: codes, and scales [N / 128, K / 128] rounded up; a scale is its block's largest magnitude / 448."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % FP8_BLOCK)) if columns % FP8_BLOCK else x
    groups = padded.view(rows, -1, FP8_BLOCK)
    widest_Ng = torch.maximum(groups.amax(-1), groups.amin(-1).neg())
    largest_N = widest_Ng.amax(-1)
    nothing = torch.empty(0)
    blocks = torch.nn.functional.pad(widest_Ng, (0, 0, 0, -rows % FP8_BLOCK))
    scales = blocks.view(-1, FP8_BLOCK, blocks.shape[1]).amax(1) / FP8_MAX
    if not bool(np.isfinite(largest_N.numpy()).all()):
        return Rounded(nothing, scales, nothing, nothing, finite=False)
    empty = scales < SMALLEST_SCALE
    scales = scales.masked_fill(empty, 1.0)

    powers_N = row_powers(largest_N)
    width = padded.shape[1]
    step = min(max(RUN_ELEMENTS // width, 1), rows)
    ratios, decoded = (BUFFERS.take(name, (step, width)) for name in ("ratios", "values"))
    bits = BUFFERS.take("bits", (step, width), torch.int16)
    squares, norms = (BUFFERS.take(n, (rows, math.gcd(width, SUMMED_COLUMNS))) for n in ("squares", "norms"))
    codes = torch.empty((rows, width), dtype=torch.float8_e4m3fn)
    spread = scales.repeat_interleave(FP8_BLOCK, 0)[:rows].unsqueeze(-1)
    error_steps = spread / powers_N.view(-1, 1, 1) if len(powers_N) else spread
    _go_through(
        padded, spread, error_steps, powers_N, step, codes, codes.view(torch.int8), squares, norms,
        ratios, decoded, bits, bits.view(torch.float16), FP8_MAX,
    )  # fmt: skip
    squares_N, norms_N = add_up(squares, powers_N), add_up(norms, powers_N)
    data = codes if width == columns else codes.view(torch.int8)[:, :columns].contiguous().view(torch.float8_e4m3fn)
    return Rounded(data, scales, squares_N, norms_N, zero_groups=int(empty.count_nonzero()))


def _go_through(
    x: torch.Tensor,
    scales: torch.Tensor,
    error_steps: torch.Tensor,
    powers: torch.Tensor,
    step: int,
    out: torch.Tensor,
    signed: torch.Tensor,
    squares: torch.Tensor,
    norms: torch.Tensor,
    ratios: torch.Tensor,
    decoded: torch.Tensor,
    bits: torch.Tensor,
    halves: torch.Tensor,
    largest: float,
    keep: int = SIGN_AND_VALUE,
    exponent: float = HALF_EXPONENT,
) -> None:
    """Fill `out` with codes, and `squares` and `norms` as `square_sums` does.

    x        float32 [N, K]; scales [N, g, 1], and `error_steps` the same, measured in `powers` [N] where those are not empty
    signed   `out` as int8
    step     rows at a time, for which `ratios` to `halves` are memory: `halves` is `bits` as float16
    """
    rows, num_groups = x.shape[0], scales.shape[1]
    seven, sign_and_value = torch.tensor(7, dtype=torch.int16), torch.tensor(keep, dtype=torch.int16)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        count = last - first
        if count < step:
            ratios, decoded, bits, halves = ratios[:count], decoded[:count], bits[:count], halves[:count]
        torch.div(x[first:last].view(count, num_groups, -1), scales[first:last], out=ratios.view(count, num_groups, -1))
        ratios.clamp_(-largest, largest)
        out[first:last].copy_(ratios)
        # As e4m3_to_float32 in float8.py; there is no NaN among them.
        bits.copy_(signed[first:last]).bitwise_left_shift_(seven).bitwise_and_(sign_and_value)
        decoded.copy_(halves).mul_(exponent)
        ratios.sub_(decoded)
        ratios.view(count, num_groups, -1).mul_(error_steps[first:last])
        square_sums(ratios, powers[:0], ratios, squares[first:last])
        square_sums(x[first:last], powers[first:last], ratios, norms[first:last])


with warnings.catch_warnings():
    # As in round_integers.py: the same in plain Python, only slower.
    warnings.simplefilter("ignore", DeprecationWarning)
    _go_through = torch.jit.script(_go_through)
