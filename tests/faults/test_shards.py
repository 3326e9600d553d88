"""Stored weights cut as the programs of engines cut them: shards put together are the whole, and together compute what it
computes; and what cannot be cut so is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.random_weights import random_weight
from support.tolerances import check_rows

from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.splits import COLUMNS, EXPERT_MAP, HEAD, ROWS, Split, cuts_of
from dsc.compiler.model_shapes import read_shape
from dsc.compiler.planning.sharding import check_parallel, rank_bytes, shard_faults, split
from dsc.compiler.planning.weights import PlannedWeight, planned_weights
from dsc.compiler.quantize import quantize
from dsc.compiler.recipe import load_recipe
from dsc.plugins.formats import parse_format
from dsc.plugins.linear.reference import reference as linear
from dsc.plugins.stored import StoredWeight
from dsc.plugins.swiglu.reference import reference as swiglu
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import Parallel
from dsc.runtime.shards import Place, take

# R1 with fewer heads, experts and hidden features. The widths 2048 and 18432 are cut by 8 in whole groups of 128 and blocks;
# 1920 is 15 of them: two ranks need groups of 64, four groups of 32, and eight cannot.
SPEC = replace(
    read_shape("deepseek-ai/DeepSeek-R1")[0], hidden_size=256, num_heads=16, num_experts=8, moe_intermediate_size=1920
)
WINT4 = ("wint4:128", "wint4:64", "wint4:32")
FORMATS = (*WINT4, "fp8", "wint8", "bf16")
BY_COLUMNS = {"self_attn.o_proj", "mlp.down_proj", "mlp.shared_experts.down_proj", "mlp.experts.down_proj"}
BY_ROWS = {
    "self_attn.q_b_proj", "self_attn.kv_b_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up_proj", "mlp.experts.gate_proj", "mlp.experts.up_proj",
}  # fmt: skip


def planned(format_: str) -> dict[str, PlannedWeight]:
    """The weights of layers that are split, all in one format, by their names in a layer."""
    weights = planned_weights(SPEC, load_recipe("r1-wint4"))
    return {
        w.name.removeprefix("model.layers.{}.").removesuffix(".weight"): replace(w, format=parse_format(format_))
        for w in weights
        if split(SPEC, w, Mesh(2, 1)) and w.name not in (HEAD, EXPERT_MAP)
    }


def cut(whole: StoredWeight, splits: Sequence[Split]) -> list[StoredWeight]:
    """What each rank of an engine has of a stored matrix."""
    ways = splits[0].ways
    stored = {"data": whole.data, "scales": whole.scales}
    shards = []
    for rank in range(ways):
        parts = {
            part: take(tensor, cuts_of(whole.shape, whole.format, part, splits), Place(rank, ways, 1))
            for part, tensor in stored.items()
            if tensor is not None
        }
        shards.append(StoredWeight(whole.format, parts["data"], parts.get("scales")))
    return shards


def random_matrix(weight: PlannedWeight, seed: int = 0) -> StoredWeight:
    """A matrix of the planned shape, one of the experts where they are stacked, as an engine stores it."""
    return random_weight(weight.format_name, weight.shape[-2:], torch.Generator().manual_seed(seed))


def splits(format_: str, ways: int) -> list[tuple[str, PlannedWeight, tuple[Split, ...]]]:
    """Weights that may be cut over so many ranks, and how."""
    mesh = Mesh(ways, 1)
    return [
        (name, w, split(SPEC, w, mesh)) for name, w in planned(format_).items() if not shard_faults(SPEC, [w], mesh)
    ]


def axis_of(splits: Sequence[Split]) -> int:
    """The one axis that is cut: 0 rows, 1 columns."""
    (found,) = splits
    return found.axis - ROWS


def test_rows_and_columns() -> None:
    """What reads the residual stream is cut by rows, what adds to it by columns."""
    axes = {name: axis_of(split(SPEC, w, Mesh(2, 1))) for name, w in planned("bf16").items()}
    assert axes == dict.fromkeys(BY_ROWS, 0) | dict.fromkeys(BY_COLUMNS, 1)


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize("format_", FORMATS)
def test_shards_put_together_are_the_whole(format_: str, ways: int) -> None:
    """Bit for bit after dequantization, and of as many bytes as a plan reckons with."""
    found = splits(format_, ways)
    assert {name for name, _, _ in found} >= {name for name in BY_ROWS | BY_COLUMNS if "experts" not in name}
    for name, weight, how in found:
        whole = random_matrix(weight)
        shards = cut(whole, how)
        assert torch.equal(torch.cat([shard.dequantize() for shard in shards], axis_of(how)), whole.dequantize()), name
        experts = weight.shape[0] if len(weight.shape) > 2 else 1
        assert {experts * shard.nbytes for shard in shards} == {rank_bytes(SPEC, weight, Mesh(ways, 1))}, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ways", [2, 8])
@pytest.mark.parametrize("format_", FORMATS)
def test_partial_outputs_add_up(format_: str, ways: int, dtype: torch.dtype) -> None:
    """Of Linear with columns over ranks: each multiplies its part of x, and the sums over ranks are the whole's output."""
    tried = set()
    for name, weight, how in splits(format_, ways):
        if axis_of(how) == 1:
            whole = random_matrix(weight)
            x = torch.randn(5, weight.shape[-1], generator=torch.Generator().manual_seed(1)).to(dtype)
            parts = zip(x.chunk(ways, 1), cut(whole, how), strict=True)
            added = sum(linear(x=mine, w=shard)[0].float() for mine, shard in parts)
            assert isinstance(added, torch.Tensor)
            check_rows(added.to(dtype), linear(x=x, w=whole)[0], "linear", str(dtype).removeprefix("torch."), name)
            tried.add(name)
    assert tried >= {"self_attn.o_proj", "mlp.down_proj"}


@pytest.mark.parametrize("ways", [2, 8])
@pytest.mark.parametrize("format_", FORMATS)
def test_an_mlp_over_ranks(format_: str, ways: int) -> None:
    """Rows of gate and up go with columns of down: between them nothing is exchanged."""
    weights = {name: (w, how) for name, w, how in splits(format_, ways)}
    found = [weights[f"mlp.{part}_proj"] for part in ("gate", "up", "down")]
    wholes = [random_matrix(weight, seed) for seed, (weight, _) in enumerate(found)]
    x = torch.randn(5, SPEC.hidden_size, generator=torch.Generator().manual_seed(3))

    def mlp(gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> torch.Tensor:
        (hidden,) = swiglu(gate=linear(x=x, w=gate)[0], up=linear(x=x, w=up)[0])
        return linear(x=hidden, w=down)[0]

    ranks = zip(*(cut(whole, how) for whole, (_, how) in zip(wholes, found, strict=True)), strict=True)
    added = torch.stack([mlp(*shards) for shards in ranks]).sum(0)
    # FP8 rounds hidden values online: sums in another order may move one to the next code.
    check_rows(added, mlp(*wholes), "moe", "bfloat16" if format_ == "fp8" else "float32")


@pytest.mark.parametrize("grid", ["-7..7", "-8..7"])
@pytest.mark.parametrize("format_", [*WINT4, "fp8"])
def test_a_shard_is_what_its_columns_quantize_to(format_: str, grid: str) -> None:
    """No scale comes from beyond a shard. (wint4's codes are chosen once for a whole weight.)"""
    kind = parse_format(format_)
    values = torch.randn(256, 1024, generator=torch.Generator().manual_seed(2))
    parts = quantize(values, kind, grid).parts
    shards = cut(StoredWeight(kind, parts["data"], parts["scales"]), [Split(COLUMNS, "tensor", 4)])
    for shard, columns in zip(shards, values.chunk(4, 1), strict=True):
        alone = quantize(columns.contiguous(), kind, grid).parts
        assert torch.equal(shard.data.view(torch.uint8), alone["data"].view(torch.uint8))
        assert torch.equal(shard.scales, alone["scales"])


@pytest.mark.parametrize("format_", [*WINT4, "fp8"])
def test_scales_that_are_not_split_with_the_columns_would_show(format_: str) -> None:
    whole = random_matrix(planned(format_)["self_attn.o_proj"])
    first, second = cut(whole, [Split(COLUMNS, "tensor", 2)])
    spoiled = StoredWeight(second.format, second.data, first.scales)
    assert not torch.equal(torch.cat([first.dequantize(), spoiled.dequantize()], 1), whole.dequantize())
    x = torch.randn(5, whole.shape[1], generator=torch.Generator().manual_seed(1))
    added = linear(x=x[:, :1024], w=first)[0] + linear(x=x[:, 1024:], w=spoiled)[0]
    with pytest.raises(AssertionError, match="worst row"):
        check_rows(added, linear(x=x, w=whole)[0], "linear", "float32")


@pytest.mark.parametrize(
    ("format_", "most"), [("wint4:128", 1), ("wint4:64", 2), ("wint4:32", 4), ("fp8", 1), ("wint8", 8), ("bf16", 8)]
)
def test_a_cut_through_a_group_or_block_is_refused(format_: str, most: int) -> None:
    """1920 columns, by as many ranks as leave groups and blocks whole: no shard could be stored beyond them."""
    name = "mlp.experts.down_proj"
    weight = planned(format_)[name]
    for ways in (2, 4, 8):
        if ways <= most:
            assert name in {found for found, _, _ in splits(format_, ways)}
            continue
        with pytest.raises(DscError) as raised:
            check_parallel(SPEC, [weight], Parallel(ways, 1, 1), "test.yaml")
        (what, why), *_ = raised.value.details
        grain = "blocks of 128" if format_ == "fp8" else f"groups of {weight.format.group if weight.format else 0}"
        assert what == f"model.layers.{{}}.{name}.weight"
        assert why == f"1920 columns = {ways} x {1920 // ways}, not in whole {grain}"
