"""Ragged batches over a paged latent cache, with poison wherever no token was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsc.plugins.latent_cache import cache_rows, context_slots

POISON = 0xFF  # as float32 and bfloat16 a NaN
CONTEXT = 4200  # rows of the rope tables


@dataclass
class PagedBatch:
    """Sequences of `lengths` tokens whose last `queries` are this step's; `context` holds what is cached of each."""

    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    sequence_lengths: torch.Tensor
    block_table: torch.Tensor
    cache: torch.Tensor
    context: list[torch.Tensor]


def rope_tables(rope: int, context: int = CONTEXT) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin float32 [context, rope/2] of plain rotary embedding."""
    frequencies = 1e4 ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
    angles = torch.arange(context, dtype=torch.float64).unsqueeze(1) * frequencies
    return angles.cos().float(), angles.sin().float()


def make_batch(
    lengths: Sequence[int],
    queries: Sequence[int],
    width: int,
    *,
    dtype: str = "float32",
    block_tokens: int = 64,
    padding: int = 0,
    shuffled: bool = True,
    generator: torch.Generator,
) -> PagedBatch:
    """A batch whose whole context is cached as random rows; `padding` rows of no sequence follow.

    The block table's entries behind a sequence's end are 0, the block of somebody else.
    """
    needed = [-(-n // block_tokens) for n in lengths]
    blocks = sum(needed) + 2
    order = torch.randperm(blocks, generator=generator) if shuffled else torch.arange(blocks)
    table = torch.zeros(len(lengths), max([1, *needed]), dtype=torch.int32)
    for sequence, taken in enumerate(order[: sum(needed)].split(needed)):
        table[sequence, : len(taken)] = taken
    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    cache = torch.full((blocks, block_tokens * width * size), POISON, dtype=torch.uint8)
    rows = cache_rows(cache, dtype, width)
    context, slots, positions = [], [], []
    for sequence, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        values = torch.randn(length, width, generator=generator).to(rows.dtype)
        where = context_slots(table[sequence], length, block_tokens)
        rows[where] = values
        context.append(values)
        slots.append(where[length - count :])
        positions.append(torch.arange(length - count, length))
    slots.append(torch.full((padding,), -1))
    positions.append(torch.zeros(padding, dtype=torch.int64))
    return PagedBatch(
        positions=torch.cat(positions).int(),
        slots=torch.cat(slots).int(),
        query_starts=torch.tensor([0, *queries]).cumsum(0).int(),
        sequence_lengths=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        cache=cache,
        context=context,
    )
