"""Qkv on a GPU against its reference: outputs, and that the cache gets each token once and nothing else."""

from __future__ import annotations

import pytest
import torch
from support.paged import rope_tables
from support.random_weights import random_weight
from support.tolerances import check_rows

from dsc.plugins.qkv.reference import reference
from dsc.plugins.stored import norm_codes

pytestmark = pytest.mark.gpu

D, HEADS, LATENT, ROPE, BLOCK = 512, 16, 512, 64, 64


def check(
    tokens: int,
    *,
    q_lora: int = 1536,
    joint: int = 1,
    dtype: str = "bfloat16",
    cache_dtype: str = "",
    formats: tuple[str, str] = ("bf16", "bf16"),
    norms: str = "float32",
    codes: bool = False,
    arch: str = "sm_90a",
    bound: int = 0,
) -> None:
    from support.gpu import GpuOp

    g = torch.Generator().manual_seed(tokens)
    cache_dtype, width = cache_dtype or dtype, q_lora or HEADS * 192
    size = getattr(torch, cache_dtype).itemsize
    blocks = -(-tokens // BLOCK) + 2
    slots = torch.randperm(blocks * BLOCK, generator=g)[:tokens].int()
    slots[2::5] = -1
    cos, sin = rope_tables(ROPE)
    w = random_weight(formats[0], (width + joint * (LATENT + ROPE), D), g)
    w_kv = None if joint else random_weight(formats[1], (LATENT + ROPE, D), g)
    vectors = {"kv_norm": LATENT} | ({"q_norm": q_lora} if q_lora else {})
    operands = {
        "x": torch.randn(tokens, D, generator=g).to(getattr(torch, dtype)),
        **{n: (1 + 0.3 * torch.randn(k, generator=g)).to(getattr(torch, norms)) for n, k in vectors.items()},
        "cos": cos,
        "sin": sin,
        "positions": torch.randint(0, 4000, (tokens,), generator=g, dtype=torch.int32),
        "slots": slots,
        "cache": torch.randint(0, 256, (blocks, BLOCK * (LATENT + ROPE) * size), generator=g, dtype=torch.uint8),
    }
    if codes:  # then nothing reads x
        given = norm_codes(operands["x"], formats[0])
        operands |= {"x_codes": given[0], "x_scales": given[1], "x": torch.zeros_like(operands["x"])}
    attributes = {"q_width": width, "q_lora": q_lora, "heads": HEADS, "nope": 128, "latent": LATENT, "rope": ROPE}
    attributes |= {"epsilon": 1e-6, "cache_dtype": cache_dtype, "block_tokens": BLOCK, "joint": joint}
    attributes["block_bytes"] = operands["cache"].shape[1]
    stored = {
        f"{n}{s}": t for n, p in (("w", w), ("w_kv", w_kv)) if p for s, t in (("", p.data), (".scales", p.scales))
    }
    inputs = {**operands, **{name: tensor for name, tensor in stored.items() if tensor is not None}}
    kinds = {"w_format": formats[0], "w_kv_format": "fp32" if joint else formats[1]}
    op = GpuOp("Qkv", inputs, {**attributes, **kinds}, arch=arch, bounds={"T": bound})
    got = op()
    wanted = {**operands, "cache": operands["cache"].clone(), "q_norm": operands.get("q_norm")}
    *want, cache = reference(**wanted, w=w, w_kv=w_kv, **attributes)
    for name, value in zip(("q", "latent", "k_rope"), want, strict=True):
        check_rows(got[name].cpu(), value, "linear", dtype, name)
    rows, rows_wanted = (
        c.view(getattr(torch, cache_dtype)).view(-1, LATENT + ROPE) for c in (op.states["cache"].cpu(), cache)
    )
    written = slots[slots >= 0].long()
    worse = "bfloat16" if "bfloat16" in (dtype, cache_dtype) else "float32"
    check_rows(rows[written], rows_wanted[written], "linear", worse, "cache")
    untouched = torch.ones(len(rows), dtype=torch.bool)
    untouched[written] = False
    as_bytes = [c.view(len(rows), -1)[untouched] for c in (op.states["cache"].cpu(), cache)]
    assert torch.equal(*as_bytes)


@pytest.mark.parametrize("format_", ["bf16", "fp8", "wint8", "wint4:128"])
@pytest.mark.parametrize("tokens", [1, 3, 129])
def test_every_format(tokens: int, format_: str) -> None:
    check(tokens, formats=(format_, format_), norms="bfloat16")


@pytest.mark.parametrize(
    ("joint", "formats"), [(1, ("fp8", "fp8")), (0, ("fp8", "fp8")), (0, ("fp8", "wint8"))], ids=str
)
@pytest.mark.parametrize("tokens", [65, 127, 129, 256, 1001])
def test_many_tokens_of_fp8(tokens: int, joint: int, formats: tuple[str, str]) -> None:
    for codes in (False, True) if set(formats) == {"fp8"} else (False,):
        check(tokens, joint=joint, formats=formats, codes=codes, bound=1004)


@pytest.mark.parametrize("format_", ["fp8", "fp8:ue8m0"])
@pytest.mark.parametrize("tokens", [1, 3, 129])
@pytest.mark.parametrize("joint", [1, 0])
def test_codes_of_the_norm_stand_for_x(joint: int, tokens: int, format_: str) -> None:
    for arch in ("sm_90a", "sm_80"):
        check(tokens, joint=joint, formats=(format_, format_), codes=True, arch=arch)


@pytest.mark.parametrize("q_lora", [1536, 0])
@pytest.mark.parametrize("joint", [1, 0])
def test_every_shape(joint: int, q_lora: int) -> None:
    check(7, q_lora=q_lora, joint=joint)
    check(7, q_lora=q_lora, joint=joint, dtype="float32", formats=("fp32", "fp32"))


@pytest.mark.parametrize(("dtype", "cache_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_two_dtypes(dtype: str, cache_dtype: str) -> None:
    check(5, dtype=dtype, cache_dtype=cache_dtype)


def test_two_weights_of_different_formats() -> None:
    for tokens in (3, 40, 300):
        check(tokens, joint=0, formats=("wint4:128", "fp8"))


@pytest.mark.parametrize("format_", ["bf16", "fp8", "wint8", "wint4:128"])
def test_sources_of_an_older_architecture(format_: str) -> None:
    """As an engine for sm_80 has them: its sources and tiles, built for this chip."""
    for tokens in (1, 3, 129):
        check(tokens, formats=(format_, format_), arch="sm_80")
