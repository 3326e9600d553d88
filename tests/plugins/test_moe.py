"""Moe: transformers' MoE layer agrees; every way of grouping tokens gives the same; padding and idle experts are free."""

from types import SimpleNamespace

import pytest
import torch
from support.cpu_op import IMPLEMENTATIONS, CpuOp
from support.random_weights import random_weight
from support.tolerances import check_rows, worst_row
from torch.nn.functional import linear, silu

from dsc.compiler.listing import plugin_manual
from dsc.plugins.cpu_node import CpuNode, Packs
from dsc.plugins.formats import parse_format
from dsc.plugins.moe.cpu import Beside, pack_experts
from dsc.plugins.schema import SchemaError
from dsc.plugins.stored import StoredWeight

D, F, E, K = 128, 64, 16, 4
NAMES = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")
SHAPES = dict(zip(NAMES, ((E, F, D), (E, F, D), (E, D, F), (2 * F, D), (2 * F, D), (D, 2 * F)), strict=True))


def weights_of(format_, names=NAMES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: random_weight(format_, SHAPES[name], generator) for name in names}


def tokens_of(count, dtype=torch.float32, seed=1, experts=E):
    """x [T, D], ids [T, K], weights [T, K]."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, experts, generator=generator)
    weights, ids = scores.topk(K, -1)
    return {"x": torch.randn(count, D, generator=generator).to(dtype), "ids": ids.int(), "weights": weights}


def written_out(tokens, weights):
    """The op's sentence as a loop over tokens, in float64."""
    values = {name: w.dequantize().double() for name, w in weights.items()}

    def mlp(x, gate, up, down):
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    rows = []
    for x, ids, factors in zip(tokens["x"].double(), tokens["ids"].tolist(), tokens["weights"].double(), strict=True):
        y = mlp(x, *(values[name] for name in NAMES[3:])) if "shared_gate" in values else torch.zeros_like(x)
        for expert, factor in zip(ids, factors, strict=True):
            if expert >= 0:
                y = y + factor * mlp(x, *(values[name][expert] for name in NAMES[:3]))
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "count", [1, 2, 3, 4, 33, 300]
)  # pair by pair, by expert, with enough rows for float32 products
def test_equals_its_sentence(implementation, count):
    weights, tokens = weights_of("fp32"), tokens_of(count)
    got = CpuOp(implementation, "Moe", tokens | weights, {})()["y"]
    check_rows(got, written_out(tokens, weights).float(), "moe", "float32")


@pytest.mark.parametrize("format_", ["bf16", "wint8", "wint4:64", "wint4:32"])
@pytest.mark.parametrize("count", [1, 2, 40, 600])
def test_packed_experts_equal_their_sentence(format_, count):
    """Activations in bfloat16; fp8 also rounds activations, which the contract test compares."""
    weights, tokens = weights_of(format_), tokens_of(count, torch.bfloat16)
    got = CpuOp("cpu", "Moe", tokens | weights, {})()["y"]
    check_rows(got, written_out(tokens, weights).bfloat16(), "moe", "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 40, 600])
def test_fp8_experts_round_what_enters_them(count, dtype):
    weights, tokens = weights_of("fp8"), tokens_of(count, getattr(torch, dtype))
    got, want = (CpuOp(implementation, "Moe", tokens | weights, {})()["y"] for implementation in ("cpu", "reference"))
    check_rows(got, want, "moe", dtype)
    values = {name: StoredWeight(parse_format("fp32"), w.dequantize()) for name, w in weights.items()}
    unrounded = CpuOp("reference", "Moe", tokens | values, {})()["y"]
    assert 0.01 < worst_row(want, unrounded) < 0.2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [1, 2, 9])
def test_padding_gets_the_shared_expert_only(implementation, count):
    routed, both = weights_of("fp32", NAMES[:3]), weights_of("fp32")
    tokens = tokens_of(count)
    tokens["ids"][::2] = -1
    tokens["weights"][::2] = 0.0
    got = CpuOp(implementation, "Moe", tokens | routed, {})()["y"]
    assert torch.equal(got[::2], torch.zeros_like(got[::2]))
    check_rows(got, written_out(tokens, routed).float(), "moe", "float32")
    got = CpuOp(implementation, "Moe", tokens | both, {})()["y"]
    check_rows(got, written_out(tokens, both).float(), "moe", "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize("count", [1, 2, 3, 9, 600])
def test_pairs_without_an_expert_add_nothing(implementation, shared, count):
    """Whatever their weight: experts of other ranks, of some rows all of them."""
    weights, tokens = weights_of("fp32", NAMES if shared else NAMES[:3]), tokens_of(count)
    gone = torch.rand(count, K, generator=torch.Generator().manual_seed(count)) < 0.7
    gone[0, 1:], gone[1::3] = True, True
    tokens["ids"][gone] = -1
    tokens["weights"][gone] = 1e30
    got = CpuOp(implementation, "Moe", tokens | weights, {})()["y"]
    check_rows(got, written_out(tokens, weights).float(), "moe", "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_step_may_have_no_pair_at_all(implementation, count):
    weights, tokens = weights_of("fp32"), tokens_of(count)
    tokens["ids"].fill_(-1)
    got = CpuOp(implementation, "Moe", tokens | weights, {})()["y"]
    check_rows(got, written_out(tokens, weights).float(), "moe", "float32")
    alone = CpuOp(implementation, "Moe", tokens | weights_of("fp32", NAMES[:3]), {})()["y"]
    assert torch.equal(alone, torch.zeros(count, D))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_experts_without_tokens_are_not_read(implementation):
    weights, tokens = weights_of("fp32"), tokens_of(20, experts=5)
    want = CpuOp(implementation, "Moe", tokens | weights, {})()["y"]
    idle = {name: w.data.clone() for name, w in weights.items()}
    for name in NAMES[:3]:
        idle[name][5:] = torch.nan
    poisoned = {name: StoredWeight(parse_format("fp32"), data) for name, data in idle.items()}
    assert torch.equal(CpuOp(implementation, "Moe", tokens | poisoned, {})()["y"], want)


def test_a_token_does_not_see_the_others():
    """The same row alone, in pairs and in a crowd, in every order."""
    weights, tokens = weights_of("wint4:64"), tokens_of(70, torch.bfloat16)
    together = CpuOp("cpu", "Moe", tokens | weights, {})()["y"]
    for size in (1, 2, 7):
        parts = zip(*(value.split(size) for value in tokens.values()), strict=True)
        rows = [CpuOp("cpu", "Moe", dict(zip(tokens, part, strict=True)) | weights, {})()["y"] for part in parts]
        check_rows(torch.cat(rows), together, "moe", "bfloat16")
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    shuffled = CpuOp("cpu", "Moe", {n: v[order] for n, v in tokens.items()} | weights, {})()["y"]
    check_rows(shuffled, together[order], "moe", "bfloat16")


def test_gate_and_up_are_one_product_where_they_can_be():
    weights = weights_of("wint4:64") | {"up": weights_of("wint8")["up"]}
    packs = Packs()
    node = CpuNode("layers.1.mlp.moe", "Moe", {}, weights=weights, packs=packs)
    assert not any(isinstance(p, Beside) for p in node.pack(("gate", "gate"), pack_experts, torch.bfloat16))
    beside = node.pack(("gate", "up"), pack_experts, torch.bfloat16)
    assert len(beside) == E
    assert all(isinstance(p, Beside) for p in beside)
    assert node.pack(("gate", "up"), pack_experts, torch.bfloat16) is beside


def test_groups_of_ranks_change_what_is_expected_and_no_result():
    weights, tokens = weights_of("fp32"), tokens_of(9)
    alone = CpuOp("cpu", "Moe", tokens | weights, {})
    spread = CpuOp("cpu", "Moe", tokens | weights, {"expert_groups": 8})
    assert torch.equal(spread()["y"], alone()["y"])
    widths = {"T": 64, "E": 256, "K": 8, "D": 128, "F": 64}
    whole, part = (alone.op.cost(SimpleNamespace(**widths | more)) for more in ({}, {"E": 32, "expert_groups": 8}))
    assert part.flop == whole.flop / 8
    assert whole.bytes - part.bytes == 6 * 128 * 64 * (256 - 32)
    with pytest.raises(SchemaError, match=r"dsc.Moe: attribute expert_groups is '8', wanted int$"):
        CpuOp("cpu", "Moe", tokens | weights, {"expert_groups": "8"})
    assert "  expert_groups: int, optional\n" in plugin_manual("Moe")
