"""Linear on a GPU against its reference: every format and variant, odd sizes, a split K that adds up alike in every run."""

from __future__ import annotations

import pytest
import torch
from support.random_weights import FORMATS, random_weight
from support.tolerances import check_rows

from dsc.plugins.linear.reference import reference
from dsc.plugins.stored import norm_codes

pytestmark = pytest.mark.gpu


TOKENS = (1, 3, 8, 9, 17, 33, 65, 127, 129, 200, 256, 257, 1001, 1100)  # in every variant, few a multiple of its tile
# Rows and columns: whole steps of few_tokens.cu or not, a K that is split or not, partial blocks of fp8 on both sides, a
# weight of fp8 that cuBLASLt takes with a partial block of rows.
SIZES = ((200, 512), (72, 192), (640, 7168), (2112, 1536))


def outliers(tokens: int, width: int) -> torch.Tensor:
    """Normal values, one in fifty twenty times as large."""
    g = torch.Generator().manual_seed(tokens + width)
    values = torch.randn(tokens, width, generator=g)
    return torch.where(torch.rand(tokens, width, generator=g) < 0.02, 20 * values, values)


def check(
    format_: str,
    size: tuple[int, int],
    dtype: torch.dtype,
    tokens: tuple[int, ...],
    arch: str = "sm_90a",
    bound: int = 0,
) -> None:
    from support.gpu import POISON, GpuOp

    w = random_weight(format_, size, torch.Generator().manual_seed(size[0]))
    x = outliers(max(tokens), size[1]).to(dtype)
    inputs = {"x": x, "w": w.data} if w.scales is None else {"x": x, "w": w.data, "w.scales": w.scales}
    op = GpuOp("Linear", inputs, {"w_format": format_}, arch=arch, bounds={"T": bound})
    (want,) = reference(x=x, w=w)
    name = str(dtype).removeprefix("torch.")
    for count in tokens:
        first = op(x=x[:count])["y"].cpu()
        check_rows(first, want[:count], "linear", name, f"{format_} {size} T={count}")
        assert torch.equal(first, op(x=x[:count])["y"].cpu()), f"{format_} {size} T={count}: two runs differ"
        behind = op.executor._tensors["y"].view(torch.uint8)[-(-count // 4) * 4 * size[0] * dtype.itemsize :]
        assert (behind == POISON).all(), f"{format_} {size} T={count}: written behind the rows"


def fits(format_: str, width: int) -> bool:
    return not format_.startswith("wint4") or width % int(format_.removeprefix("wint4:")) == 0


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("format_", FORMATS)
def test_bfloat16(format_: str, size: tuple[int, int]) -> None:
    if fits(format_, size[1]):
        check(format_, size, torch.bfloat16, TOKENS)


@pytest.mark.parametrize("size", [(3072, 1536), (7168, 256), (256, 7168), (2304, 7168), (7168, 2304)], ids=str)
@pytest.mark.parametrize("format_", ["bf16", "fp8", "wint8", "wint4:128"])
def test_parts_of_weights_that_ranks_have(format_: str, size: tuple[int, int]) -> None:
    """Of R1 on eight: q_b, the shared expert's down and gate, the dense layers' gate and down."""
    check(format_, size, torch.bfloat16, (1, 3, 17, 65, 129, 257, 1100))


@pytest.mark.parametrize("bound", [514, 516])
@pytest.mark.parametrize("format_", ["fp8", "fp8:ue8m0"])
def test_every_number_of_tokens_that_cublas_pads(format_: str, bound: int) -> None:
    """With room for whole fours of rows, and without, where Triton takes the odd numbers."""
    check(format_, (576, 2048), torch.bfloat16, (64, 65, 256, 257, 258, 259, 260, 511, 513, 514), bound=bound)


@pytest.mark.parametrize("format_", ["fp8", "wint4:64"])
def test_a_width_that_few_kernels_know(format_: str) -> None:
    check(format_, (2048, 10944), torch.bfloat16, (64, 65, 127, 256, 1001))


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
