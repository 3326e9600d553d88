"""Moe on a GPU against its reference: every format, odd widths, empty experts, pairs without an expert, every variant."""

from __future__ import annotations

import functools

import pytest
import torch
from support.moe_rows import check_moe_rows
from support.random_weights import FORMATS, random_weight

from dsc.plugins.moe.reference import reference
from dsc.plugins.stored import StoredWeight, norm_codes

pytestmark = pytest.mark.gpu

E, K = 24, 3
# D, F, F of the shared expert. With fp8 wide: there, what differs by a rounding may become another code, which shows in
# a narrow row.
STREAMED = (512, 1024, 640)  # whole blocks of 128
ODD = (192, 160, 96)
ODD_FP8 = (448, 1056, 608)
TOKENS = (1, 2, 3, 9, 40, 129, 200, 520)  # in every variant of every format


@functools.lru_cache(2)
def weights_of(format_: str, shared: str, sizes: tuple[int, int, int]) -> dict[str, StoredWeight | None]:
    d, f, fs = sizes
    g = torch.Generator().manual_seed(len(format_) + d)
    made: dict[str, StoredWeight | None] = {
        "gate": random_weight(format_, (E, f, d), g),
        "up": random_weight(format_, (E, f, d), g),
        "down": random_weight(format_, (E, d, f), g),
    }
    for name, shape in (("shared_gate", (fs, d)), ("shared_up", (fs, d)), ("shared_down", (d, fs))):
        made[name] = random_weight(shared, shape, g) if shared else None
    return made


def node_of(
    format_: str, shared: str, sizes: tuple[int, int, int], dtype: torch.dtype, tokens: int
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, torch.Tensor]]:
    """Inputs by slot, attributes, and of the inputs those that come with a step."""
    weights = weights_of(format_, shared, sizes)
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, sizes[0], generator=g).to(dtype)
    # The last two experts stay empty; a few pairs have none.
    ids = torch.stack([torch.randperm(E - 2, generator=g)[:K] for _ in range(tokens)]).int()
    ids[torch.rand(tokens, K, generator=g) < 0.1] = -1
    routing = torch.rand(tokens, K, generator=g)
    inputs = {"x": x, "ids": ids, "weights": routing}
    attributes = {f"{name}_format": "bf16" for name in weights}
    for name, weight in weights.items():
        if weight is not None:
            attributes[f"{name}_format"] = str(weight.format)
            inputs[name] = weight.data
            if weight.scales is not None:
                inputs[f"{name}.scales"] = weight.scales
    return inputs, attributes, {"x": x, "ids": ids, "weights": routing}


def check(format_: str, shared: str, sizes: tuple[int, int, int], dtype: torch.dtype, tokens: int) -> None:
    from support.gpu import GpuOp

    inputs, attributes, given = node_of(format_, shared, sizes, dtype, tokens)
    operands = {**given, **weights_of(format_, shared, sizes)}
    op = GpuOp("Moe", inputs, attributes, bounds={"T": 4096})
    (want,) = reference(**operands)
    first = op()["y"].cpu()
    what = f"{format_} {shared} {sizes} T={tokens}"
    check_moe_rows(first, want, operands, what)
    assert torch.equal(first, op()["y"].cpu())  # the same sums in every run


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("format_", [f for f in FORMATS if f != "fp32"])
def test_streamed_widths(format_: str, tokens: int) -> None:
    check(format_, format_, STREAMED, torch.bfloat16, tokens)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("format_", [f for f in FORMATS if f not in ("wint4:64", "wint4:128")])
def test_odd_widths(format_: str, tokens: int) -> None:
    check(format_, "", ODD_FP8 if format_.startswith("fp8") else ODD, torch.bfloat16, tokens)


@pytest.mark.parametrize(
    ("format_", "shared"),
    [("wint4:128", "wint4:64"), ("wint4:64", "fp8"), ("wint4:32", ""), ("wint8", "wint8"), ("wint8", "wint4:128")],
)
def test_integer_codes_of_many_tokens(format_: str, shared: str) -> None:
    check(format_, shared, STREAMED, torch.bfloat16, 3100)


@pytest.mark.parametrize("tokens", [1, 5, 129])
@pytest.mark.parametrize("format_", ["fp32", "bf16", "fp8", "wint8", "wint4:32"])
def test_float32(format_: str, tokens: int) -> None:
    check(format_, format_, ODD, torch.float32, tokens)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("format_", "shared"), [("wint4:128", "fp8"), ("fp8", "wint8"), ("wint8", "bf16"), ("bf16", "")]
)
def test_a_shared_expert_of_another_format(format_: str, shared: str, tokens: int) -> None:
    check(format_, shared, STREAMED, torch.bfloat16, tokens)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("format_", "shared", "sizes"),
    [
        ("fp8", "fp8", STREAMED),
        ("fp8:ue8m0", "fp8:ue8m0", STREAMED),
        ("fp8", "", ODD_FP8),
        ("wint4:128", "fp8", STREAMED),
    ],
)
def test_codes_of_the_norm_stand_for_x(
    format_: str, shared: str, sizes: tuple[int, int, int], tokens: int, arch: str
) -> None:
    """The same bits; beyond one token, whose kernel quantizes x itself, x is read by other formats only."""
    from support.gpu import GpuOp

    inputs, attributes, given = node_of(format_, shared, sizes, torch.bfloat16, tokens)
    codes, scales = norm_codes(given["x"], shared or format_)
    want = GpuOp("Moe", inputs, attributes, bounds={"T": 4096}, arch=arch)()["y"]
    op = GpuOp("Moe", {**inputs, "x_codes": codes, "x_scales": scales}, attributes, bounds={"T": 4096}, arch=arch)
    assert torch.equal(op()["y"], want)
    if tokens > 1 and format_.startswith("fp8"):
        assert torch.equal(op(x=torch.zeros_like(given["x"]))["y"], want)


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("format_", "shared"),
    [
        ("wint4:128", "wint4:128"),
        ("wint4:128", "fp8"),
        ("fp8", "fp8"),
        ("wint8", "wint8"),
        ("bf16", "bf16"),
        ("fp8", ""),
    ],
)
def test_most_experts_are_of_other_ranks(format_: str, shared: str, tokens: int, groups: int) -> None:
    """Of some rows all of them, of a step all but one pair, none; their weights are not 0, and nobody chose most experts.

    With `groups` the variants are those of so many more tokens, and a single token's experts are shared out anew.
    """
    from support.gpu import GpuOp

    inputs, attributes, given = node_of(format_, shared, STREAMED, torch.bfloat16, tokens)
    more = {"expert_groups": groups} if groups > 1 else {}
    op = GpuOp("Moe", inputs, {**attributes, **more}, bounds={"T": 4096})
    mine = torch.rand(tokens, K, generator=torch.Generator().manual_seed(tokens)) < 0.2
    mine[::3] = False
    one = torch.zeros(tokens, K, dtype=torch.bool)
    one[tokens // 2, 1] = True
    every = torch.randint(E - 2, (tokens, K), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    for kept in (mine, one, one & False):
        ids = every.where(kept, -1)
        operands = {**given, "ids": ids, **weights_of(format_, shared, STREAMED)}
        (want,) = reference(**operands)
        got = op(ids=ids)["y"].cpu()
        what = f"{format_} {shared} T={tokens}, {int(kept.sum())} pairs, {groups} groups"
        check_moe_rows(got, want, operands, what)
        if not shared:
            nothing = ~kept.any(-1)
            assert not got[nothing].any(), what
