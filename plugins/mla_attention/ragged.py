"""How the sequences of a step are put together for batched attention, once for all layers.

Legend: G sequences of a group, Q queries of each (shorter ones padded), S keys of each, R the rotated width.
Imports torch and numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

MASK_CELLS = 1 << 23  # most elements of a mask: 32 MB at float32
GROUP_ELEMENTS = 1 << 24  # most elements of gathered keys, or of one part's queries: 64 MB at float32
FREE_TOKENS, FREE_CELLS = 1 << 12, 1 << 16  # padding up to here costs less than a second group


class Span(NamedTuple):
    """The queries of one sequence: rows start .. start + queries of the step; its context of `length` tokens."""

    sequence: int
    start: int
    queries: int
    length: int


@dataclass
class Part:
    """Queries [G, Q] of a group, and which of its keys they see.

    rows    of q: a range when they are consecutive; a padded query repeats its sequence's last one
    real    None, or the flat indices of [G, Q] that are no padding, and the rows of the output that they are
    turns   complex [G*Q, 1, R/2]: the queries' rotations
    """

    spans: list[Span]
    queries: int
    keys: int
    rows: slice | torch.Tensor
    real: tuple[torch.Tensor, torch.Tensor] | None
    turns: torch.Tensor
    keep_mask: bool = True
    _mask: torch.Tensor | None = field(default=None, repr=False)

    @cached_property
    def sees_all(self) -> bool:
        """Whether every query sees every key."""
        return self.queries == 1 and all(span.length == self.keys for span in self.spans)

    @cached_property
    def causal(self) -> bool:
        """Whether query j sees keys 0 .. j, in every sequence."""
        return all(span.length == span.queries == self.keys for span in self.spans)

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """[G, Q, keys]: 0 where a query sees a key and -inf elsewhere; None where it sees all."""
        if self.sees_all or self._mask is not None:
            return self._mask
        _, counts, lengths = _columns(self.spans)
        last_GQ = lengths - counts + torch.minimum(torch.arange(self.queries), counts - 1)
        hidden = torch.arange(self.keys) > last_GQ.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        if self.keep_mask:
            self._mask = mask
        return mask


@dataclass
class Group:
    """Sequences attended in one batch. `slots`: rows of the cache [G*S], a range when they are consecutive."""

    size: int
    keys: int
    slots: slice | torch.Tensor
    parts: list[Part]


@dataclass
class Plan:
    """All groups of a step.

    whole  one part holds exactly the step's rows, in order
    turns  complex [T, 1, R/2]: the rotations of all rows
    """

    groups: list[Group]
    whole: bool
    turns: NDArray[np.complex64]


def make_plan(
    query_starts: torch.Tensor,
    sequence_lengths: torch.Tensor,
    block_table: torch.Tensor,
    turns: torch.Tensor,
    block_tokens: int,
    row_elements: int,
    key_elements: int,
    group_elements: int = 0,
) -> Plan:
    """Group the step's sequences.

    turns           complex [T, R/2], the rotations of all rows
    row_elements    elements of one row's queries over all heads, key_elements of one gathered key: they bound memory
    group_elements  most elements of the gathered keys of several sequences; 0: what memory allows
    """
    starts, lengths, table = query_starts.tolist(), sequence_lengths.tolist(), block_table.numpy()
    spans = [
        Span(sequence, starts[sequence], starts[sequence + 1] - starts[sequence], length)
        for sequence, length in enumerate(lengths)
        if starts[sequence + 1] > starts[sequence]
    ]
    batches = _batches(spans, row_elements, key_elements, min(group_elements or GROUP_ELEMENTS, GROUP_ELEMENTS))
    groups = [_group(batch, table, turns, block_tokens, row_elements) for batch in batches]
    parts = [part for group in groups for part in group.parts]
    if sum(len(part.spans) * part.queries * part.keys for part in parts if not part.sees_all) > MASK_CELLS:
        for part in parts:
            part.keep_mask = False
    return Plan(groups, len(parts) == 1 and parts[0].rows == slice(0, len(turns)), turns.unsqueeze(1).numpy())


def _batches(spans: list[Span], row_elements: int, key_elements: int, group_elements: int) -> list[list[Span]]:
    """All spans at once if the padding is cheap; else neighbours in length together."""
    if not spans or _fits(spans, row_elements, key_elements, group_elements):
        return [spans] if spans else []
    batches: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.queries, span.length), reverse=True):
        if batches and _fits([*batches[-1], span], row_elements, key_elements, group_elements):
            batches[-1].append(span)
        else:
            batches.append([span])
    return batches


def _fits(spans: Sequence[Span], row_elements: int, key_elements: int, group_elements: int) -> bool:
    queries, keys = max(span.queries for span in spans), max(span.length for span in spans)
    tokens, cells = len(spans) * keys, len(spans) * keys * queries
    return (
        cells <= MASK_CELLS
        and tokens * key_elements <= group_elements
        and len(spans) * queries * row_elements <= GROUP_ELEMENTS
        and tokens <= 2 * sum(span.length for span in spans) + FREE_TOKENS
        and cells <= 2 * sum(span.length * span.queries for span in spans) + FREE_CELLS
    )


def _group(
    spans: list[Span], table: NDArray[np.int32], turns: torch.Tensor, block_tokens: int, row_elements: int
) -> Group:
    keys = max(span.length for span in spans)
    if len(spans) > 1:
        slots: slice | torch.Tensor = _slots_of_many(spans, keys, table, block_tokens)
        return Group(len(spans), keys, slots, [_part(spans, turns)])
    (span,) = spans
    blocks = table[span.sequence, : -(-keys // block_tokens)]
    first = int(blocks[0])
    if blocks.tolist() == list(range(first, first + len(blocks))):
        slots = slice(first * block_tokens, first * block_tokens + keys)
    else:
        offsets = np.arange(block_tokens, dtype=np.int32)
        slots = torch.from_numpy((blocks[:, None] * block_tokens + offsets).ravel()[:keys])
    # A piece of a sequence's queries is a sequence again, shorter by the queries that follow.
    step = max(1, min(MASK_CELLS // keys, GROUP_ELEMENTS // row_elements, span.queries))
    pieces = []
    for at in range(0, span.queries, step):
        queries = min(step, span.queries - at)
        length = span.length - span.queries + at + queries
        pieces.append(_part([Span(span.sequence, span.start + at, queries, length)], turns))
    return Group(1, keys, slots, pieces)


def _slots_of_many(spans: list[Span], keys: int, table: NDArray[np.int32], block_tokens: int) -> torch.Tensor:
    """Cache rows [G*S]. Behind its end a sequence repeats its last token: unwritten rows may hold NaN, and 0 * NaN."""
    ends = np.array([[span.length - 1] for span in spans], np.int32)
    blocks, offsets = np.divmod(np.minimum(np.arange(keys, dtype=np.int32), ends), block_tokens)
    sequences = np.array([[span.sequence] for span in spans])
    return torch.from_numpy((table[sequences, blocks] * block_tokens + offsets).ravel())


def _part(spans: list[Span], turns: torch.Tensor) -> Part:
    queries, keys = max(span.queries for span in spans), max(span.length for span in spans)
    rows: slice | torch.Tensor = slice(spans[0].start, spans[-1].start + spans[-1].queries)
    consecutive = all(one.start + one.queries == two.start for one, two in pairwise(spans))
    real = None
    if not consecutive or any(span.queries < queries for span in spans):
        firsts, counts, _ = _columns(spans)
        offsets = torch.arange(queries)
        rows = (firsts + torch.minimum(offsets, counts - 1)).flatten()
        kept = (offsets < counts).flatten().nonzero().flatten()
        real = (kept, rows[kept])
    return Part(spans, queries, keys, rows, real, turns[rows].unsqueeze(1))


def _columns(spans: list[Span]) -> tuple[torch.Tensor, ...]:
    """First rows, numbers of queries, and lengths, int64 [G, 1] each."""
    return torch.tensor([span[1:] for span in spans]).unsqueeze(-1).unbind(1)
