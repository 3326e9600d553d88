"""MtpInput: two norms side by side, the embedding first."""

import pytest
import torch
from support.cpu_op import IMPLEMENTATIONS, CpuOp
from support.tolerances import check_rows

D = 96


def mtp_input(implementation, tokens=3, dtype="float32", hidden_dtype=None, norms="float32"):
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    operands = {
        "embedding": random(tokens, D).to(getattr(torch, dtype)),
        "hidden": (20 * random(tokens, D)).to(getattr(torch, hidden_dtype or dtype)),
        "embedding_norm": (1 + 0.3 * random(D)).to(getattr(torch, norms)),
        "hidden_norm": (1 + 0.3 * random(D)).to(getattr(torch, norms)),
    }
    return CpuOp(implementation, "MtpInput", operands, {"epsilon": 1e-6}, ("embedding_norm", "hidden_norm"))


@pytest.mark.parametrize(("dtype", "hidden_dtype"), [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32")])
@pytest.mark.parametrize("norms", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_normed_embedding_comes_first(implementation, norms, dtype, hidden_dtype):
    op = mtp_input(implementation, dtype=dtype, hidden_dtype=hidden_dtype, norms=norms)
    got = op()["y"]
    for half, name in ((got[:, :D], "embedding"), (got[:, D:], "hidden")):
        x = op.operands[name].double()
        want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * op.operands[f"{name}_norm"].double()
        check_rows(half, want, "norm", dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_zero_rows_and_no_row(implementation):
    assert mtp_input(implementation, tokens=0)()["y"].shape == (0, 2 * D)
    got = mtp_input(implementation)(embedding=torch.zeros(1, D), hidden=torch.zeros(1, D))["y"]
    assert torch.equal(got, torch.zeros(1, 2 * D))
