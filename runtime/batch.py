"""One ragged step: the int32 inputs that main and mtp share, built from sequences and their cache blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int32]
MAX_VIEWS = 1024  # sizes of steps remembered by a builder


@dataclass(frozen=True)
class Segment:
    """What a step computes of one sequence.

    tokens   the tokens to compute, at positions start, start + 1, ...
    blocks   the sequence's cache blocks in order, enough for start + len(tokens) tokens
    logits   how many of the last tokens need logits
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int] | Ints
    logits: int = 1


@dataclass(frozen=True)
class Batch:
    """Inputs of one step over packed sequences, all int32. T tokens, B sequences, P blocks a sequence, R logit rows.

    tokens [T]            mtp: of each position's successor
    positions [T]         from 0 in each sequence
    slots [T]             where the token goes in the cache: block * block_tokens + offset; -1: nowhere (padding)
    query_starts [B+1]    the tokens of sequence b are rows query_starts[b] to query_starts[b + 1]
    sequence_lengths [B]  tokens in the cache after this step
    block_table [B, P]    blocks of each sequence in order, anything behind its last
    logit_rows [R]        rows whose logits are wanted
    longest_query         most tokens of one sequence
    hidden [T, D]         mtp: the hidden rows that main gave for these positions (its own for drafts of drafts)
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    sequence_lengths: torch.Tensor
    block_table: torch.Tensor
    logit_rows: torch.Tensor
    longest_query: int
    hidden: torch.Tensor | None = None

    @classmethod
    def of(cls, segments: Sequence[Segment], block_tokens: int) -> Batch:
        """A batch of its own memory."""
        tokens = sum(len(s.tokens) for s in segments)
        return BatchBuilder(tokens, len(segments), block_tokens).build(segments)

    def for_mtp(self, successors: torch.Tensor, hidden: torch.Tensor, logit_rows: torch.Tensor) -> Batch:
        """The same rows as mtp takes them: each position's successor token and hidden row."""
        return replace(self, tokens=successors, hidden=hidden, logit_rows=logit_rows)

    def inputs(self) -> dict[str, torch.Tensor]:
        """Program inputs by name."""
        inputs = {
            "tokens": self.tokens,
            "positions": self.positions,
            "slots": self.slots,
            "query_starts": self.query_starts,
            "sequence_lengths": self.sequence_lengths,
            "block_table": self.block_table,
            "logit_rows": self.logit_rows,
        }
        if self.hidden is not None:
            inputs["hidden"] = self.hidden
        return inputs


class BatchBuilder:
    """Builds batches of up to `max_tokens` and `max_sequences` in memory made once: each is good until the next."""

    def __init__(self, max_tokens: int, max_sequences: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._rows = np.zeros((4, max_tokens), np.int32)  # tokens, positions, slots, logit rows
        self._starts = np.zeros(max_sequences + 1, np.int32)
        self._lengths = np.zeros(max_sequences, np.int32)
        self._views: dict[tuple[int, int, int], list[torch.Tensor]] = {}

    def build(self, segments: Sequence[Segment]) -> Batch:
        """Pack sequences in order; at least one logit row is made, since kernels need not know empty outputs."""
        tokens, positions, slots, logit_rows = self._rows
        table = np.zeros((len(segments), max(len(s.blocks) for s in segments)), np.int32)
        at = rows = longest = 0
        for b, segment in enumerate(segments):
            count, start, blocks = len(segment.tokens), segment.start, segment.blocks
            table[b, : len(blocks)] = blocks
            if count == 1:
                tokens[at], positions[at] = segment.tokens[0], start
                slots[at] = blocks[start // self._block_tokens] * self._block_tokens + start % self._block_tokens
            else:
                span = slice(at, at + count)
                tokens[span] = segment.tokens
                where = np.arange(start, start + count, dtype=np.int32)
                positions[span] = where
                slots[span] = table[b, where // self._block_tokens] * self._block_tokens + where % self._block_tokens
            for row in range(at + count - segment.logits, at + count):
                logit_rows[rows] = row
                rows += 1
            at += count
            longest = max(longest, count)
            self._starts[b + 1] = at
            self._lengths[b] = start + count
        if rows == 0:
            logit_rows[0], rows = 0, 1
        views = self._first(at, len(segments), rows)
        tokens_t, positions_t, slots_t, starts_t, lengths_t, logit_rows_t = views
        table_t = torch.from_numpy(table)
        return Batch(tokens_t, positions_t, slots_t, starts_t, lengths_t, table_t, logit_rows_t, longest)

    def _first(self, tokens: int, sequences: int, logit_rows: int) -> list[torch.Tensor]:
        """Views of what a step fills; made once, since steps of one size come again and again."""
        key = (tokens, sequences, logit_rows)
        if key not in self._views:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            arrays = [row[:tokens] for row in self._rows[:3]]
            arrays += [self._starts[: sequences + 1], self._lengths[:sequences], self._rows[3][:logit_rows]]
            self._views[key] = [torch.from_numpy(array) for array in arrays]
        return self._views[key]
