"""How one_token.cu shares out a token's experts, compiled for the CPU: every row once, and as evenly as can be."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from support.cuda_on_cpu import cuda_on_cpu

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SOURCE = Path(__file__).parents[1] / "support" / "cuda_on_cpu" / "shares.cu"
K, BLOCKS = 8, 132
# Items of the shared expert, which may be none, and of every other one; what one of the first costs.
SIZES = [(32, 256, 1), (256, 256, 2), (224, 224, 1), (0, 224, 1), (5, 7, 3)]


def shares(ids: torch.Tensor, first: int, each: int, cost: int, spread: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """How many take an item of the shared expert and of each pair, and what every block's items cost."""
    defines = (("TOP_K", K), ("SHARED_COST", cost), ("SPREAD", int(spread)))
    take = cuda_on_cpu(SOURCE, "shares", defines, 1, 5)
    takers, costs = torch.zeros(first + K * each, dtype=torch.int32), torch.full((BLOCKS,), -1, dtype=torch.int32)
    take(BLOCKS, *map(ctypes.c_void_p, (ids.data_ptr(), first, each, takers.data_ptr(), costs.data_ptr())))
    return takers, costs


@pytest.mark.parametrize(("first", "each", "cost"), SIZES)
@pytest.mark.parametrize("here", [(), (0,), (7,), (2, 5), (0, 1, 2, 3, 4, 5, 6), tuple(range(K))], ids=str)
def test_rows_of_pairs_that_have_an_expert_are_taken_once(
    here: tuple[int, ...], first: int, each: int, cost: int
) -> None:
    ids = torch.full((K,), -1, dtype=torch.int32)
    ids[list(here)] = torch.arange(len(here), dtype=torch.int32)
    takers, costs = shares(ids, first, each, cost, spread=True)
    want = torch.cat([torch.ones(first), (ids >= 0).repeat_interleave(each)]).int()
    assert torch.equal(takers, want)
    units = first * cost + len(here) * each
    assert int(costs.sum()) == units
    assert int(costs.max()) <= -(-units // BLOCKS) + cost - 1


@pytest.mark.parametrize(("first", "each", "cost"), SIZES)
def test_without_ranks_all_pairs_are_shared_out(first: int, each: int, cost: int) -> None:
    """Whoever they are: where a token's experts are is not known yet."""
    takers, costs = shares(torch.full((K,), -1, dtype=torch.int32), first, each, cost, spread=False)
    assert bool((takers == 1).all())
    units = first * cost + K * each
    assert int(costs.max()) <= -(-units // BLOCKS) + cost - 1
