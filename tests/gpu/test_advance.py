"""Advance on a GPU, bit for bit, and bursts of decode steps against steps one by one."""

from pathlib import Path

import pytest
import torch
from support.engines import gpu_engine

from dsc.plugins.advance.reference import reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 3, 129, 300])
def test_equals_the_reference(rows: int) -> None:
    from support.gpu import GpuOp

    generator = torch.Generator().manual_seed(rows)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    state = {"tokens": ints(0, 99, rows), "positions": ints(0, 383, rows), "slots": ints(-1, 9, rows)}
    state |= {"sequence_lengths": ints(1, 400, rows), "places": ints(0, 400, rows)}
    fixed = {"chosen": ints(-1, 99, rows), "block_table": ints(0, 1000, rows, 6)}
    op = GpuOp(
        "Advance", {"chosen": fixed["chosen"], **state, "block_table": fixed["block_table"]}, {"block_tokens": 64}
    )
    out = op()
    wanted = reference(**fixed, **{k: v.clone() for k, v in state.items()}, block_tokens=64)
    for name, want in zip(state, wanted, strict=True):
        assert torch.equal(out[f"next_{name}"].cpu().flatten(), want), name


def test_bursts_change_nothing(tmp_path: Path) -> None:
    engine = gpu_engine("tiny-r1-fp32", tmp_path)
    prompts = [[5, 6, 7] * n for n in (1, 30, 21)]
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}):
        ahead = engine._loop._ahead
        assert ahead is not None
        got = engine.generate(prompts, max_tokens=150, ignore_eos=True, drafts=0, **options)
        engine._loop._ahead = None
        wanted = engine.generate(prompts, max_tokens=150, ignore_eos=True, drafts=0, **options)
        engine._loop._ahead = ahead
        assert [o.token_ids for o in got] == [o.token_ids for o in wanted]
