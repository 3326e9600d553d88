"""Ops across ranks, each rank a thread: sums and logits are the same everywhere, and experts spread over ranks add up."""

from __future__ import annotations

import pytest
import torch
from support.cpu_op import IMPLEMENTATIONS, CpuOp
from support.random_weights import FORMATS, random_weight
from support.threaded_ranks import run_ranks
from support.tolerances import check_rows

from dsc.plugins.communicator import communicator, gather
from dsc.plugins.stored import StoredWeight

DTYPES = (torch.float32, torch.bfloat16)
# F is of an expert, FS of the shared one: groups and blocks of 128 stay whole when they are cut in 2 and in 16.
T, D, F, FS, E, K = 33, 256, 256, 2048, 16, 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_are_in_the_order_of_the_ranks(ranks: int, dtype: torch.dtype) -> None:
    """In float32, rounded once, and on every rank the same bits."""
    generator = torch.Generator().manual_seed(ranks)
    parts = [torch.randn(T, D, generator=generator).to(dtype) for _ in range(ranks)]
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()
    sums = run_ranks(ranks, lambda rank: CpuOp("reference", "AllReduce", {"x": parts[rank]}, {"ranks": ranks})()["y"])
    assert len(sums) == ranks
    assert all(torch.equal(y, want.to(dtype)) for y in sums)


def test_small_parts_of_a_sum_are_not_lost() -> None:
    """Rounded after each rank, 1 and a few times 2^-8 would stay 1 in bfloat16."""
    parts = [1.0, *[2.0**-9] * 7]
    sums = run_ranks(
        8,
        lambda rank: CpuOp(
            "reference", "AllReduce", {"x": torch.full((1, 1), parts[rank], dtype=torch.bfloat16)}, {"ranks": 8}
        )()["y"].item(),
    )
    assert sums == [1 + 2.0**-6] * 8


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("ranks", "part", "vocabulary"), [(2, 128, 256), (3, 128, 300), (4, 256, 700), (8, 128, 897)])
def test_logits_are_side_by_side(ranks: int, part: int, vocabulary: int, rows: int) -> None:
    """Without the padding, which the last rank has in part, or in whole beside some of the rank before."""
    generator = torch.Generator().manual_seed(vocabulary)
    padded = torch.randn(rows, ranks * part, generator=generator)
    padded[:, vocabulary:] = torch.nan
    parts = padded.chunk(ranks, -1)
    attributes = {"ranks": ranks, "vocabulary": vocabulary}
    found = run_ranks(
        ranks, lambda rank: CpuOp("reference", "GatherLogits", {"part": parts[rank]}, attributes)()["logits"]
    )
    assert all(torch.equal(logits, padded[:, :vocabulary]) for logits in found)
    assert all(logits.is_contiguous() for logits in found)


def stack_of(format_: str, generator: torch.Generator) -> dict[str, StoredWeight]:
    """Experts, and a shared one."""
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    shapes |= {"shared_gate": (FS, D), "shared_up": (FS, D), "shared_down": (D, FS)}
    return {name: random_weight(format_, shape, generator) for name, shape in shapes.items()}


def part_of(weight: StoredWeight, axis: int, index: int, count: int) -> StoredWeight:
    """One of `count` equal parts of an axis of a stored weight, whatever that axis counts in its data and scales."""
    by_row = weight.scales is not None and weight.scales.ndim <= axis  # wint8 has a scale a row
    scales = weight.scales if weight.scales is None or by_row else weight.scales.chunk(count, axis)[index].contiguous()
    return StoredWeight(weight.format, weight.data.chunk(count, axis)[index].contiguous(), scales)


def rank_of(weights: dict[str, StoredWeight], rank: int, groups: int, width: int) -> dict[str, StoredWeight]:
    """What one of groups * width ranks has: the experts of a group, and of their width a part; of the shared one a part."""
    group, place = divmod(rank, width)
    parts = {}
    for name, weight in weights.items():
        axis = len(weight.shape) - (1 if name.endswith("down") else 2)
        if name.startswith("shared"):
            parts[name] = part_of(weight, axis, rank, groups * width)
        else:
            parts[name] = part_of(part_of(weight, 0, group, groups), axis, place, width)
    return parts


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("groups", "width"), [(2, 1), (4, 1), (2, 2), (1, 2), (16, 1)])
@pytest.mark.parametrize("format_", FORMATS)
def test_experts_of_all_ranks_add_up(format_: str, groups: int, width: int, implementation: str) -> None:
    """Router with expert_map, Moe on a rank's experts, AllReduce; against one rank that has them all."""
    generator = torch.Generator().manual_seed(groups)
    weights = stack_of(format_, generator)
    x = torch.randn(T, D, generator=generator)
    routing = {"x": x, "w": torch.randn(E, D, generator=generator) / D**0.5, "bias": torch.rand(E, generator=generator)}
    routing["slots"] = torch.arange(T, dtype=torch.int32).masked_fill(torch.arange(T) % 5 == 4, -1)
    settings = {"top_k": K, "groups": 4, "topk_groups": 2, "scoring": "sigmoid", "group_score": "top2_sum"}
    settings |= {"normalize": 1, "scale": 2.5}
    routed = CpuOp("reference", "Router", routing, settings, ("w", "bias"))()
    want = CpuOp("reference", "Moe", {"x": x, **routed, **weights}, {})()["y"]
    each = E // groups

    def run(rank: int) -> torch.Tensor:
        group = rank // width
        experts = torch.arange(E, dtype=torch.int32)
        mine = torch.where(experts // each == group, experts % each, -1).view(1, E)
        given = CpuOp(
            implementation, "Router", {**routing, "expert_map": mine}, settings, ("w", "bias", "expert_map")
        )()
        assert torch.equal(given["weights"], routed["weights"])
        ours = routed["ids"] // each == group
        assert torch.equal(given["ids"], torch.where(ours & (routed["ids"] >= 0), routed["ids"] % each, -1))
        parts = rank_of(weights, rank, groups, width)
        y = CpuOp(implementation, "Moe", {"x": x, **given, **parts}, {})()["y"]
        return CpuOp("reference", "AllReduce", {"x": y}, {"ranks": groups * width})()["y"]

    sums = run_ranks(groups * width, run)
    assert all(torch.equal(y, sums[0]) for y in sums)
    check_rows(sums[0], want, "moe", "float32", f"{format_}, {groups} groups of {width}")


def test_the_first_failure_is_raised_and_nobody_hangs() -> None:
    def run(rank: int) -> None:
        for step in range(3):
            gather(torch.zeros(1), 4)
            if (rank, step) == (2, 1):
                raise ValueError(f"rank {rank} in step {step}")

    with pytest.raises(ValueError, match="rank 2 in step 1"):
        run_ranks(4, run)


def test_ranks_are_told_apart() -> None:
    """Threads of other ranks and callers outside keep their own communicator."""

    def run(rank: int) -> tuple[int, int, list[int]]:
        return communicator().rank, communicator().ranks, [int(x) for x in gather(torch.tensor(10 * rank), 3)]

    assert run_ranks(3, run) == [(rank, 3, [0, 10, 20]) for rank in range(3)]
    assert (communicator().rank, communicator().ranks) == (0, 1)


def test_a_graph_for_other_ranks_is_refused() -> None:
    with pytest.raises(AssertionError, match="a graph for 4 ranks runs on 2"):
        run_ranks(2, lambda rank: gather(torch.zeros(1), 4))


def test_ranks_that_gather_other_shapes_are_refused() -> None:
    with pytest.raises(AssertionError, match="several kinds"):
        run_ranks(2, lambda rank: gather(torch.zeros(rank + 1), 2))
