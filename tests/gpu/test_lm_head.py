"""LmHead on a GPU against its reference: rows in any order and more than once, logits in float32."""

from __future__ import annotations

import pytest
import torch
from support.random_weights import FORMATS, random_weight
from support.tolerances import check_rows

from dsc.plugins.lm_head.reference import reference

pytestmark = pytest.mark.gpu


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
    rows = torch.randint(150, (260,), generator=g, dtype=torch.int32)
    inputs = {"hidden": hidden, "logit_rows": rows, "w": w.data}
    if w.scales is not None:
        inputs["w.scales"] = w.scales
    op = GpuOp("LmHead", inputs, {"w_format": format_})
    (want,) = reference(hidden=hidden, logit_rows=rows, w=w)
    kind, entry = ("logits", format_.partition(":")[0]) if dtype is torch.bfloat16 else ("linear", "float32")
    for count in (1, 3, 16, 33, 64, 65, 127, 129, 256, 260):
        got = op(logit_rows=rows[:count])["logits"].cpu()
        assert got.dtype == torch.float32
        check_rows(got, want[:count], kind, entry, f"{format_} {width} {dtype} R={count}")
