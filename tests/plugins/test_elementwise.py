"""Embedding, RmsNorm, AddRmsNorm, Swiglu: their sentences, and transformers' modules."""

from dataclasses import replace

import pytest
import torch
from support.cpu_op import IMPLEMENTATIONS, CpuOp
from support.op_cases import CASES, Draw, model_widths
from support.random_weights import FORMATS, random_weight
from support.tolerances import check_rows
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from dsc.plugins.formats import parse_format
from dsc.plugins.stored import StoredWeight, norm_codes, quantize_activations

T, D = 37, 192
DTYPES = ("float32", "bfloat16")


def rows(dtype, seed=0, scale=1.0):
    return (torch.randn(T, D, generator=torch.Generator().manual_seed(seed)) * scale).to(getattr(torch, dtype))


def transformers_norm(x, weight, epsilon):
    norm = DeepseekV3RMSNorm(D, epsilon)
    norm.weight.data.copy_(weight)
    with torch.no_grad():
        return norm(x.float())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])  # below, about and above the root of epsilon
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_transformers(implementation, dtype, scale):
    x, weight = rows(dtype, scale=scale), torch.rand(D, generator=torch.Generator().manual_seed(9))
    got = CpuOp(implementation, "RmsNorm", {"x": x, "weight": weight}, {"epsilon": 1e-6}, ["weight"])()["y"]
    check_rows(got, transformers_norm(x, weight, 1e-6).to(x.dtype), "norm", dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_statistics_are_float32(implementation):
    """The mean of 192 bfloat16 squares, of which one is 2^16 times the others: a bfloat16 sum would lose them."""
    x = torch.full((1, D), 1.0, dtype=torch.bfloat16)
    x[0, 0] = 256.0
    x = x.repeat(2, 1)
    x[1, 1:] = 0.0
    got = CpuOp(implementation, "RmsNorm", {"x": x, "weight": torch.ones(D)}, {"epsilon": 1e-6}, ["weight"])()["y"]
    assert got[0, 0] == torch.tensor(256 * (D / (65536 + D - 1)) ** 0.5).bfloat16()
    assert got[1, 0] == torch.tensor(D**0.5).bfloat16()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_reads_the_rounded_sum(implementation, dtype):
    x, residual, weight = rows(dtype, 1), rows(dtype, 2, 30.0), torch.rand(D)
    operands = {"x": x, "residual": residual, "weight": weight}
    got = CpuOp(implementation, "AddRmsNorm", operands, {"epsilon": 1e-6}, ["weight"])()
    total = (x.double() + residual.double()).to(x.dtype)
    assert torch.equal(got["sum"], total)
    check_rows(got["y"], transformers_norm(total, weight, 1e-6).to(x.dtype), "norm", dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("quantize", ["fp8", "fp8:ue8m0"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_quantize_what_they_rounded(implementation, dtype, quantize):
    """D is a group and a half; scales lie group by group."""
    x, weight = rows(dtype, 7), torch.rand(D)
    x[0] = 0.0
    for op, operands in (("RmsNorm", {"x": x}), ("AddRmsNorm", {"x": x, "residual": rows(dtype, 8)})):
        attributes = {"epsilon": 1e-6, "quantize": quantize}
        got = CpuOp(implementation, op, {**operands, "weight": weight}, attributes, ["weight"])()
        plain = CpuOp(implementation, op, {**operands, "weight": weight}, {"epsilon": 1e-6}, ["weight"])()
        assert got.keys() - plain.keys() == {"codes", "scales"}
        assert all(torch.equal(got[name], plain[name]) for name in plain)
        codes, scales = quantize_activations(plain["y"], quantize == "fp8:ue8m0")
        assert torch.equal(got["codes"].view(torch.uint8), codes.view(torch.uint8))
        assert got["scales"].shape == (2, T)
        assert torch.equal(got["scales"], scales.T)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", ["Linear", "Qkv", "Moe"])
@pytest.mark.parametrize("format_", ["fp8", "fp8:ue8m0"])
def test_codes_stand_for_x(implementation, op, format_):
    """The same bits with x's codes beside x; and of x in fp8 nothing else is read."""
    with model_widths():  # gate and up are one product there
        case = CASES[op](Draw(9, torch.bfloat16, "fp8:ue8m0", torch.Generator().manual_seed(1)))
    operands = {
        n: replace(v, format=parse_format(format_)) if isinstance(v, StoredWeight) else v
        for n, v in case.operands.items()
    }
    bare = {name: value for name, value in operands.items() if not name.startswith("x_")}
    codes = dict(zip(("x_codes", "x_scales"), norm_codes(bare["x"], format_), strict=True))
    plain, given, other = (
        replace(case, operands=o).bind(implementation)()
        for o in (bare, bare | codes, bare | codes | {"x": bare["x"].flip(0)})
    )
    for name, value in plain.items():
        assert torch.equal(given[name].view(torch.uint8), value.view(torch.uint8)), name
        assert torch.equal(other[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(implementation, dtype):
    gate, up = rows(dtype, 3, 4.0), rows(dtype, 4)
    got = CpuOp(implementation, "Swiglu", {"gate": gate, "up": up}, {})()["y"]
    wanted = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    check_rows(got, wanted.to(gate.dtype), "elementwise", dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format_", FORMATS)
def test_embedding_rows_are_exact(implementation, dtype, format_):
    name = "wint4:64" if format_ == "wint4:128" else format_
    table = random_weight(name, (300, D), torch.Generator().manual_seed(5))
    tokens = torch.tensor([0, 299, 128, 127, 128], dtype=torch.int32)
    got = CpuOp(implementation, "Embedding", {"tokens": tokens, "table": table}, {"dtype": dtype})()["y"]
    assert torch.equal(got, table.dequantize()[tokens.long()].to(getattr(torch, dtype)))
