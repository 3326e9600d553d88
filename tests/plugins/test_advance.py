"""Advance gives what building the next step's inputs on the host gives."""

import torch

from dsc.plugins.advance.reference import reference
from dsc.runtime.batch import Batch, Segment

BLOCK = 4


def test_it_is_the_next_batch() -> None:
    blocks = [[7, 2, 9], [1, 5, 3], [4, 8, 6]]
    starts = [2, 3, 7]  # inside a block, at its end, at the end of the second
    batch = Batch.of([Segment([10 + i], s, b) for i, (s, b) in enumerate(zip(starts, blocks, strict=True))], BLOCK)
    places = torch.tensor([3, 4, 8], dtype=torch.int32)
    chosen = torch.tensor([20, 21, 22], dtype=torch.int32)
    given = {name: getattr(batch, name).clone() for name in ("tokens", "positions", "slots", "sequence_lengths")}
    tokens, positions, slots, lengths, after = reference(
        chosen=chosen, **given, places=places, block_table=batch.block_table, block_tokens=BLOCK
    )
    segments = [Segment([20 + i], s + 1, b) for i, (s, b) in enumerate(zip(starts, blocks, strict=True))]
    wanted = Batch.of(segments, BLOCK)
    assert tokens.tolist() == wanted.tokens.tolist()
    assert positions.tolist() == wanted.positions.tolist()
    assert slots.tolist() == wanted.slots.tolist()
    assert lengths.tolist() == wanted.sequence_lengths.tolist()
    assert after.tolist() == [4, 5, 9]


def test_padding_stays_and_broken_rows_become_it() -> None:
    ints = {"positions": [5, 6, 7], "slots": [-1, 9, 10], "sequence_lengths": [0, 7, 8], "places": [1, 2, 3]}
    given = {name: torch.tensor(values, dtype=torch.int32) for name, values in ints.items()}
    out = reference(
        chosen=torch.tensor([50, -1, 51], dtype=torch.int32),
        tokens=torch.tensor([1, 2, 3], dtype=torch.int32),
        **given,
        block_table=torch.tensor([[0, 1, 2]] * 3, dtype=torch.int32),
        block_tokens=4,
    )
    assert [t.tolist() for t in out] == [[1, 2, 51], [5, 6, 8], [-1, -1, 8], [0, 7, 9], [1, 2, 4]]
