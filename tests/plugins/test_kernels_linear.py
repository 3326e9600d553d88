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
from dsc.plugins.schema import Type, load_op
from dsc.runtime.steps import Kernel, Variant

FORMATS = ("bf16", "fp8", "wint8", "wint4:128", "wint4:32")
# The rarer groups go through the same sources.
COMPILED = [
    *(("sm_90a", format_) for format_ in FORMATS),
    *(("sm_80", format_) for format_ in ("fp8", "wint8", "wint4:128")),
    ("sm_100a", "fp8"),
    ("sm_100a", "wint4:128"),
]
FP8_INSTRUCTIONS = {"QGMMA", "QMMA", "UTCQMMA"}


def node_of(op_name: str, format_: str, arch: str, dtype: str = "bfloat16", bound: int = 0) -> GpuNode:
    """A product with a weight of 640 x 7168."""
    op, shape = load_op(op_name), (640, 7168)
    parts = parse_format(format_).parts(shape)
    x, count = ("x", "T") if op_name == "Linear" else ("hidden", "R")
    types = {x: Type(dtype, ("T", shape[1])), "w": Type(*parts["data"])}
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
        limits = [int(variant.guard.removeprefix(f"{count} <= ")) for variant in variants[:-1]]
        assert limits == sorted(set(limits))
        assert variants[-1].guard == ""
        assert [variant.guard for variant in variants_of(node_of(op, format_, arch, bound=4))] == [""]


def test_parts_of_a_split_have_their_place():
    """A tile's launch splits K only where the scratch was made for it."""
    for arch in ("sm_80", "sm_90a"):
        node = node_of("Linear", "fp8", arch, bound=64)
        for variant in variants_of(node):
            for step in variant.steps:
                if isinstance(step, Kernel) and step.entry == "linear" and step.grid[1] != 1:
                    assert "linear/w.parts" in node.scratch
                    assert "linear/w.arrivals" in node.zeroed
