"""Texts as steps: windows of tokens packed into as few ragged steps as an engine's limits allow.

Legend: T tokens of all windows, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dsc.runtime.batch import Batch, Segment

Windows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Step:
    """Some whole windows: where their rows lie among those of all windows, inputs by name, cache blocks they need."""

    rows: slice
    inputs: Mapping[str, torch.Tensor]
    num_blocks: int


def make_steps(windows: Windows, block_tokens: int, max_tokens: int = 0, max_sequences: int = 0) -> list[Step]:
    """Steps of at most so many tokens and windows; 0 is no limit. No window may be longer than a step."""
    steps: list[Step] = []
    group: list[Sequence[int]] = []
    start = 0
    for window in windows:
        size = sum(map(len, group))
        full = (max_tokens and size + len(window) > max_tokens) or (max_sequences and len(group) == max_sequences)
        if group and full:
            steps.append(_step(group, start, block_tokens))
            start, group = start + size, []
        group.append(window)
    return [*steps, _step(group, start, block_tokens)]


def _step(windows: Windows, start: int, block_tokens: int) -> Step:
    segments, blocks = [], 0
    for window in windows:
        count = -(-len(window) // block_tokens)
        segments.append(Segment(window, 0, list(range(blocks, blocks + count)), logits=0))
        blocks += count
    batch = Batch.of(segments, block_tokens)
    return Step(slice(start, start + len(batch.tokens)), batch.inputs(), blocks)
