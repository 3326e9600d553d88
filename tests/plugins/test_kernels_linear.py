"""Kernels of Linear and LmHead without a GPU: what they compile to on every architecture."""

from __future__ import annotations

import pytest

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.cubin import instructions
from dsc.plugins.formats import parse_format
from dsc.plugins.gpu_node import Arch, GpuNode, TritonSource
from dsc.plugins.linear.kernel import lower
from dsc.plugins.lm_head.kernel import lower as lower_head
from dsc.plugins.schema import Type, load_op
from dsc.runtime.steps import Variant

FORMATS = ("bf16", "fp8", "wint8", "wint4:128", "wint4:32")
FP8_INSTRUCTIONS = {"QGMMA", "QMMA", "UTCQMMA"}


def lowered(
    op_name: str, format_: str, arch: str, dtype: str = "bfloat16", shape: tuple[int, int] = (640, 1536), bound: int = 0
) -> tuple[tuple[Variant, ...], CubinCompiler]:
    """The variants of one node and the compiler that made its kernels."""
    op, compiler = load_op(op_name), CubinCompiler(Arch(arch))
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
    node = GpuNode(
        name="linear", op=op_name, attributes=attributes, dims=dims, inputs={name: name for name in types},
        outputs={out: out}, types={**types, out: made[0]}, arch=Arch(arch), compiler=compiler, bounds={count: bound},
    )  # fmt: skip
    make = lower if op_name == "Linear" else lower_head
    make(node)
    compiler.build()
    return make(node), compiler


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("format_", FORMATS)
def test_kernels_stay_in_registers(format_: str, arch: str):
    _, compiler = lowered("Linear", format_, arch)
    assert compiler.built
    for source, built in compiler.built.items():
        assert built.resources.stack_bytes == 0, source
        assert not (arch == "sm_80" and instructions(built.cubin) & FP8_INSTRUCTIONS), source


@pytest.mark.parametrize("format_", FORMATS)
def test_many_tokens_use_hopper_tensor_cores(format_: str):
    _, compiler = lowered("Linear", format_, "sm_90a")
    wanted = "QGMMA" if format_ == "fp8" else "HGMMA"
    tiles = [
        b for s, b in compiler.built.items() if isinstance(s, TritonSource) and dict(s.constants).get("BM", 0) >= 64
    ]
    assert tiles or format_ == "bf16"  # which is cuBLAS's
    assert all(wanted in instructions(built.cubin) for built in tiles)


@pytest.mark.parametrize("format_", ["fp32", "fp8", "wint4:128"])
def test_float32_activations_stay_float32(format_: str):
    """No tensor core, whose float32 mode is tf32."""
    for op in ("Linear", "LmHead"):
        _, compiler = lowered(op, format_, "sm_90a", "float32")
        for source, built in compiler.built.items():
            assert not {i for i in instructions(built.cubin) if "MMA" in i}, source
            assert built.resources.stack_bytes == 0, source


@pytest.mark.parametrize("format_", FORMATS)
def test_variants_cover_every_count_and_no_more(format_: str):
    for op, count in (("Linear", "T"), ("LmHead", "R")):
        variants, _ = lowered(op, format_, "sm_90a")
        limits = [int(variant.guard.removeprefix(f"{count} <= ")) for variant in variants[:-1]]
        assert limits == sorted(set(limits))
        assert variants[-1].guard == ""
        few, _ = lowered(op, format_, "sm_90a", bound=8)
        assert [variant.guard for variant in few] == [""]
