"""A gemm with scales as torch is asked for it, without a GPU: views of the operands' memory, as torch demands them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.random_weights import random_weight

from dsc.plugins.stored import linear, quantize_activations
from dsc.runtime.cuda.backend import check_cublas
from dsc.runtime.cuda.bind import Binder
from dsc.runtime.errors import DscError
from dsc.runtime.program import Operand, Program, ProgramNode, nbytes
from dsc.runtime.steps import Gemm, Matrix, Pointer, Variant

N, K, BOUND = 208, 1536, 16


def program() -> Program:
    shapes = {"x": ("float8_e4m3fn", ("T", K)), "scales": ("float32", (K // 128, "T")), "y": ("bfloat16", ("T", N))}
    weights = {"w": ("float8_e4m3fn", (N, K)), "w.scales": ("float32", (-(-N // 128), K // 128))}
    operands = {
        name: Operand(dtype, shape, "output" if name == "y" else "input", nbytes(dtype, shape, {"T": BOUND}))
        for name, (dtype, shape) in shapes.items()
    }
    operands |= {
        name: Operand(dtype, shape, "weight", nbytes(dtype, shape, {}), tensor=name)
        for name, (dtype, shape) in weights.items()
    }
    a, b = (Matrix(Pointer(name), "float8_e4m3fn", K, transposed=name == "w") for name in ("x", "w"))
    scales = {"a_scales": Pointer("scales"), "b_scales": Pointer("w.scales")}
    gemm = Gemm(a, b, Matrix(Pointer("y"), "bfloat16", N), "ceil_div(T,4)*4", N, K, **scales)
    node = ProgramNode("linear", "Linear", ("x", "w", "w.scales", "scales"), ("y",), {}, (Variant((gemm,)),))
    made = Program("main", "0" * 64, {"T": BOUND}, ("x", "scales"), ("y",), operands, (node,))
    made.check("main")
    return made


def product(a, b, a_scales, recipe_a, swizzle_a, b_scales, recipe_b, swizzle_b, bias, dtype, *, out):
    """torch's checks of 1x128 by 128x128 (ScaledBlas.cpp), cuBLASLt's of rows, and the product in float32."""
    (m, k), n = a.shape, b.shape[1]
    (x_scales,), (w_scales,) = a_scales, b_scales
    assert (recipe_a, swizzle_a, recipe_b, swizzle_b, bias) == ([4], [], [5], [], None)
    assert (out.dtype, tuple(out.shape), out.stride()) == (dtype, (m, n), (n, 1))
    assert (a.stride(), b.stride()) == ((k, 1), (1, k))
    assert m % 4 == n % 16 == k % 16 == 0
    assert (tuple(x_scales.shape), x_scales.stride()) == ((m, k // 128), (1, m))
    groups = -(-k // 128 // 4) * 4
    assert (tuple(w_scales.shape), w_scales.stride()) == ((groups, -(-n // 128)), (1, groups))
    x = a.float() * x_scales.repeat_interleave(128, 1)
    w = b.float() * w_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
    out.copy_(x @ w)


@pytest.mark.parametrize(("version", "fits"), [("13.0", True), ("12.9", True), ("12.8", False), (None, False)])
def test_a_torch_with_an_older_cublas_is_refused(version: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch):
    """Before anything is loaded, not at the first long prompt. Other programs load with any."""
    monkeypatch.setattr(torch.version, "cuda", version)
    plain = replace(program(), nodes=())
    check_cublas([plain], "x.engine")
    with nullcontext() if fits else pytest.raises(DscError, match=r"(?s)x\.engine.*12\.9 or later"):
        check_cublas([plain, program()], "x.engine")


@pytest.mark.parametrize("tokens", [9, 10, 11, 12])
def test_operands_are_seen_as_torch_wants_them(tokens: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.ops.aten, "_scaled_mm_v2", SimpleNamespace(out=product))
    w = random_weight("fp8", (N, K), torch.Generator().manual_seed(1))
    assert w.scales is not None
    x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(tokens))
    codes, scales = quantize_activations(x)
    padded = -(-tokens // 4) * 4
    memory = {
        name: torch.full((operand.bytes,), 0xFF, dtype=torch.uint8).view(getattr(torch, operand.dtype))
        for name, operand in program().operands.items()
    }
    memory["x"][: tokens * K] = codes.reshape(-1)
    memory["scales"][: K // 128 * padded].view(K // 128, padded)[:, :tokens] = scales.T
    memory["w"], memory["w.scales"] = w.data.reshape(-1), w.scales.reshape(-1)
    (step,) = Binder(program(), memory, library=lambda name: pytest.fail(name), num_sms=1).bind({"T": tokens})
    step.call(0)
    y = memory["y"].view(BOUND, N)
    want = linear(x, w).bfloat16()
    assert (y[:tokens].float() - want.float()).abs().max() <= 2e-2 * want.float().abs().max()
    assert y[padded:].isnan().all()
