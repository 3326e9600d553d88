"""Quantizers: codes and scales by definition, no value far from its code, finite whatever comes, errors as reported."""

import hashlib
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.compiler import quantize as quantizers
from dsc.compiler import round_fp8, round_integers
from dsc.compiler.quantize import GRIDS, Errors, NotFiniteError, add_errors, quantize, sums
from dsc.compiler.round_integers import Matrix, join, takes_codes
from dsc.plugins.formats import parse_format
from dsc.plugins.stored import StoredWeight, pack_nibbles, unpack_nibbles

FORMATS = ("fp32", "bf16", "fp8", "fp8:ue8m0", "wint8", "wint4:128", "wint4:64", "wint4:32")


def random_matrix(rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def restored(x: torch.Tensor, format_: str, grid: str = "") -> torch.Tensor:
    made = quantize(x, parse_format(format_), grid)
    return StoredWeight(parse_format(format_), made.parts["data"], made.parts.get("scales")).dequantize()


@pytest.mark.parametrize("format_", FORMATS)
def test_parts_are_as_the_format_says(format_: str) -> None:
    x = random_matrix(576, 384)
    made = quantize(x, parse_format(format_))
    wanted = parse_format(format_).parts(x.shape)
    assert {k: (str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in made.parts.items()} == wanted


def test_wint4_codes_by_definition() -> None:
    x = random_matrix(8, 256)
    for grid, low in (("-7..7", -7), ("-8..7", -8)):
        made = quantize(x, parse_format("wint4:128"), grid)
        codes = unpack_nibbles(made.parts["data"])
        for row in range(8):
            for group in range(2):
                values = x[row, group * 128 : group * 128 + 128].tolist()
                largest = max(map(abs, values)) / 7
                if grid == "-8..7":
                    largest = max(max(values) / 7.5, -min(values) / 8.5)
                scale = float(torch.tensor(largest, dtype=torch.float32).bfloat16())
                assert float(made.parts["scales"][row, group]) == scale
                wanted = [min(max(round(v / scale), low), 7) for v in values]
                assert codes[row, group * 128 : group * 128 + 128].tolist() == wanted
        assert int(codes.min()) >= low
        assert int(codes.max()) == 7


def test_the_low_nibble_is_the_even_column() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([7.0, -7.0, 1.0, -2.0])
    made = quantize(x, parse_format("wint4:32"), "-7..7")
    assert made.parts["data"][0, :2].tolist() == [0x97, 0xE1]
    assert torch.equal(pack_nibbles(unpack_nibbles(made.parts["data"])), made.parts["data"])


def test_wint8_codes_by_definition() -> None:
    x = random_matrix(5, 96)
    made = quantize(x, parse_format("wint8"))
    for row in range(5):
        scale = float(torch.tensor(float(x[row].abs().max()) / 127, dtype=torch.float32).bfloat16())
        assert float(made.parts["scales"][row]) == scale
        assert made.parts["data"][row].tolist() == [min(max(round(v / scale), -127), 127) for v in x[row].tolist()]


def test_halves_round_to_even() -> None:
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert quantize(x, parse_format("wint8")).parts["data"][0, :6].tolist() == [127, 0, 2, 2, 0, -2]


def test_fp8_blocks_by_definition_and_576_rows_have_5() -> None:
    x = random_matrix(576, 200)
    x[512:, 128:] *= 100
    made = quantize(x, parse_format("fp8"))
    scales = made.parts["scales"]
    assert scales.shape == (5, 2)
    for i in range(5):
        for j in range(2):
            block = x[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            assert scales[i, j] == block.abs().max() / 448
            codes = (block / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored = made.parts["data"][i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            assert torch.equal(stored.view(torch.uint8), codes.view(torch.uint8))


def test_fp8_of_what_fp8_holds_loses_nothing() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(65)[: 128 * 128].view(torch.float8_e4m3fn).view(128, 128)
    x = codes.float() * 2.0**-11
    made = quantize(x, parse_format("fp8"))
    assert float(made.parts["scales"]) == 2.0**-11
    assert torch.equal(made.parts["data"].float(), codes.float())
    assert made.errors.square == 0.0


def test_4_bit_values_are_met_exactly_by_the_symmetric_grid() -> None:
    """Weights that were trained on -7..7 come back as they are, since the grid is chosen by error."""
    codes = torch.randint(-7, 8, (64, 128), generator=torch.Generator().manual_seed(1)).float()
    codes[:, 0] = 7
    x = codes * 0.0078125
    made = quantize(x, parse_format("wint4:128"))
    assert made.errors.square == 0.0
    assert made.errors.grids == {"-7..7": 1}


def test_the_grid_with_the_smaller_error_is_taken() -> None:
    x = random_matrix(64, 1024)
    errors = {grid: quantize(x, parse_format("wint4:128"), grid).errors for grid in GRIDS}
    chosen = quantize(x, parse_format("wint4:128")).errors
    assert errors["-8..7"].square < 0.85 * errors["-7..7"].square
    assert chosen == errors["-8..7"]


@pytest.mark.parametrize("format_", ["fp8", "wint8", "wint4:128", "wint4:64", "wint4:32"])
def test_groups_of_zeros_have_scale_1_and_are_counted(format_: str) -> None:
    x = random_matrix(256, 256)
    x[:128, :128] = 0
    x[7] = 0
    made = quantize(x, parse_format(format_))
    count = {"fp8": 1, "wint8": 1, "wint4:128": 128 + 1, "wint4:64": 256 + 2, "wint4:32": 512 + 4}[format_]
    assert made.errors.zero_groups == count
    assert int((made.parts["scales"] == 1).sum()) == count
    assert not restored(x, format_)[:128, :128].any()


extreme = st.sampled_from([0.0, -0.0, 1.0, -1.0, 448.0, 500.0, 1e-45, -1e-45, 1e-38, -3e-38, 65504.0, 1e38, -3.3e38])


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Random values of any magnitude, with extremes strewn in."""
    rows, columns = draw(st.integers(1, 300)), 32 * draw(st.integers(1, 9))
    x = random_matrix(rows, columns, draw(st.integers(0, 99)), 10.0 ** draw(st.integers(-40, 30)))
    for value in draw(st.lists(extreme, max_size=6)):
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = value
    return x


@settings(max_examples=60, deadline=None)
@given(x=matrices(), format_=st.sampled_from(["fp8", "wint8", "wint4:32"]))
def test_never_nan_and_never_far(x: torch.Tensor, format_: str) -> None:
    """Every stored value is finite and within half a step of its weight, a step being the scale (or an ulp of e4m3)."""
    made = quantize(x, parse_format(format_))
    scales = made.parts["scales"].float()
    assert bool(torch.isfinite(scales).all())
    assert bool((scales > 0).all())
    back = restored(x, format_).double()
    assert bool(torch.isfinite(back).all())
    if format_ == "fp8":
        step = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: x.shape[0], : x.shape[1]].double()
        allowed = torch.maximum(back.abs() * 2.0**-4, step * 2.0**-10) * 1.01
    else:
        step = (
            scales.double()
            .repeat_interleave(x.shape[1] // (scales[0].numel() if scales.dim() > 1 else 1))
            .view(x.shape)
        )
        # bfloat16 rounds a scale by up to 2^-9, which moves the largest of 8.5 steps by that much.
        allowed = step * (0.5 + 8.5 * 2.0**-8)
    # Groups under the smallest normal float32 become zero, by rule.
    assert bool(((back - x.double()).abs() <= allowed.clamp_min(128 * torch.finfo(torch.float32).tiny)).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("format_", FORMATS)
def test_nan_and_infinity_are_refused(format_: str, bad: float) -> None:
    x = random_matrix(130, 128)
    x[129, 5] = bad
    with pytest.raises(NotFiniteError):
        quantize(x, parse_format(format_))


@pytest.mark.parametrize("format_", FORMATS)
def test_errors_are_those_of_the_stored_values(format_: str) -> None:
    """The report's numbers against a plain computation; a row that is worse than the others is not averaged away."""
    x = random_matrix(300, 256)
    x[131, ::32] = 0.18
    errors = quantize(x, parse_format(format_)).errors
    difference, exact = restored(x, format_).double() - x.double(), x.double()
    assert math.isclose(errors.relative, float(difference.norm() / exact.norm()), rel_tol=1e-4, abs_tol=1e-12)
    worst = float((difference.norm(dim=1) / exact.norm(dim=1)).max())
    assert math.isclose(errors.worst_row, worst, rel_tol=1e-4, abs_tol=1e-12)
    if format_.startswith("w"):
        assert errors.worst_row > 1.3 * errors.relative


@pytest.mark.parametrize("format_", ["wint8", "wint4:32", "fp8"])
def test_errors_of_what_is_too_small_to_store(format_: str) -> None:
    """It all becomes zeros, which is an error of 100 %, not one of NaN."""
    errors = quantize(torch.full((3, 128), 2.0**-140), parse_format(format_)).errors
    assert (errors.relative, errors.worst_row) == (1.0, 1.0)
    assert errors.square == 3 * 128 * 2.0**-280


def test_saturated_counts_codes_over_half_a_step_away() -> None:
    x = random_matrix(200, 256)
    made = quantize(x, parse_format("wint4:64"), "-8..7")
    steps = x.view(200, 4, 64) / made.parts["scales"].float().unsqueeze(-1)
    codes = unpack_nibbles(made.parts["data"]).view(200, 4, 64)
    count = int(((steps - codes).abs() > 0.5).sum())
    assert count > 0
    assert made.errors.saturated == count
    assert quantize(x, parse_format("wint4:64"), "-7..7").errors.saturated == 0


def test_errors_of_several_matrices_add_up_in_any_order() -> None:
    items = [quantize(random_matrix(64, 128, seed), parse_format("wint4:32")).errors for seed in range(5)]
    together = add_errors(items)
    assert together == add_errors(items[::-1])
    assert together.worst_row == max(item.worst_row for item in items)
    assert together.grids == {"-8..7": 5}
    assert add_errors([]) == Errors()


@given(st.integers(1, 70), st.integers(1, 5))
def test_sums(columns: int, rows: int) -> None:
    x = torch.arange(rows * columns, dtype=torch.float64).view(rows, columns)
    assert torch.equal(sums(x.clone()), x.sum(1))


@pytest.mark.parametrize("format_", FORMATS)
def test_bytes_do_not_depend_on_the_runs(format_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_matrix(700, 256)
    whole = quantize(x, parse_format(format_))
    for module in (quantizers, round_integers, round_fp8):
        monkeypatch.setattr(module, "RUN_ELEMENTS", 1)
    cut = quantize(x, parse_format(format_))
    assert cut.errors == whole.errors
    assert all(torch.equal(cut.parts[k].view(torch.uint8), v.view(torch.uint8)) for k, v in whole.parts.items())


ORDINARY, NEGATIVE, HUGE, TINY = 1e-4, -1e-4, 2.0**110, 2.0**-140


def coded(rows: int, columns: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes with groups of one sign, of zeros of either sign and of subnormals; scales of about `scale`."""
    generator = torch.Generator().manual_seed(5)
    codes = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448)
    codes[0, :128], codes[1, :128] = codes[0, :128].abs() + 1, -codes[1, :128].abs() - 1
    codes[2], codes[3] = 0.0, -0.0
    codes[4] *= 2.0**-12
    scales = torch.rand(rows, -(-columns // 128), generator=generator).add_(0.5) * scale
    scales[rows - 1, 0] = 0
    return codes.to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("format_", ["wint8", "wint4:128", "wint4:64", "wint4:32"])
@pytest.mark.parametrize("scale", [ORDINARY, TINY, 2.0**60])
def test_codes_and_scales_become_what_their_values_become(format_: str, scale: float) -> None:
    codes, scales = coded(300, 384, scale)
    assert takes_codes(scales, 384)
    values = codes.float() * scales.repeat_interleave(128, 1)
    for grid in ("", *GRIDS) if format_ != "wint8" else ("",):
        wanted = quantize(values, parse_format(format_), grid)
        made = quantize(Matrix(codes, scales), parse_format(format_), grid)
        assert made.errors == wanted.errors
        assert made.errors.zero_groups > 0
        assert all(torch.equal(made.parts[k].view(torch.uint8), v.view(torch.uint8)) for k, v in wanted.parts.items())


def test_codes_are_taken_only_where_their_order_is_that_of_the_values() -> None:
    for scale in (NEGATIVE, HUGE, math.nan, math.inf):
        assert not takes_codes(coded(5, 256, scale)[1], 256)
    assert not takes_codes(coded(5, 200, ORDINARY)[1], 200)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("format_", ["wint8", "wint4:32"])
def test_a_nan_among_codes_is_refused(format_: str, code: int) -> None:
    codes, scales = coded(130, 256, ORDINARY)
    codes.view(torch.uint8)[129, 5] = code
    with pytest.raises(NotFiniteError):
        quantize(Matrix(codes, scales), parse_format(format_))


def test_matrices_are_joined_as_codes_or_as_values() -> None:
    codes, scales = coded(5, 256, ORDINARY)
    coded_, values = Matrix(codes, scales), Matrix(torch.ones(2, 256))
    assert join([coded_, coded_]).scales is not None
    together = join([coded_, values])
    assert together.scales is None
    assert torch.equal(together.values, torch.cat([coded_.dequantize(), values.values]))


def digest() -> str:
    """Hash of codes, scales and errors of integers-made weights; called in processes that are set up differently."""
    state = torch.arange(1 << 20, dtype=torch.int64)
    state = (state * 6364136223846793005 + 1442695040888963407) >> 33
    x = ((state % 65521).to(torch.float32) / 65521 - 0.5).view(1024, 1024) ** 3
    x[5:9, :200] = 0
    x[40] *= 2.0**-130
    total = hashlib.sha256()
    for format_ in FORMATS:
        made = quantize(x, parse_format(format_))
        for part in made.parts.values():
            total.update(part.view(torch.uint8).numpy().tobytes())
        total.update(repr(made.errors).encode())
    return total.hexdigest()


def test_same_bytes_at_any_thread_count_and_instruction_set_and_without_torchscript() -> None:
    script = f"import runpy; print(runpy.run_path({__file__!r})['digest']())"
    changes = {"OMP_NUM_THREADS": "3", "ATEN_CPU_CAPABILITY": "default", "PYTORCH_JIT": "0"}
    out = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **changes}, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == digest()
