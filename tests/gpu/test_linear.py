"""Linear on a GPU against its reference: every format and variant, odd sizes, a split K that adds up alike in every run."""

from __future__ import annotations

import pytest
import torch
from support.random_weights import FORMATS, random_weight
from support.tolerances import check_rows

from dsc.plugins.linear.reference import reference
from dsc.plugins.stored import norm_codes

pytestmark = pytest.mark.gpu


TOKENS = (1, 3, 8, 9, 17, 33, 65, 129, 200, 257, 1100)  # each in another variant, none a multiple of its tile
# Rows and columns: whole steps of few_tokens.cu or not, a K that is split or not, partial blocks of fp8 on both sides.
SIZES = ((200, 512), (72, 192), (640, 7168))


def outliers(tokens: int, width: int) -> torch.Tensor:
    """Normal values, one in fifty twenty times as large."""
    g = torch.Generator().manual_seed(tokens + width)
    values = torch.randn(tokens, width, generator=g)
    return torch.where(torch.rand(tokens, width, generator=g) < 0.02, 20 * values, values)


def check(
    format_: str, size: tuple[int, int], dtype: torch.dtype, tokens: tuple[int, ...], arch: str = "sm_90a"
) -> None:
    from support.gpu import GpuOp

    w = random_weight(format_, size, torch.Generator().manual_seed(size[0]))
    x = outliers(max(tokens), size[1]).to(dtype)
    inputs = {"x": x, "w": w.data} if w.scales is None else {"x": x, "w": w.data, "w.scales": w.scales}
    op = GpuOp("Linear", inputs, {"w_format": format_}, arch=arch)
    (want,) = reference(x=x, w=w)
    name = str(dtype).removeprefix("torch.")
    for count in tokens:
        first = op(x=x[:count])["y"].cpu()
        check_rows(first, want[:count], "linear", name, f"{format_} {size} T={count}")
        assert torch.equal(first, op(x=x[:count])["y"].cpu()), f"{format_} {size} T={count}: two runs differ"


def fits(format_: str, width: int) -> bool:
    return not format_.startswith("wint4") or width % int(format_.removeprefix("wint4:")) == 0


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("format_", FORMATS)
def test_bfloat16(format_: str, size: tuple[int, int]) -> None:
    if fits(format_, size[1]):
        check(format_, size, torch.bfloat16, TOKENS)


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
@pytest.mark.parametrize("format_", FORMATS)
def test_float32(format_: str, size: tuple[int, int]) -> None:
    if fits(format_, size[1]):
        check(format_, size, torch.float32, (1, 3, 17, 129))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("format_", ["fp8", "fp8:ue8m0"])
def test_codes_of_the_norm_stand_for_x(format_: str, size: tuple[int, int], arch: str) -> None:
    """The same bits in every variant; x itself is not read."""
    from support.gpu import GpuOp

    w = random_weight(format_, size, torch.Generator().manual_seed(size[0]))
    for dtype in (torch.bfloat16, torch.float32):
        x = outliers(max(TOKENS), size[1]).to(dtype)
        inputs = {"x": x, "w": w.data, "w.scales": w.scales}
        codes, scales = norm_codes(x, format_)
        plain = GpuOp("Linear", inputs, {"w_format": format_}, arch=arch)
        given = GpuOp("Linear", {**inputs, "x_codes": codes, "x_scales": scales}, {"w_format": format_}, arch=arch)
        for count in TOKENS:
            some = {"x_codes": codes[:count], "x_scales": scales[:, :count].contiguous()}
            got = given(x=torch.zeros_like(x[:count]), **some)["y"]
            assert torch.equal(got, plain(x=x[:count])["y"]), f"{format_} {size} {dtype} T={count}"


@pytest.mark.parametrize("format_", ["fp8", "wint8", "wint4:128", "wint4:32"])
def test_sources_of_an_older_architecture(format_: str) -> None:
    """As an engine for sm_80 multiplies: its sources and tiles, built for this chip."""
    check(format_, (200, 512), torch.bfloat16, (1, 3, 33, 129), arch="sm_80")
