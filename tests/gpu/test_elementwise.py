"""Norms, SwiGLU, embedding and the MTP input on a GPU against their references."""

import importlib

import pytest
import torch
from support.tolerances import check_rows, worst_row

pytestmark = pytest.mark.gpu


def reference(folder: str, **operands: object) -> tuple[torch.Tensor, ...]:
    results: tuple[torch.Tensor, ...] = importlib.import_module(f"dsc.plugins.{folder}.reference").reference(**operands)
    return results


def check(got: torch.Tensor, want: torch.Tensor, kind: str, what: str) -> None:
    assert got.dtype == want.dtype, what
    check_rows(got.cpu(), want, kind, str(want.dtype).removeprefix("torch."), what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 129])
@pytest.mark.parametrize("width", [256, 7168])
def test_norms(dtype: torch.dtype, tokens: int, width: int) -> None:
    from support.gpu import GpuOp

    x, residual = (torch.randn(tokens, width, dtype=dtype) for _ in range(2))
    weight = torch.rand(width, dtype=torch.bfloat16)
    (y,) = GpuOp("RmsNorm", {"x": x, "weight": weight}, {"epsilon": 1e-6})().values()
    check(y, reference("rms_norm", x=x, weight=weight, epsilon=1e-6)[0], "norm", "RmsNorm")
    out = GpuOp("AddRmsNorm", {"x": x, "residual": residual, "weight": weight}, {"epsilon": 1e-6})()
    want, total = reference("add_rms_norm", x=x, residual=residual, weight=weight, epsilon=1e-6)
    assert torch.equal(out["sum"].cpu(), total)
    check(out["y"], want, "norm", "AddRmsNorm")


@pytest.mark.parametrize("tokens", [1, 3, 129])
def test_swiglu_embedding_mtp_input(tokens: int) -> None:
    from support.gpu import GpuOp

    gate, up = (torch.randn(tokens, 1000, dtype=torch.bfloat16) for _ in range(2))
    (y,) = GpuOp("Swiglu", {"gate": gate, "up": up}, {})().values()
    want = reference("swiglu", gate=gate, up=up)[0]
    check(y, want, "elementwise", "Swiglu")
    assert worst_row(y.cpu(), want) < 6e-3  # nearer than the table asks, and has been
    table, ids = torch.randn(500, 320, dtype=torch.bfloat16), torch.randint(500, (tokens,), dtype=torch.int32)
    attributes = {"table_format": "bf16", "dtype": "bfloat16"}
    (y,) = GpuOp("Embedding", {"tokens": ids, "table": table}, attributes)().values()
    assert torch.equal(y.cpu(), table[ids.long()])
    e, h = (torch.randn(tokens, 320, dtype=torch.bfloat16) for _ in range(2))
    en, hn = (torch.rand(320, dtype=torch.bfloat16) for _ in range(2))
    operands = {"embedding": e, "hidden": h, "embedding_norm": en, "hidden_norm": hn}
    (y,) = GpuOp("MtpInput", operands, {"epsilon": 1e-6})().values()
    check(y, reference("mtp_input", **operands, epsilon=1e-6)[0], "norm", "MtpInput")
