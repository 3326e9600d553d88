"""StoredWeight and activation quantization, against their definitions written out."""

import pytest
import torch
from support.random_weights import FORMATS, random_weight

from dsc.plugins.formats import parse_format
from dsc.plugins.stored import (
    StoredWeight,
    linear,
    pack_nibbles,
    quantize_activations,
    round_activations,
    unpack_nibbles,
)


def value(weight, row, column):
    """One element, by the words of `Format`."""
    kind, data, scales = weight.format.kind, weight.data, weight.scales
    if kind in ("fp32", "bf16"):
        return float(data[row, column])
    if kind == "fp8":
        return float(data[row, column].float() * scales[row // 128, column // 128])
    if kind == "wint8":
        return int(data[row, column]) * float(scales[row])
    byte = int(data[row, column // 2])
    nibble = byte >> 4 if column % 2 else byte & 15
    return (nibble - 16 if nibble > 7 else nibble) * float(scales[row, column // weight.format.group])


@pytest.mark.parametrize("format_", FORMATS)
def test_values_are_what_the_format_says(format_):
    weight = random_weight(format_, (140, 256), torch.Generator().manual_seed(0))
    values = weight.dequantize()
    assert values.dtype is torch.float32
    assert values.shape == weight.shape == (140, 256)
    assert values.std() > 0.01
    for row, column in [(0, 0), (0, 1), (3, 255), (127, 127), (128, 128), (139, 254), (77, 33)]:
        assert values[row, column] == torch.tensor(value(weight, row, column)), (row, column)


@pytest.mark.parametrize("format_", FORMATS)
def test_parts_of_a_weight(format_):
    """Experts of a stack, rows of a matrix, and no rows at all."""
    stack = random_weight(format_, (3, 140, 128), torch.Generator().manual_seed(0))
    whole = stack.dequantize()
    assert torch.equal(stack[1].dequantize(), whole[1])
    assert torch.equal(stack[1:].dequantize(), whole[1:])
    rows = torch.tensor([139, 0, 128, 0])
    assert torch.equal(stack[2].dequantize_rows(rows), whole[2][rows])
    assert stack[0].dequantize_rows(rows[:0]).shape == (0, 128)


@pytest.mark.parametrize("columns", [96, 192])
def test_fp8_blocks_are_partial_at_the_edges(columns):
    weight = random_weight("fp8", (72, columns), torch.Generator().manual_seed(0))
    assert weight.scales.shape == (1, -(-columns // 128))
    assert weight.dequantize()[71, columns - 1] == torch.tensor(value(weight, 71, columns - 1))
    assert torch.equal(weight.dequantize_rows(torch.tensor([71])), weight.dequantize()[71:])


def test_nibbles():
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2, 3)
    packed = pack_nibbles(codes)
    assert packed.dtype is torch.uint8
    assert packed[0, :2].tolist() == [0x98, 0xBA]  # -8 and -7: the even column is the low nibble
    assert torch.equal(unpack_nibbles(packed), codes)


def test_every_float8_code_is_read_as_torch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    values = StoredWeight(parse_format("fp8"), codes, torch.ones(1, 1)).dequantize()
    assert torch.equal(values.nan_to_num(nan=9e9), codes.float().nan_to_num(nan=9e9))


def test_activations_in_groups_of_128():
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5).unsqueeze(1)
    codes, scales = quantize_activations(x)
    assert codes.dtype is torch.float8_e4m3fn
    assert codes.shape == x.shape
    for row in range(5):
        for group, part in enumerate(x[row].split(128)):
            scale = part.abs().max() / 448
            assert scales[row, group] == scale
            wanted = (part / scale).to(torch.float8_e4m3fn)
            assert torch.equal(codes[row, group * 128 : (group + 1) * 128].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(round_activations(x)[:, 256:], codes[:, 256:].float() * scales[:, 2:])


def test_ue8m0_scales_are_the_next_powers_of_two():
    x = torch.zeros(3, 128)
    x[:, 0] = torch.tensor([448.0, 449.0, 1.0])
    assert quantize_activations(x, ue8m0=True)[1].flatten().tolist() == [1.0, 2.0, 2.0**-8]


def test_zeros_and_tiny_activations_have_a_finite_scale():
    codes, scales = quantize_activations(torch.tensor([[0.0] * 128, [1e-30] * 128]))
    assert torch.equal(scales, torch.full((2, 1), 1e-4) / 448)
    assert not codes.float().any()
    assert quantize_activations(torch.empty(0, 128))[1].shape == (0, 1)


def test_fp8_products_round_their_activations_and_others_do_not():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 256, generator=generator)
    fp8, bf16 = random_weight("fp8", (72, 256), generator), random_weight("bf16", (72, 256), generator)
    assert torch.equal(linear(x, bf16), x @ bf16.data.float().mT)
    assert torch.equal(linear(x, fp8), round_activations(x) @ fp8.dequantize().mT)
    assert not torch.equal(round_activations(x), x)
