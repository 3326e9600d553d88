"""Qkv: the front of an MLA layer against float64, and what it writes into the cache."""

import pytest
import torch
from support.cpu_op import IMPLEMENTATIONS, CpuOp
from support.paged import rope_tables
from support.random_weights import FORMATS, random_weight
from support.tolerances import check_rows

from dsc.plugins.latent_cache import cache_rows
from dsc.plugins.stored import round_activations

D, HEADS, NOPE, LATENT, ROPE, BLOCK = 256, 4, 128, 512, 64, 64
EPSILON = 1e-6
CONSTANTS = ("q_norm", "kv_norm", "cos", "sin")


def qkv(
    implementation,
    *,
    q_lora=96,
    joint=1,
    tokens=5,
    dtype="float32",
    cache_dtype=None,
    formats=("fp32", "fp32"),
    norms="float32",
):
    """The op over random tokens; the third is padding, and the slots are in no order."""
    generator = torch.Generator().manual_seed(tokens)
    q_width = q_lora or HEADS * (NOPE + ROPE)
    cache_dtype = cache_dtype or dtype
    size = torch.empty((), dtype=getattr(torch, cache_dtype)).element_size()
    slots = torch.randperm(3 * BLOCK, generator=generator)[:tokens].int()
    slots[2:3] = -1
    norm_dtype = getattr(torch, norms)
    cos, sin = rope_tables(ROPE)
    operands = {
        "x": torch.randn(tokens, D, generator=generator).to(getattr(torch, dtype)),
        "w": random_weight(formats[0], (q_width + joint * (LATENT + ROPE), D), generator),
        "kv_norm": (1 + 0.3 * torch.randn(LATENT, generator=generator)).to(norm_dtype),
        "cos": cos,
        "sin": sin,
        "positions": torch.randint(0, 4000, (tokens,), generator=generator, dtype=torch.int32),
        "slots": slots,
        "cache": torch.randint(0, 256, (3, BLOCK * (LATENT + ROPE) * size), generator=generator, dtype=torch.uint8),
    }
    if q_lora:
        operands["q_norm"] = (1 + 0.3 * torch.randn(q_lora, generator=generator)).to(norm_dtype)
    if not joint:
        operands["w_kv"] = random_weight(formats[1], (LATENT + ROPE, D), generator)
    attributes = {
        "q_width": q_width, "q_lora": q_lora, "heads": HEADS, "nope": NOPE, "latent": LATENT, "rope": ROPE,
        "epsilon": EPSILON, "cache_dtype": cache_dtype, "block_tokens": BLOCK,
        "block_bytes": operands["cache"].shape[1], "joint": joint,
    }  # fmt: skip
    constants = [name for name in CONSTANTS if name in operands]
    return CpuOp(implementation, "Qkv", operands, attributes, constants)


def independent(op):
    """q, latent, k_rope in float64, from the op's operands."""
    operands, q_lora = op.operands, op.attributes["q_lora"]

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()

    parts = []
    for name in ("w", "w_kv"):
        if (weight := operands.get(name)) is not None:
            x = operands["x"]
            if weight.format.kind == "fp8":
                x = round_activations(x, weight.format.ue8m0)
            parts.append(x.double() @ weight.dequantize().double().T)
    q, latent, key = torch.cat(parts, -1).split((op.attributes["q_width"], LATENT, ROPE), -1)
    frequencies = 1e4 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    turn = torch.exp(1j * operands["positions"].double().unsqueeze(1) * frequencies)
    pairs = torch.view_as_complex(key.reshape(len(key), -1, 2).contiguous())
    key = torch.view_as_real(pairs * turn).flatten(1)
    return norm(q, operands["q_norm"]) if q_lora else q, norm(latent, operands["kv_norm"]), key


def check_outputs(outputs, op, dtype):
    for name, want in zip(("q", "latent", "k_rope"), independent(op), strict=True):
        check_rows(outputs[name], want, "linear", dtype)


@pytest.mark.parametrize("q_lora", [96, 0])
@pytest.mark.parametrize("joint", [1, 0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_same_in_float64(implementation, joint, q_lora):
    op = qkv(implementation, joint=joint, q_lora=q_lora)
    check_outputs(op(), op, "float32")


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_format(dtype, format_):
    for implementation in IMPLEMENTATIONS:
        op = qkv(implementation, dtype=dtype, formats=(format_,), norms="bfloat16")
        check_outputs(op(), op, dtype)


def test_two_weights_of_different_formats():
    for implementation in IMPLEMENTATIONS:
        op = qkv(implementation, joint=0, formats=("wint8", "fp8"))
        check_outputs(op(), op, "float32")


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_cache_gets_each_token_once_and_nothing_else(implementation, dtype, cache_dtype):
    op = qkv(implementation, dtype=dtype, cache_dtype=cache_dtype)
    cache = op.operands["cache"]
    before = cache.clone()
    outputs = op()
    assert outputs["cache_out"].data_ptr() == cache.data_ptr()
    rows = cache_rows(cache, cache_dtype, LATENT + ROPE)
    slots = op.operands["slots"].tolist()
    assert slots.count(-1) == 1
    tokens = torch.cat((outputs["latent"], outputs["k_rope"]), -1)
    for token, slot in enumerate(slots):
        if slot >= 0:
            check_rows(rows[slot : slot + 1], tokens[token : token + 1], "linear", min(dtype, cache_dtype))
    untouched = [row for row in range(3 * BLOCK) if row not in slots]
    row_bytes = lambda state: state.view(3 * BLOCK, -1)[untouched]  # noqa: E731
    assert torch.equal(row_bytes(cache), row_bytes(before))


def test_reference_and_cpu_write_the_same_cache():
    caches = [qkv(implementation)()["cache_out"] for implementation in IMPLEMENTATIONS]
    one, two = (cache_rows(cache, "float32", LATENT + ROPE) for cache in caches)
    written = qkv("cpu").operands["slots"]
    written = written[written >= 0].long()
    check_rows(one[written], two[written], "linear", "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_norm_leaves_the_rope_part_alone(implementation):
    op = qkv(implementation)
    small = op()
    grown = op(x=op.operands["x"] * 64)
    check_rows(grown["latent"], small["latent"], "linear", "float32")
    check_rows(grown["q"], small["q"], "linear", "float32")
    check_rows(grown["k_rope"], small["k_rope"] * 64, "linear", "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_token_and_only_padding(implementation):
    op = qkv(implementation, tokens=0)
    before = op.operands["cache"].clone()
    outputs = op()
    assert outputs["q"].shape == (0, 96)
    assert torch.equal(outputs["cache_out"], before)
    op = qkv(implementation, tokens=3)
    before = op.operands["cache"].clone()
    assert torch.equal(op(slots=torch.full((3,), -1, dtype=torch.int32))["cache_out"], before)
