"""Kernels of Moe and Router compiled without a GPU: nothing spills, tensor cores are used, sm_80 has no FP8 in it."""

import pytest
import torch
from support.gpu import _program

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.cubin import instructions
from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.formats import parse_format
from dsc.plugins.gpu_node import Arch
from dsc.runtime.program import ProgramNode
from dsc.runtime.steps import Kernel

TENSOR_CORES = {"sm_80": {"HMMA"}, "sm_90a": {"HGMMA", "QGMMA"}, "sm_100a": {"UTCHMMA", "UTCQMMA"}}
E, K, D, F, SHARED_F = 16, 4, 256, 384, 256


def lowered(op: str, inputs: dict[str, torch.Tensor], attributes: dict[str, object], arch: str):
    """The node with its variants, and what was compiled for it."""
    compiler = CubinCompiler(Arch(arch))
    (program,) = lower_gpu([_program(op, inputs, attributes, {"T": 1024})], compiler)
    return program.nodes[0], compiler


def moe(format_: str, shared: str, arch: str) -> tuple[ProgramNode, CubinCompiler]:
    """A node of a few experts; tensors without memory."""
    inputs = {
        "x": torch.empty(3, D, dtype=torch.bfloat16, device="meta"),
        "ids": torch.empty(3, K, dtype=torch.int32, device="meta"),
        "weights": torch.empty(3, K, device="meta"),
    }
    attributes = {}
    for prefix, kind, width, lead in (("", format_, F, (E,)), ("shared_", shared, SHARED_F, ())):
        for name, shape in (("gate", (width, D)), ("up", (width, D)), ("down", (D, width))):
            attributes[f"{prefix}{name}_format"] = kind
            for part, (dtype, size) in parse_format(kind).parts((*lead, *shape)).items():
                slot = f"{prefix}{name}" if part == "data" else f"{prefix}{name}.{part}"
                inputs[slot] = torch.empty(size, dtype=getattr(torch, dtype), device="meta")
    return lowered("Moe", inputs, attributes, arch)


@pytest.mark.parametrize(
    ("arch", "format_", "shared"),
    [("sm_90a", "wint4:128", "fp8"), ("sm_80", "wint4:128", "wint8"), ("sm_100a", "fp8", "bf16")],
)
def test_moe_compiles(arch: str, format_: str, shared: str) -> None:
    node, compiler = moe(format_, shared, arch)
    for source, built in compiler.built.items():
        assert built.resources.stack_bytes == 0, (source, built.resources)
        used = instructions(built.cubin)
        if built.compiled.entry in ("moe_gate_up", "moe_down"):
            assert used & TENSOR_CORES[arch], (source, used)
        if built.compiled.entry.startswith("moe_few"):
            assert "HMMA" in used, (source, used)
        assert arch != "sm_80" or not used & {"QMMA", "QGMMA"}, (source, used)
    guards = [variant.guard for variant in node.variants]
    assert guards == ["T <= 1", "T <= 2", "T <= 32", "T <= 128", ""]
    entries = [[step.entry for step in variant.steps if isinstance(step, Kernel)] for variant in node.variants]
    assert entries[0][-3:] == ["moe_few_gate_up", "moe_few_down", "moe_sum"]  # before them only a shared expert's own
    assert "moe_plan" not in entries[0]  # one token needs no work list
    assert all("moe_plan" in steps and steps[-1] == "moe_sum" for steps in entries[1:])


def test_fp8_experts_without_fp8_instructions() -> None:
    """sm_80 decodes e4m3 by its bits and multiplies bfloat16; few_tokens.cu is not for it."""
    node, compiler = moe("fp8", "fp8", "sm_80")
    assert not any(built.compiled.entry.startswith("moe_few") for built in compiler.built.values())
    assert all(built.resources.stack_bytes == 0 for built in compiler.built.values())
    assert len(node.variants) == 3


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_router_compiles(arch: str) -> None:
    inputs = {
        "x": torch.empty(3, 7168, dtype=torch.bfloat16, device="meta"),
        "w": torch.empty(256, 7168, device="meta"),
        "bias": torch.empty(256, device="meta"),
        "slots": torch.empty(3, dtype=torch.int32, device="meta"),
    }
    attributes = {"top_k": 8, "groups": 8, "topk_groups": 4, "scoring": "sigmoid", "group_score": "top2_sum"}
    node, compiler = lowered("Router", inputs, {**attributes, "normalize": 1, "scale": 2.5}, arch)
    assert [len(variant.steps) for variant in node.variants] == [2, 2, 2]
    for source, built in compiler.built.items():
        assert built.resources.stack_bytes == 0, (source, built.resources)
        if built.compiled.entry == "router_logits":
            assert instructions(built.cubin) & TENSOR_CORES[arch], source
