"""Kernels of Linear and LmHead without a GPU: what they compile to on every architecture, and which serves which step."""

from __future__ import annotations

import functools

import pytest

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.cubin import instructions
from dsc.plugins.formats import parse_format
from dsc.plugins.gpu_node import Arch, GpuNode
from dsc.plugins.linear.kernel import lower
from dsc.plugins.lm_head.kernel import lower as lower_head
from dsc.plugins.qkv.kernel import _both
from dsc.plugins.schema import Type, load_op
from dsc.runtime.expressions import evaluate, parse_guard
from dsc.runtime.steps import Gemm, Kernel, Pointer, Scalar, Variant

FORMATS = ("bf16", "fp8", "wint8", "wint4:128", "wint4:32")
# The rarer groups go through the same sources.
COMPILED = [
    *(("sm_90a", format_) for format_ in FORMATS),
    *(("sm_80", format_) for format_ in ("fp8", "wint8", "wint4:128")),
    ("sm_100a", "fp8"),
    ("sm_100a", "wint4:128"),
]
FP8_INSTRUCTIONS = {"QGMMA", "QMMA", "UTCQMMA"}


def node_of(
    op_name: str,
    format_: str,
    arch: str,
    dtype: str = "bfloat16",
    bound: int = 0,
    shape: tuple[int, int] = (640, 7168),
    codes: bool = False,
) -> GpuNode:
    """A product with a weight of `shape`; `codes`: a norm made those of x."""
    op = load_op(op_name)
    parts = parse_format(format_).parts(shape)
    x, count = ("x", "T") if op_name == "Linear" else ("hidden", "R")
    types = {x: Type(dtype, ("T", shape[1])), "w": Type(*parts["data"])}
    if codes:
        types |= {
            "x_codes": Type("float8_e4m3fn", ("T", shape[1])),
            "x_scales": Type("float32", (shape[1] // 128, "T")),
        }
    if op_name == "LmHead":
        types["logit_rows"] = Type("int32", ("R",))
    if "scales" in parts:
        types["w.scales"] = Type(*parts["scales"])
    attributes = {"w_format": format_}
    made, dims = op.check([types.get(slot) for slot in op.slot_names()], attributes)
    out = op.outputs[0].name
    return GpuNode(
        name="linear", op=op_name, attributes=attributes, dims=dims, inputs={name: name for name in types},
        outputs={out: out}, types={**types, out: made[0]}, arch=Arch(arch), compiler=CubinCompiler(Arch(arch)),
        bounds={count: bound},
    )  # fmt: skip


def variants_of(node: GpuNode) -> tuple[Variant, ...]:
    return lower(node) if node.op == "Linear" else lower_head(node)


def variant_at(variants: tuple[Variant, ...], **letters: int) -> Variant:
    return next(variant for variant in variants if parse_guard(variant.guard).holds(letters))


def names_at(variants: tuple[Variant, ...], **letters: int) -> list[str]:
    """Entries of kernels, "gemm", of what serves a step."""
    steps = variant_at(variants, **letters).steps
    return [step.entry if isinstance(step, Kernel) else step.kind for step in steps]


@functools.cache
def compiled(op_name: str, format_: str, arch: str, dtype: str = "bfloat16") -> CubinCompiler:
    node = node_of(op_name, format_, arch, dtype)
    variants_of(node)
    assert isinstance(node.compiler, CubinCompiler)
    node.compiler.build()
    return node.compiler


@pytest.mark.parametrize(("arch", "format_"), COMPILED)
def test_kernels_stay_in_registers(format_: str, arch: str):
    built = compiled("Linear", format_, arch).built
    assert built
    for source, one in built.items():
        assert one.resources.stack_bytes == 0, source
        assert not (arch == "sm_80" and instructions(one.cubin) & FP8_INSTRUCTIONS), source


@pytest.mark.parametrize(
    ("format_", "entry", "instruction"),
    [
        ("fp8", "linear", "QGMMA"),
        ("wint8", "sm90_many_tokens", "HGMMA"),
        ("wint4:128", "few_tokens", "IMMA"),
        ("wint4:128", "sm90_many_tokens", "HGMMA"),
    ],
)
def test_hopper_instructions(format_: str, entry: str, instruction: str):
    built = [one for one in compiled("Linear", format_, "sm_90a").built.values() if one.compiled.entry == entry]
    assert len(built) > 1
    assert all(instruction in instructions(one.cubin) for one in built)


@pytest.mark.parametrize("format_", ["fp32", "fp8", "wint4:128"])
def test_float32_activations_stay_float32(format_: str):
    """No tensor core, whose float32 mode is tf32."""
    for source, one in compiled("LmHead", format_, "sm_90a", "float32").built.items():
        assert not {i for i in instructions(one.cubin) if "MMA" in i}, source
        assert one.resources.stack_bytes == 0, source


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("format_", FORMATS)
def test_variants_cover_every_count_and_no_more(format_: str, arch: str):
    for op, count in (("Linear", "T"), ("LmHead", "R")):
        variants = variants_of(node_of(op, format_, arch))
        assert {variant_at(variants, **{count: t}).guard for t in range(1, 1200)} == {v.guard for v in variants}
        assert len({variant.guard for variant in variants}) == len(variants)
        assert variants[-1].guard == ""
        assert [variant.guard for variant in variants_of(node_of(op, format_, arch, bound=4))] == [""]


def test_many_tokens_of_fp8_go_to_cublas():
    """Any number of them: rows are filled up to fours where there is room behind the last, else Triton takes the odd ones."""
    few, many = ["quantize_rows", "linear"], ["quantize_rows", "gemm"]
    variants = variants_of(node_of("Linear", "fp8", "sm_90a", bound=1024))
    assert [names_at(variants, T=t) for t in (1, 256, 257, 260, 1001, 1024)] == [few, few, many, many, many, many]
    variants = variants_of(node_of("Linear", "fp8", "sm_90a", bound=1022))
    assert [names_at(variants, T=t) for t in (256, 257, 260, 1001, 1020, 1022)] == [few, few, many, few, many, few]
    variants = variants_of(node_of("Linear", "fp8", "sm_90a", bound=1024, shape=(7168, 16384)))  # large: sooner
    assert [names_at(variants, T=t) for t in (64, 65, 68)] == [few, many, many]


@pytest.mark.parametrize("tokens", [257, 258, 260, 1001])
def test_rows_of_scales_are_whole_fours(tokens: int):
    node = node_of("Linear", "fp8", "sm_90a", bound=1004)
    quantized, gemm = variant_at(variants_of(node), T=tokens).steps
    assert isinstance(quantized, Kernel)
    assert isinstance(gemm, Gemm)
    padded = -(-tokens // 4) * 4
    pitch = next(argument.value for argument in quantized.arguments if isinstance(argument, Scalar))
    assert (evaluate(gemm.m, {"T": tokens}), evaluate(str(pitch), {"T": tokens})) == (padded, padded)
    assert quantized.grid[0] == "T"
    assert (gemm.a_scales, gemm.b_scales) == (node.at("linear/w.scales").pointer, node.at("w.scales").pointer)
    assert node.scratch["linear/w.codes"].shape == ("T", 7168)
    assert node.scratch["linear/w.scales"].shape == (56, "T")


def test_codes_of_a_norm_go_to_cublas_as_they_are():
    """Only their scales are copied, where the tokens are no whole fours."""
    node = node_of("Linear", "fp8", "sm_90a", bound=1004, codes=True)
    variants = variants_of(node)
    assert [names_at(variants, T=t) for t in (256, 260, 257)] == [["linear"], ["gemm"], ["spread_scales", "gemm"]]
    for tokens, scales in ((260, "x_scales"), (257, "linear/w.scales")):
        gemm = variant_at(variants, T=tokens).steps[-1]
        assert isinstance(gemm, Gemm)
        assert (gemm.a.at, gemm.a_scales) == (Pointer("x_codes"), Pointer(scales))
    assert "linear/w.codes" not in node.scratch


@pytest.mark.parametrize(
    ("arch", "dtype", "shape"),
    [
        ("sm_80", "bfloat16", (640, 7168)),
        ("sm_100a", "bfloat16", (640, 7168)),
        ("sm_90a", "float32", (640, 7168)),
        ("sm_90a", "bfloat16", (648, 7168)),
        ("sm_90a", "bfloat16", (640, 10944)),
        ("sm_90a", "bfloat16", (640, 2304)),
    ],
)
def test_what_cublas_does_not_take_stays(arch: str, dtype: str, shape: tuple[int, int]):
    """Other chips, other activations, rows or scales that are not whole steps of 16 bytes."""
    variants = variants_of(node_of("Linear", "fp8", arch, dtype, 1024, shape))
    assert all("gemm" not in names_at(variants, T=t) for t in range(1, 1025))


def test_many_rows_of_a_head_are_gathered_for_cublas():
    variants = variants_of(node_of("LmHead", "bf16", "sm_90a", bound=256))
    assert [names_at(variants, R=r) for r in (64, 65)] == [["linear"], ["gather_rows", "gemm"]]
    gemm = variant_at(variants, R=65).steps[1]
    assert isinstance(gemm, Gemm)
    assert (gemm.a.dtype, gemm.c.dtype, gemm.m) == ("bfloat16", "float32", "R")
    for format_ in FORMATS[1:]:  # their values would take the memory of another head
        variants = variants_of(node_of("LmHead", format_, "sm_90a", bound=256))
        assert all("gemm" not in names_at(variants, R=r) for r in range(1, 257))


@pytest.mark.parametrize(
    ("format_", "width", "first"), [("wint4:64", 10944, 65), ("wint8", 10944, 257), ("wint4:64", 7168, 257)]
)
def test_integer_codes_are_dequantized_sooner_where_no_kernel_of_hopper_serves(format_: str, width: int, first: int):
    variants = variants_of(node_of("Linear", format_, "sm_90a", bound=1024, shape=(2048, width)))
    dequantized = [t for t in range(1, 1025) if names_at(variants, T=t) == ["dequantize_rows", "gemm"]]
    assert dequantized == list(range(first, 1025))


def test_two_products_of_a_step_have_the_variants_of_both():
    """Guards of both, whatever they say: at any number of tokens the steps are those that each alone would take."""
    fp8, wint8 = (variants_of(node_of("Linear", format_, "sm_90a", bound=1022)) for format_ in ("fp8", "wint8"))
    for first, second in ((fp8, wint8), (wint8, fp8), (fp8, fp8), (wint8, wint8)):
        both = tuple(_both(first, second))
        for t in range(1, 1023):
            assert variant_at(both, T=t).steps == (*variant_at(first, T=t).steps, *variant_at(second, T=t).steps)
        assert {variant_at(both, T=t).guard for t in range(1, 1023)} == {variant.guard for variant in both}


def test_parts_of_a_split_have_their_place():
    """A tile's launch splits K only where the scratch was made for it."""
    for arch in ("sm_80", "sm_90a"):
        node = node_of("Linear", "fp8", arch, bound=64)
        for variant in variants_of(node):
            for step in variant.steps:
                if isinstance(step, Kernel) and step.entry == "linear" and step.grid[1] != 1:
                    assert "linear/w.parts" in node.scratch
                    assert "linear/w.arrivals" in node.zeroed
