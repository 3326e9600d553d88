"""Every op as an engine for another architecture has it, on the GPU at hand: its sources and tiles, compiled for Hopper.

What runs is what an sm_80 or sm_100a engine is made from, but for the instructions that the compiler chooses: nobody has
run those engines on their own chips.
"""

from __future__ import annotations

import pytest
import torch
from support.compare import compare
from support.moe_rows import check_moe_rows
from support.op_cases import ACROSS_RANKS, CASES, Draw, formats_of, model_widths
from support.sample_cases import differences

pytestmark = pytest.mark.gpu

TOKENS = (1, 3, 129)
FORMATS = ("bf16", "fp8", "fp8:ue8m0", "wint8", "wint4:128", "mixed")
# Kernels take gate and up in one format, and embeddings that are not quantized, as quantize_weights makes them.
OPS = [op for op in CASES if op not in ACROSS_RANKS]
NOT_ON_GPUS = {("Moe", "mixed"), *(("Embedding", format_) for format_ in FORMATS[1:])}


def formats(op: str) -> list[str]:
    tried = [format_ for format_ in FORMATS if format_ in formats_of(op)] or ["bf16"]
    return [format_ for format_ in tried if (op, format_) not in NOT_ON_GPUS]


def check(op: str, format_: str, dtype: torch.dtype, tokens: int, arch: str) -> None:
    from support.gpu import GpuOp, case_inputs

    with model_widths():
        case = CASES[op](Draw(tokens, dtype, format_, torch.Generator().manual_seed(tokens + 1)))
    want = case.bind("reference")()
    inputs, attributes = case_inputs(case)
    gpu = GpuOp(op, inputs, attributes, bounds={"T": 512, "B": 32, "R": 512}, arch=arch)
    got = {name: tensor.cpu().reshape(want[name].shape) for name, tensor in gpu().items()}
    if op == "Sample":
        assert differences(got, tuple(want.values())) == []
        return
    for name, value in got.items():
        what = f"dsc.{op}.{name}, {tokens} tokens, {format_}, {dtype}, {arch}"
        if op == "Moe":
            check_moe_rows(value, want[name], case.operands, what)
        else:
            compare(case, name, value, want[name], dtype, what)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("op", "format_"), [(op, format_) for op in OPS for format_ in formats(op)])
def test_bfloat16(op: str, format_: str, tokens: int, arch: str) -> None:
    check(op, format_, torch.bfloat16, tokens, arch)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("op", OPS)
def test_float32(op: str, tokens: int) -> None:
    check(op, "fp32", torch.float32, tokens, "sm_80")
