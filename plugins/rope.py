"""Rotary position embedding in interleaved pairs (x0, x1), (x2, x3), ..., as DeepSeek stores q_pe and k_pe.

Legend: T tokens, H heads, R the rotated width. Imports torch only.
"""

from __future__ import annotations

import torch

from dsc.plugins.cpu_node import StepMemo


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., R] turned pair by pair by the angles of cos and sin [..., R/2], in float32."""
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def rotation(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The rows `positions` [T] of the tables as complex numbers cos + i sin, [T, R/2]."""
    return torch.complex(cos.index_select(0, positions), sin.index_select(0, positions))


def rotate_by(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """`rotate` in one multiplication: x float32 [..., R] with even strides, turns complex, as `rotation` makes them."""
    return torch.view_as_real(torch.view_as_complex(torch.unflatten(x, -1, (-1, 2))) * turns).flatten(-2)


def step_turns(step: StepMemo, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`rotation` of a step's rows, once for all layers (the tables of an engine are one pair)."""
    turns: torch.Tensor = step.once(("rotation", cos.data_ptr()), lambda: rotation(cos, sin, positions))
    return turns
