"""Products on CPUs: every kernel over its edges, and what it keeps in memory."""

import pytest
import torch
from support.random_weights import FORMATS, random_weight
from support.tolerances import check_rows

from dsc.plugins import cpu_linear
from dsc.plugins.cpu_linear import MANY, Int4, can_join, join_rows, make_product, pack_product
from dsc.plugins.cpu_node import CpuNode, Packs, keep
from dsc.plugins.stored import linear

SHAPES = [(256, 256), (515, 96), (48, 128), (320, 192), (5, 256)]  # rows whole and not to 16, 64 and 128
GENERATOR = torch.Generator().manual_seed(0)


def weight(format_, shape):
    name = "wint4:32" if format_.startswith("wint4") and shape[-1] % int(format_[6:]) else format_
    return random_weight(name, shape, GENERATOR)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format_", FORMATS)
def test_every_kernel_equals_the_reference(format_, dtype):
    for shape in SHAPES:
        w = weight(format_, shape)
        product = make_product(w, getattr(torch, dtype))
        for tokens in (0, 1, 3, MANY - 1, MANY, 2 * MANY + 1):
            x = torch.randn(tokens, shape[1], generator=GENERATOR).to(getattr(torch, dtype))
            got = product(x)
            assert got.dtype is x.dtype
            check_rows(got, linear(x, w).to(x.dtype), "linear", dtype, f"{shape}, {tokens} tokens")
            assert torch.equal(product.multiply(product.prepare(x)), got)


def test_rows_of_another_tensor():
    """Slices of a wider tensor, as a fused projection leaves them."""
    x = torch.randn(3, 512, generator=GENERATOR).bfloat16()[:, 256:]
    for format_ in FORMATS:
        product = make_product(weight(format_, (64, 256)), torch.bfloat16)
        assert torch.equal(product(x), product(x.contiguous())), format_


@pytest.mark.parametrize("format_", FORMATS)
def test_joined_rows_are_the_rows_side_by_side(format_):
    parts = [weight(format_, (128, 256)), weight(format_, (72, 256))]
    joined = join_rows(parts)
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    stacked = [weight(format_, (3, 128, 256)) for _ in range(2)]
    assert torch.equal(join_rows(stacked).dequantize(), torch.cat([part.dequantize() for part in stacked], 1))


def test_what_cannot_be_joined():
    assert not can_join([weight("wint4:128", (128, 256)), weight("wint4:64", (128, 256))])
    assert not can_join([weight("fp8", (72, 256)), weight("fp8", (128, 256))])  # a block would straddle them
    assert can_join([weight("fp8", (128, 256)), weight("fp8", (72, 256))])


@pytest.mark.parametrize("format_", ["bf16", "fp8", "wint8", "wint4:128", "wint4:64", "wint4:32"])
def test_resident_bytes_stay_within_5_percent(format_):
    packs = Packs()
    weights = {name: weight(format_, (512, 1024)) for name in ("a", "b", "c")}
    node = CpuNode("node", "Linear", {}, weights=weights, packs=packs)
    node.pack(("a", "b"), pack_product, torch.bfloat16)
    node.pack("c", pack_product, torch.bfloat16)
    node.pack("c", keep)  # what shares its memory is counted once
    kept = 1 if format_ in ("bf16", "wint4:128", "wint4:64", "wint4:32") else 0  # packing made a copy of c
    stored = sum(w.nbytes for w in weights.values()) + kept * weights["c"].nbytes
    assert stored <= packs.resident_bytes <= 1.05 * stored


def test_a_pack_is_made_once_for_a_tensor():
    packs = Packs()
    w = weight("wint4:128", (64, 256))
    nodes = [CpuNode(n, "Linear", {}, weights={"w": w}, tensor_names={"w": "q_b"}, packs=packs) for n in ("x", "y")]
    first, second = (node.pack("w", pack_product, torch.bfloat16) for node in nodes)
    assert first is second
    assert nodes[0].pack("w", pack_product, torch.float32) is not first


def test_int4_without_the_known_packing(monkeypatch):
    """On machines whose packing is another, the kernel serves any number of tokens."""
    monkeypatch.setattr(cpu_linear, "_packs_in_blocks", lambda: False)
    w = weight("wint4:128", (64, 256))
    product = make_product(w, torch.bfloat16)
    assert isinstance(product, Int4)
    assert not product.blocks
    x = torch.randn(2 * MANY, 256, generator=GENERATOR).bfloat16()
    check_rows(product(x), linear(x, w).bfloat16(), "linear", "bfloat16")


def test_zero_and_extreme_codes():
    """All sixteen codes in every place of a byte, and scales of zero."""
    from dsc.plugins.formats import parse_format
    from dsc.plugins.stored import StoredWeight

    data = torch.arange(256, dtype=torch.uint8).repeat(64, 1)[:, :128].contiguous()
    data[32:] = data[32:].flip(1) + 128
    scales = torch.ones(64, 2, dtype=torch.bfloat16)
    scales[5] = 0
    w = StoredWeight(parse_format("wint4:128"), data, scales)
    eye = torch.eye(256).bfloat16()
    for rows in (eye, eye[: MANY - 1]):
        assert torch.equal(make_product(w, torch.bfloat16)(rows).float(), w.dequantize().mT[: len(rows)])
