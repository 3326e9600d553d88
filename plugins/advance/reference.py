"""Advance in plain torch."""

from __future__ import annotations

import torch


def reference(
    *,
    chosen: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    sequence_lengths: torch.Tensor,
    places: torch.Tensor,
    block_table: torch.Tensor,
    block_tokens: int,
) -> tuple[torch.Tensor, ...]:
    """See op.py. All int32 [B], changed in place; block_table [B, P]."""
    live = slots >= 0
    going = live & (chosen >= 0)
    tokens[going] = chosen[going]
    for counter in (positions, sequence_lengths, places):
        counter[going] += 1
    block = positions // block_tokens
    inside = block.clamp(0, max(block_table.shape[1] - 1, 0)).long()
    next_slots = block_table.gather(1, inside[:, None])[:, 0] * block_tokens + positions % block_tokens
    slots[live] = torch.where(going, next_slots, -1).int()[live]
    return tokens, positions, slots, sequence_lengths, places
