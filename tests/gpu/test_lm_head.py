"""LmHead on a GPU against its reference: rows in any order and more than once, logits in float32."""

from __future__ import annotations

import pytest
import torch
from support.random_weights import FORMATS, random_weight
from support.tolerances import worst_row

from dsc.plugins.lm_head.reference import reference

pytestmark = pytest.mark.gpu

# Sums are float32 and not rounded, but tensor cores add products of e4m3 with 13 bits, a few tokens times integer codes
# are integers of 15 bits, and many tokens take 4-bit weights rounded to bfloat16.
LIMITS = {"fp8": 3e-4, "wint8": 3e-4, "wint4": 3e-3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [192, 512])
@pytest.mark.parametrize("format_", FORMATS)
def test_lm_head(format_: str, width: int, dtype: torch.dtype) -> None:
    from support.gpu import GpuOp

    if format_.startswith("wint4") and width % int(format_.removeprefix("wint4:")):
        pytest.skip("the group does not divide the width")
    g = torch.Generator().manual_seed(width)
    w = random_weight(format_, (1000, width), g)
    hidden = torch.randn(150, width, generator=g).to(dtype)
    rows = torch.randint(150, (140,), generator=g, dtype=torch.int32)
    inputs = {"hidden": hidden, "logit_rows": rows, "w": w.data}
    if w.scales is not None:
        inputs["w.scales"] = w.scales
    op = GpuOp("LmHead", inputs, {"w_format": format_})
    (want,) = reference(hidden=hidden, logit_rows=rows, w=w)
    limit = LIMITS.get(format_.partition(":")[0], 1e-5) if dtype is torch.bfloat16 else 1e-5
    for count in (1, 3, 16, 33, 140):
        error = worst_row(op(logit_rows=rows[:count])["logits"].cpu(), want[:count])
        assert error < limit, f"{format_} {width} {dtype} R={count}: worst row {error:.1e}"
