"""Every op has kernels for every architecture: they compile without a GPU, none spills, each has its instruction.

At the head widths of the released models; the tests beside this one go into what single ops compile to.
"""

from __future__ import annotations

import pytest
import torch
from support.gpu import case_inputs, node_program
from support.op_cases import CASES, Draw, formats_of, model_widths

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.kernel_check import check_kernels
from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.gpu_node import Arch
from dsc.plugins.schema import folder_of, plugin_folders
from dsc.runtime.errors import DscError
from dsc.runtime.steps import Kernel, kernels_in

BOUNDS = {"T": 512, "B": 32, "R": 512}
QUANTIZED = {"sm_80": "wint8", "sm_90a": "wint4:128", "sm_100a": "fp8"}  # besides bf16


def compiled(op: str, arch: str, format_: str, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Entries of a node's kernels; DscError where one is not as it should be."""
    with model_widths():
        case = CASES[op](Draw(129, dtype, format_, torch.Generator().manual_seed(0)))
    compiler = CubinCompiler(Arch(arch))
    inputs, attributes = case_inputs(case)
    (program,) = lower_gpu([node_program(op, inputs, attributes, BOUNDS)], compiler)
    check_kernels([program], compiler, {})
    launched = {step.cubin: step.entry for variant in program.nodes[0].variants for step in kernels_in(variant.steps)}
    assert launched.keys() == {built.compiled.cubin for built in compiler.built.values()}
    calls = [step for variant in program.nodes[0].variants for step in variant.steps if not isinstance(step, Kernel)]
    assert launched or calls
    return sorted(launched.values())


def test_every_op_is_here() -> None:
    assert sorted(map(folder_of, CASES)) == plugin_folders()


@pytest.mark.parametrize("arch", QUANTIZED)
@pytest.mark.parametrize("op", CASES)
def test_bfloat16(op: str, arch: str) -> None:
    assert compiled(op, arch, "bf16") or op == "AllReduce"


@pytest.mark.parametrize("arch", QUANTIZED)
@pytest.mark.parametrize("op", [op for op in CASES if len(formats_of(op)) > 1 and op != "Embedding"])
def test_a_quantized_format(op: str, arch: str) -> None:
    assert compiled(op, arch, QUANTIZED[arch])


@pytest.mark.parametrize("arch", QUANTIZED)
@pytest.mark.parametrize("op", ["Linear", "Qkv", "Moe"])
def test_codes_that_the_norm_made(op: str, arch: str) -> None:
    """The kernel is missing that quantizes x first; where cuBLAS takes the codes, another spreads their scales."""
    taken = [entry for entry in compiled(op, arch, "fp8:ue8m0") if entry != "spread_scales"]
    assert sorted([*taken, "quantize_rows"]) == compiled(op, arch, "fp8")


@pytest.mark.parametrize("arch", QUANTIZED)
@pytest.mark.parametrize("width", [1000, 2048, 7168])
@pytest.mark.parametrize("op", ["RmsNorm", "AddRmsNorm"])
def test_norms_that_quantize(op: str, width: int, arch: str) -> None:
    """In the norm's one launch."""
    rows = torch.empty(3, width, dtype=torch.bfloat16, device="meta")
    inputs = {"x": rows, "weight": rows[0]} | ({"residual": rows} if op == "AddRmsNorm" else {})
    compiler = CubinCompiler(Arch(arch))
    (program,) = lower_gpu([node_program(op, inputs, {"epsilon": 1e-6, "quantize": "fp8"}, BOUNDS)], compiler)
    check_kernels([program], compiler, {})
    (variant,) = program.nodes[0].variants
    assert len(variant.steps) == len(compiler.built) == 1


@pytest.mark.parametrize("arch", QUANTIZED)
@pytest.mark.parametrize("op", CASES)
def test_float32(op: str, arch: str) -> None:
    assert compiled(op, arch, "fp32", torch.float32) or op == "AllReduce"


def test_a_quantized_embedding_is_refused() -> None:
    with pytest.raises(DscError, match="a quantized embedding has no kernel"):
        compiled("Embedding", "sm_90a", "wint8")
