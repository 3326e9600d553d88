"""LmHead: chosen rows only, logits in float32."""

import pytest
import torch
from support.cpu_op import IMPLEMENTATIONS, CpuOp
from support.random_weights import FORMATS, random_weight
from support.tolerances import check_rows

from dsc.plugins.lm_head import cpu
from dsc.plugins.stored import round_activations

D, V, TOKENS = 256, 515, 6


def lm_head(implementation, rows, format_="bf16", dtype="bfloat16"):
    generator = torch.Generator().manual_seed(0)
    operands = {
        "hidden": torch.randn(TOKENS, D, generator=generator).to(getattr(torch, dtype)),
        "logit_rows": torch.tensor(rows, dtype=torch.int32),
        "w": random_weight(format_, (V, D), generator),
    }
    return CpuOp(implementation, "LmHead", operands, {})


def expected(op):
    """float64 logits."""
    weight, x = op.operands["w"], op.operands["hidden"][op.operands["logit_rows"].long()]
    x = round_activations(x, weight.format.ue8m0) if weight.format.kind == "fp8" else x
    return x.double() @ weight.dequantize().double().T


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_of_the_chosen_rows(implementation, format_, dtype):
    op = lm_head(implementation, [5, 0, 0, 3], format_, dtype)
    got = op()["logits"]
    rounds = implementation == "cpu" and dtype == "bfloat16" and format_.startswith("wint")
    check_rows(got, expected(op), "linear", "bfloat16" if rounds else "float32")
    assert torch.equal(got[1], got[2])


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_row(implementation, format_):
    assert lm_head(implementation, [], format_)()["logits"].shape == (0, V)


def test_a_weight_of_many_chunks(monkeypatch):
    whole = lm_head("cpu", [1, 2])()["logits"]
    monkeypatch.setattr(cpu, "CHUNK_ELEMENTS", 100 * D)
    check_rows(lm_head("cpu", [1, 2])()["logits"], whole, "linear", "float32")
