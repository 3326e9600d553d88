"""Expressions are simplified to the same bytes; what one format holds already is passed through and called so."""

import pytest
import torch

from dsc.compiler.evaluate import evaluate
from dsc.compiler.ir.simplify import segments, simplify, verdict
from dsc.compiler.ir.weight import Cast, Concat, Dequantize, Expression, Quantize, Reshape, Source, Stack


def bf16(name: str, *shape: int) -> Source:
    return Source(name, "bfloat16", shape)


def fp8(name: str, rows: int, columns: int) -> Dequantize:
    scales = Source(f"{name}.scale", "float32", (-(-rows // 128), -(-columns // 128)))
    return Dequantize(Source(name, "float8_e4m3fn", (rows, columns)), scales)


def float32(x: Expression) -> Expression:
    return Cast(x, "float32")


def verdicts(expression: Expression) -> list[str]:
    return [verdict(segment) for _, segment in segments(simplify(expression))]


def read(name: str, rows: slice | None = None) -> torch.Tensor:
    """Any source of the tests, by values that follow from its name."""
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(sum(name.encode()))
    values = torch.randn(shape, generator=generator)
    return (values.abs() if name.endswith("scale") else values).to(dtype)[rows or slice(None)]


def remember(expression: Expression) -> Expression:
    SHAPES.update({s.name: (s.shape, getattr(torch, s.dtype)) for s in expression.sources()})
    return expression


SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
A, B, C = bf16("a", 256, 96), bf16("b", 64, 96), bf16("c", 256, 96)
P, Q, R = fp8("p", 256, 96), fp8("q", 96, 96), fp8("r", 256, 96)
F = Source("f", "float32", (256, 96))

CASES: dict[str, tuple[Expression, Expression, str]] = {
    "bf16 there and back": (Quantize(float32(A), "bf16"), A, "exact"),
    "bf16 as float32": (Quantize(float32(A), "fp32"), float32(A), "exact"),
    "bf16 joined": (Quantize(Concat((float32(A), float32(B))), "bf16"), Concat((A, B)), "exact"),
    "bf16 stacked": (Quantize(Stack((float32(A), float32(C))), "bf16"), Stack((A, C)), "exact"),
    "float32 to bf16 is measured": (Quantize(F, "bf16"), Quantize(F, "bf16"), "rounded"),
    "fp8 codes": (Quantize(P, "fp8", "data"), P.x, "passed"),
    "fp8 codes, powers of two for activations": (Quantize(P, "fp8:ue8m0", "data"), P.x, "passed"),
    "fp8 scales": (Quantize(P, "fp8", "scales"), P.scales, "exact"),
    "fp8 joined on a border": (Quantize(Concat((P, Q)), "fp8"), Concat((P.x, Q.x)), "passed"),
    "fp8 joined, scales": (Quantize(Concat((P, Q)), "fp8", "scales"), Concat((P.scales, Q.scales)), "exact"),
    "fp8 joined off a border": (
        Quantize(Concat((Q, P)), "fp8"),
        Quantize(Concat((Q, P)), "fp8"),
        "requantized",
    ),
    "fp8 stacked": (Quantize(Stack((P, R)), "fp8", "data"), Stack((P.x, R.x)), "passed"),
    "fp8 in other blocks": (
        Quantize(Dequantize(P.x, P.scales, (64, 128)), "fp8"),
        Quantize(Dequantize(P.x, P.scales, (64, 128)), "fp8"),
        "requantized",
    ),
    "fp8 as bf16 is rounded": (Quantize(P, "bf16"), Quantize(P, "bf16"), "rounded"),
    "fp8 as float32": (Quantize(P, "fp32"), P, "exact"),
    "fp8 as wint4": (Quantize(P, "wint4:32"), Quantize(P, "wint4:32"), "requantized"),
    "bf16 as fp8": (Quantize(float32(A), "fp8"), Quantize(float32(A), "fp8"), "quantized"),
    "bf16 as wint8": (Quantize(float32(A), "wint8"), Quantize(float32(A), "wint8"), "quantized"),
    "joined for wint4 stays whole: one grid": (
        Quantize(Concat((float32(A), float32(B))), "wint4:32"),
        Quantize(Concat((float32(A), float32(B))), "wint4:32"),
        "quantized",
    ),
    "stacked for wint4 is cut: a grid each": (
        Quantize(Stack((P, R)), "wint4:32"),
        Stack((Quantize(P, "wint4:32"), Quantize(R, "wint4:32"))),
        "requantized",
    ),
    "casts inside a view": (
        Cast(Reshape(float32(A), (128, 192)), "bfloat16"),
        Reshape(A, (128, 192)),
        "exact",
    ),
    "a cast that loses": (Cast(F, "bfloat16"), Cast(F, "bfloat16"), "rounded"),
    "a view back": (Reshape(Reshape(A, (128, 192)), (256, 96)), A, "exact"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_simplified(case: str) -> None:
    given, wanted, said = CASES[case]
    assert simplify(given) == wanted
    assert simplify(wanted) == wanted
    assert set(verdicts(given)) == {said}


@pytest.mark.parametrize("case", CASES)
def test_same_bytes(case: str) -> None:
    """Whatever is simplified, evaluating it gives what the expression gave: but for fp8, where the codes are the source's."""
    given, wanted, _ = CASES[case]
    remember(given)
    whole, short = evaluate(given, read), evaluate(simplify(given), read)
    assert (str(short.dtype), tuple(short.shape)) == (f"torch.{given.dtype}", given.shape)
    if isinstance(given, Quantize) and given.parsed.kind == "fp8" and wanted != given:
        source = torch.cat(
            [read(s.name) for s in given.sources() if s.name.endswith("scale") == (given.part == "scales")]
        )
        assert torch.equal(short.flatten().float(), source.flatten().float())
    else:
        assert torch.equal(short.view(torch.uint8), whole.view(torch.uint8))


def test_each_part_is_judged_by_itself() -> None:
    """A joint weight of an fp8 part and a bf16 part: the first is passed, only the second is quantized."""
    joint = Concat((P, float32(B)))
    data, scales = simplify(Quantize(joint, "fp8", "data")), simplify(Quantize(joint, "fp8", "scales"))
    assert data == Concat((P.x, Quantize(float32(B), "fp8", "data")))
    assert scales == Concat((P.scales, Quantize(float32(B), "fp8", "scales")))
    assert verdicts(Quantize(joint, "fp8")) == ["passed", "quantized"]
    stack = Quantize(Stack((P, float32(A))), "fp8")
    assert verdicts(stack) == ["passed", "quantized"]
    remember(stack)
    whole, short = evaluate(stack, read), evaluate(simplify(stack), read)
    assert torch.equal(short[1].view(torch.uint8), whole[1].view(torch.uint8))
    assert torch.equal(short[0].view(torch.uint8), read("p").view(torch.uint8))


def test_segments_know_their_bytes() -> None:
    stack = Stack((Concat((A, B)), Concat((C, B))))
    row = 96 * 2
    assert list(segments(stack)) == [(0, A), (256 * row, B), (320 * row, C), (576 * row, B)]
