"""MlaAttention on a GPU against its reference, which runs there too: ragged batches, every format, expanded and absorbed."""

from __future__ import annotations

import pytest
import torch
from support.paged import make_batch, rope_tables
from support.random_weights import random_weight
from support.tolerances import check_rows

from dsc.plugins.formats import parse_format
from dsc.plugins.mla_attention.reference import reference
from dsc.plugins.stored import StoredWeight

pytestmark = pytest.mark.gpu

WIDTHS = {"nope": 128, "rope": 64, "v": 128, "latent_dim": 512}
HEADS = (4, 16, 32, 64, 128)  # R1's on one rank, and on two, four and eight
RAGGED = {  # lengths, queries, padding rows
    "one token": ([1], [1], 0),
    "decode across block borders": ([63, 64, 65, 1], [1, 1, 1, 1], 0),
    "several queries": ([70, 64, 3], [2, 2, 2], 0),
    "ragged queries, one sequence idle, padding": ([65, 30, 129, 1], [3, 0, 1, 1], 2),
    "first chunks": ([50, 20, 64], [50, 20, 64], 1),
    "later chunks and decode": ([1, 130, 200], [1, 30, 65], 0),
    "long and short": ([4097, 5, 9], [1, 1, 2], 0),
    "long, four queries": ([4097, 4096, 4095, 63], [4, 4, 4, 4], 0),
    "a chunk of 300": ([300, 1000], [300, 2], 0),
    "many sequences": ([37 * i % 700 + 4 for i in range(30)], [1 + i % 4 for i in range(30)], 0),
    "idle only": ([5, 0], [0, 0], 3),
}


def check(
    case: tuple[list[int], list[int], int],
    *,
    heads: int = 16,
    dtype: str = "bfloat16",
    cache_dtype: str = "",
    format_: str = "bf16",
    mode: str = "absorbed",
    block_tokens: int = 64,
    arch: str = "sm_90a",
) -> None:
    from support.gpu import GpuOp

    lengths, queries, padding = case
    g = torch.Generator().manual_seed(len(lengths))
    cache_dtype = cache_dtype or dtype
    batch = make_batch(
        lengths, queries, 576, dtype=cache_dtype, padding=padding, block_tokens=block_tokens, generator=g
    )
    w = random_weight(format_, (heads * 256, 512), g)
    cos, sin = rope_tables(64)
    operands = {
        "q": torch.randn(len(batch.positions), heads * 192, generator=g).to(getattr(torch, dtype)),
        "cos": cos,
        "sin": sin,
        "positions": batch.positions,
        "query_starts": batch.query_starts,
        "sequence_lengths": batch.sequence_lengths,
        "block_table": batch.block_table,
        "cache": batch.cache,
    }
    attributes = {"heads": heads, **WIDTHS, "scale": 0.135234, "mode": mode, "cache_dtype": cache_dtype}
    attributes |= {"block_tokens": block_tokens, "block_bytes": batch.cache.shape[1]}
    inputs = {**operands, "kv_b": w.data, **({} if w.scales is None else {"kv_b.scales": w.scales})}
    op = GpuOp("MlaAttention", inputs, {**attributes, "kv_b_format": format_}, bounds={"B": 32}, arch=arch)
    got = op()["o"]
    kv_b = StoredWeight(parse_format("fp32"), w.dequantize().cuda())
    with torch.device("cuda"):
        moved = {name: tensor.cuda() for name, tensor in operands.items()}
        (want,) = reference(**moved, kv_b=kv_b, latent=None, k_rope=None, **attributes)
    check_rows(got.cpu(), want.cpu(), "attention", dtype)
    assert not got[len(got) - padding :].any()
    assert torch.equal(op()["o"], got), "two runs differ"


@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("heads", HEADS)
def test_absorbed(heads: int, case: tuple[list[int], list[int], int]) -> None:
    check(case, heads=heads)


@pytest.mark.parametrize("format_", ["fp8", "fp8:ue8m0", "wint8", "wint4:128", "wint4:32", "fp32"])
@pytest.mark.parametrize("mode", ["absorbed", "expanded"])
def test_every_format(mode: str, format_: str) -> None:
    check(RAGGED["several queries"], format_=format_, mode=mode)
    check(([130, 300, 40], [1, 257, 3], 1), format_=format_, mode=mode)


@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
def test_float32(case: tuple[list[int], list[int], int]) -> None:
    check(case, heads=4, dtype="float32", format_="fp32")


@pytest.mark.parametrize(("dtype", "cache_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_two_dtypes(dtype: str, cache_dtype: str) -> None:
    check(RAGGED["later chunks and decode"], heads=4, dtype=dtype, cache_dtype=cache_dtype)


@pytest.mark.parametrize("block_tokens", [16, 32, 128])
def test_other_blocks(block_tokens: int) -> None:
    for mode in ("absorbed", "expanded"):
        check(([130, 300, 40], [1, 257, 3], 1), block_tokens=block_tokens, mode=mode)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("mode", ["absorbed", "expanded"])
def test_kernels_of_other_architectures(mode: str, arch: str) -> None:
    """The Triton kernels that serve where sm90_mla_decode.cu does not, with their tiles, built for this chip."""
    for name in ("decode across block borders", "long and short", "a chunk of 300"):
        check(RAGGED[name], mode=mode, arch=arch)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("passes", [False, True], ids=["one pass", "several passes"])
@pytest.mark.parametrize("attend", ["sm90_mla_prefill", "mla_prefill"])
def test_expanded(heads: int, passes: bool, attend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel of this chip, and by Triton's in its place."""
    from dsc.plugins.mla_attention import absorbed, expanded, sm90_mla_prefill

    if attend == "mla_prefill":
        monkeypatch.setattr(sm90_mla_prefill, "applies", lambda node: False)
    if passes:
        monkeypatch.setattr(expanded, "SCRATCH_ROWS", 640 * heads)
        monkeypatch.setattr(absorbed, "CHUNK", 128)
    check(([300, 1000], [300, 1000], 0), heads=heads, mode="expanded")
    check(([700, 4097, 65, 1, 500], [300, 257, 65, 1, 193], 2), heads=heads, mode="expanded")
    check(([700, 4097, 65, 1], [30, 25, 65, 1], 2), heads=heads, mode="expanded")
