"""The work list of a Moe, made by plan.cu compiled for the CPU: every pair that has an expert is in one tile of that expert."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from support.cuda_on_cpu import cuda_on_cpu

from dsc.plugins.moe import gpu_work

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
THREADS, K = gpu_work.PLAN_THREADS, 8
KEPT = {"all": 1.0, "an eighth": 0.125, "few": 0.01, "none": 0.0}


def plan(ids: torch.Tensor, experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """order [pairs] and tiles [the most there can be, 4], poisoned before."""
    defines = {"EXPERTS": experts, "TILE": tile, "THREADS": THREADS, "PDL": 0, "LATE": 0}
    source = Path(gpu_work.__file__).with_name("plan.cu")
    make = cuda_on_cpu(source, "moe_plan", tuple(defines.items()), THREADS, 5, "static")
    pairs = ids.numel()
    num_tiles = min(pairs, experts + pairs // tile)
    order, tiles = torch.full((pairs,), -77, dtype=torch.int32), torch.full((num_tiles, 4), -77, dtype=torch.int32)
    make(1, *map(ctypes.c_void_p, (ids.data_ptr(), order.data_ptr(), tiles.data_ptr(), pairs, num_tiles)))
    return order, tiles


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize(("experts", "tile"), [(32, 16), (32, 128), (128, 8), (256, 16)])
@pytest.mark.parametrize("tokens", [1, 3, 64, 700])
def test_pairs_are_in_tiles_of_their_expert(tokens: int, experts: int, tile: int, kept: str) -> None:
    """Sorted by expert and stably; a pair of another rank is in none, and tiles past the last one have no expert."""
    generator = torch.Generator().manual_seed(tokens + experts)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:K] for _ in range(tokens)]).int()
    ids = ids.where(torch.rand(tokens, K, generator=generator) < KEPT[kept], -1).flatten()
    order, tiles = plan(ids, experts, tile)
    live = int((ids >= 0).sum())
    sorted_pairs = ids.where(ids >= 0, experts).argsort(stable=True)[:live]
    assert torch.equal(order[:live], sorted_pairs.int())
    assert (order[live:] == -77).all()
    want = []
    for expert, count in zip(*ids[ids >= 0].unique(return_counts=True), strict=True):
        first = int((ids[ids >= 0] < expert).sum())
        want += [[int(expert), first + at, min(tile, int(count) - at), 0] for at in range(0, int(count), tile)]
    assert tiles[: len(want)].tolist() == want
    assert (tiles[len(want) :] == torch.tensor([-1, 0, 0, 0])).all()
