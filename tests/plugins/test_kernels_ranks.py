"""What ranks exchange, and products with a rank's parts of weights, as steps of a GPU: without one."""

from __future__ import annotations

import pytest
import torch
from support.gpu import node_program
from support.interpreted_ops import Sources

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.cubin import mnemonics
from dsc.compiler.kernel_check import check_kernels
from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.formats import parse_format
from dsc.plugins.gpu_node import Arch
from dsc.runtime.steps import Collective, Kernel, Pointer

ARCHES = ("sm_80", "sm_90a", "sm_100a")
# Of R1 on eight ranks: q_b, o_proj, the shared expert's gate and down, a dense layer's gate and down. Rows, columns.
LINEAR = {
    "q_b": (3072, 1536),
    "o_proj": (7168, 2048),
    "shared gate": (256, 7168),
    "shared down": (7168, 256),
    "dense gate": (2304, 7168),
    "dense down": (7168, 2304),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_is_one_collective(dtype: torch.dtype) -> None:
    """In the dtype of the activations, from where x is to where y is."""
    compiler = CubinCompiler(Arch("sm_90a"))
    x = torch.empty(3, 7168, dtype=dtype, device="meta")
    (program,) = lower_gpu([node_program("AllReduce", {"x": x}, {"ranks": 8}, {"T": 512})], compiler)
    (variant,) = program.nodes[0].variants
    name = str(dtype).removeprefix("torch.")
    assert variant.steps == (Collective("all_reduce", "tensor", Pointer("x"), Pointer("y"), name, "T*7168"),)
    assert variant.guard == ""
    assert not compiler.built


@pytest.mark.parametrize("arch", ARCHES)
def test_logits_are_gathered_then_copied(arch: str) -> None:
    """16 bytes a thread at a time: R1's parts and vocabulary are whole lines."""
    compiler = CubinCompiler(Arch(arch))
    part = torch.empty(3, 16256, device="meta")
    attributes = {"ranks": 8, "vocabulary": 129280}
    (program,) = lower_gpu([node_program("GatherLogits", {"part": part}, attributes, {"R": 256})], compiler)
    check_kernels([program], compiler, {})
    ((gather, copy),) = (variant.steps for variant in program.nodes[0].variants)
    gathered = "gatherlogits/gathered"
    assert gather == Collective("all_gather", "tensor", Pointer("part"), Pointer(gathered), "float32", "R*16256")
    assert program.operands[gathered].bytes == 4 * 8 * 256 * 16256
    assert isinstance(copy, Kernel)
    assert copy.grid == ("R", 64, 1)
    assert copy.pdl == (arch != "sm_80")
    (built,) = compiler.built.values()
    moves = {name for name in mnemonics(built.cubin) if name.startswith(("LDG", "STG"))}
    assert moves
    assert all(".128" in name for name in moves)


def weights(name: str, format_: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    return {
        name if part == "data" else f"{name}.{part}": torch.empty(size, dtype=getattr(torch, dtype), device="meta")
        for part, (dtype, size) in parse_format(format_).parts(shape).items()
    }


@pytest.mark.parametrize("format_", ["fp8", "wint4:128"])
@pytest.mark.parametrize("part", LINEAR)
def test_parts_of_weights_have_kernels(part: str, format_: str) -> None:
    """On Hopper: none spills, each has its instruction."""
    rows, columns = LINEAR[part]
    x = torch.empty(3, columns, dtype=torch.bfloat16, device="meta")
    inputs = {"x": x, **weights("w", format_, (rows, columns))}
    compiler = CubinCompiler(Arch("sm_90a"))
    (program,) = lower_gpu([node_program("Linear", inputs, {"w_format": format_}, {"T": 512})], compiler)
    check_kernels([program], compiler, {})
    assert program.nodes[0].variants[-1].guard == ""


@pytest.mark.parametrize("format_", ["bf16", "fp8", "wint8", "wint4:128"])
@pytest.mark.parametrize("part", LINEAR)
def test_no_part_of_a_sum_is_empty(part: str, format_: str) -> None:
    """K is split into no more parts than it has steps, however few."""
    rows, columns = LINEAR[part]
    x = torch.empty(3, columns, dtype=torch.bfloat16, device="meta")
    inputs = {"x": x, **weights("w", format_, (rows, columns))}
    sources = Sources(Arch("sm_90a"))
    (program,) = lower_gpu([node_program("Linear", inputs, {"w_format": format_}, {"T": 8192})], sources)
    for variant in program.nodes[0].variants:
        for step in variant.steps:
            if not isinstance(step, Kernel) or step.entry not in ("linear", "sm90_many_tokens"):
                continue
            source = sources.by_name[step.cubin]
            facts = dict(source.constants) if step.entry == "linear" else dict(source.defines)
            step_columns = int(facts.get("BLOCK_K", 128))
            assert 1 <= int(facts["SPLITS"]) <= -(-columns // step_columns), (variant.guard, step)


@pytest.mark.parametrize(("format_", "many"), [("bf16", "gemm"), ("fp8", "linear"), ("wint4:128", "sm90_many_tokens")])
def test_a_part_of_the_head_has_kernels(format_: str, many: str) -> None:
    """Its rows are whole blocks of 128."""
    inputs = {
        "hidden": torch.empty(3, 7168, dtype=torch.bfloat16, device="meta"),
        "logit_rows": torch.empty(3, dtype=torch.int32, device="meta"),
        **weights("w", format_, (16256, 7168)),
    }
    compiler = CubinCompiler(Arch("sm_90a"))
    (program,) = lower_gpu([node_program("LmHead", inputs, {"w_format": format_}, {"R": 256, "T": 256})], compiler)
    check_kernels([program], compiler, {})
    last = program.nodes[0].variants[-1].steps[-1]
    assert (last.entry if isinstance(last, Kernel) else last.kind) == many
