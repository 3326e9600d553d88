"""Kernels of Qkv and MlaAttention compiled without a GPU: nothing spills, tensor cores are used, sm_80 has no FP8 in it."""

from __future__ import annotations

import pytest
import torch
from support.gpu import node_program

from dsc.compiler.codegen import Built, CubinCompiler
from dsc.compiler.cubin import instructions, mnemonics
from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.formats import parse_format
from dsc.plugins.gpu_node import Arch
from dsc.plugins.mla_attention import sm90_mla_prefill
from dsc.runtime.program import ProgramNode
from dsc.runtime.steps import Kernel, Repeat, Step

TENSOR_CORES = {"sm_80": "HMMA", "sm_90a": "HGMMA", "sm_100a": "UTCHMMA"}
FP8_INSTRUCTIONS = {"QGMMA", "QMMA", "UTCQMMA"}
PREFILL = {"mla_prefill", "sm90_mla_prefill"}


def lowered(
    op: str, inputs: dict[str, torch.Tensor], attributes: dict[str, object], arch: str, bounds: dict[str, int]
) -> tuple[ProgramNode, dict[str, list[Built]]]:
    """The node with its variants, and its kernels by entry."""
    compiler = CubinCompiler(Arch(arch))
    (program,) = lower_gpu([node_program(op, inputs, attributes, bounds)], compiler)
    kernels: dict[str, list[Built]] = {}
    for built in compiler.built.values():
        kernels.setdefault(built.compiled.entry, []).append(built)
        assert built.resources.stack_bytes == 0, (built.compiled, built.resources)
        used = instructions(built.cubin)
        assert arch != "sm_80" or not used & FP8_INSTRUCTIONS, (built.compiled, used)
    return program.nodes[0], kernels


def empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def weight(name: str, format_: str, *shape: int) -> dict[str, torch.Tensor]:
    parts = parse_format(format_).parts(shape)
    return {name if part == "data" else f"{name}.{part}": empty(dtype, *size) for part, (dtype, size) in parts.items()}


def attention(
    arch: str,
    mode: str = "absorbed",
    *,
    heads: int = 16,
    dtype: str = "bfloat16",
    format_: str = "bf16",
    tokens: int = 256,
    block_tokens: int = 64,
    nope: int = 128,
) -> tuple[ProgramNode, dict[str, list[Built]]]:
    block_bytes = block_tokens * 576 * (2 if dtype == "bfloat16" else 4)
    inputs = {
        "q": empty(dtype, 4, heads * (nope + 64)),
        **weight("kv_b", format_, heads * 2 * nope, 512),
        "cos": empty("float32", 4096, 32),
        "sin": empty("float32", 4096, 32),
        "positions": empty("int32", 4),
        "query_starts": empty("int32", 4),
        "sequence_lengths": empty("int32", 3),
        "block_table": empty("int32", 3, 64),
        "cache": empty("uint8", 100, block_bytes),
    }
    attributes = {"heads": heads, "nope": nope, "rope": 64, "v": nope, "latent_dim": 512, "scale": 0.135, "mode": mode}
    attributes |= {"cache_dtype": dtype, "kv_b_format": format_}
    attributes |= {"block_tokens": block_tokens, "block_bytes": block_bytes}
    return lowered("MlaAttention", inputs, attributes, arch, {"T": tokens, "B": 256, "P": 512})


def entries(steps: tuple[Step, ...]) -> list[str]:
    return [
        name
        for step in steps
        for name in (
            entries(step.steps) if isinstance(step, Repeat) else [step.entry] if isinstance(step, Kernel) else []
        )
    ]


@pytest.mark.parametrize(("arch", "attend"), [("sm_80", "mla_attend"), ("sm_100a", "mla_attend"), ("sm_90a", "")])
def test_absorbed_attention_compiles(arch: str, attend: str) -> None:
    node, kernels = attention(arch)
    attend = attend or "sm90_mla_decode"
    (built,) = kernels[attend]
    assert TENSOR_CORES[arch] in instructions(built.cubin)
    assert [variant.guard for variant in node.variants] == ["T <= 4 and B <= 16", "T <= 16 and B <= 16", ""]
    for variant in node.variants:
        names = entries(variant.steps)
        assert names[:2] == ["mla_queries", attend]
        assert len(names) == 3


@pytest.mark.parametrize("format_", ["fp8", "wint8", "wint4:128", "wint4:32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_format_of_kv_b_compiles(arch: str, format_: str) -> None:
    attention(arch, format_=format_)


def test_other_blocks_do_without_the_hopper_kernel() -> None:
    _, kernels = attention("sm_90a", block_tokens=16)
    (built,) = kernels["mla_attend"]
    assert "HGMMA" in instructions(built.cubin)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_float32_stays_float32(arch: str) -> None:
    """No tensor core, whose float32 mode is tf32; and every length is attended absorbed."""
    _, kernels = attention(arch, "expanded", dtype="float32", format_="fp32", tokens=4096)
    for built in (one for several in kernels.values() for one in several):
        assert not {name for name in instructions(built.cubin) if "MMA" in name}, built.compiled
    assert not PREFILL & set(kernels)


@pytest.mark.parametrize(
    ("arch", "attend"), [("sm_80", "mla_prefill"), ("sm_90a", "sm90_mla_prefill"), ("sm_100a", "mla_prefill")]
)
def test_expanded_attention_compiles(arch: str, attend: str) -> None:
    node, kernels = attention(arch, "expanded", tokens=8192, format_="fp8")
    for name in ("mla_expand", attend):
        (built,) = kernels[name]
        assert TENSOR_CORES[arch] in instructions(built.cubin)
    assert PREFILL & set(kernels) == {attend}
    assert [variant.guard for variant in node.variants] == [
        "T <= 4 and B <= 16",
        "T <= 16 and B <= 16",
        "T <= 192",
        "",
    ]
    assert [attend in entries(variant.steps) for variant in node.variants] == [False, False, False, True]


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("mode", ["absorbed", "expanded"])
def test_heads_of_a_rank_go_the_way_of_all(mode: str, heads: int) -> None:
    """Of R1 on two, four and eight ranks of Hopper: the kernels of its 128 heads, at the same sizes of step."""
    node, kernels = attention("sm_90a", mode, heads=heads, tokens=8192)
    whole, _ = attention("sm_90a", mode, heads=128, tokens=8192)
    assert [(v.guard, entries(v.steps)) for v in node.variants] == [(v.guard, entries(v.steps)) for v in whole.variants]
    assert len(kernels["sm90_mla_decode"]) == 1
    assert ("sm90_mla_prefill" in kernels) == (mode == "expanded")
    assert not {"mla_attend", "mla_prefill"} & set(kernels)


@pytest.mark.parametrize("heads", [4, 16, 128])
def test_tiles_of_expanded_attention_on_hopper(heads: int) -> None:
    """Scores of 80 keys and sums of 128 columns, for 64 queries a warpgroup."""
    node, kernels = attention("sm_90a", "expanded", heads=heads, tokens=8192)
    (built,) = kernels["sm90_mla_prefill"]
    products = {name for name in mnemonics(built.cubin) if "GMMA" in name}
    assert products == {"HGMMA.64x80x16.F32.BF16", "HGMMA.64x128x16.F32.BF16"}
    assert entries(node.variants[-1].steps)[-3:] == ["mla_contexts", "mla_expand", "sm90_mla_prefill"]


@pytest.mark.parametrize("changed", ["architecture", "widths", "patched"])
def test_triton_attends_elsewhere_on_hopper(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if changed == "patched":  # as tests/gpu does, to run it at these widths too
        monkeypatch.setattr(sm90_mla_prefill, "applies", lambda node: False)
    arch, nope = "sm_90" if changed == "architecture" else "sm_90a", 64 if changed == "widths" else 128
    node, kernels = attention(arch, "expanded", tokens=8192, nope=nope)
    assert PREFILL & set(kernels) == {"mla_prefill"}
    assert "HGMMA" in instructions(kernels["mla_prefill"][0].cubin)
    assert entries(node.variants[-1].steps)[-3:] == ["mla_contexts", "mla_expand", "mla_prefill"]


@pytest.mark.parametrize(("q_lora", "joint"), [(1536, 1), (0, 1), (1536, 0), (0, 0)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_qkv_compiles(arch: str, q_lora: int, joint: int) -> None:
    width = q_lora or 16 * 192
    inputs = {
        "x": empty("bfloat16", 4, 512),
        **weight("w", "bf16", width + joint * 576, 512),
        "kv_norm": empty("float32", 512),
        "cos": empty("float32", 4096, 32),
        "sin": empty("float32", 4096, 32),
        "positions": empty("int32", 4),
        "slots": empty("int32", 4),
        "cache": empty("uint8", 100, 64 * 1152),
    }
    if q_lora:
        inputs["q_norm"] = empty("float32", q_lora)
    if not joint:
        inputs |= weight("w_kv", "wint8", 576, 512)
    attributes = {"q_width": width, "q_lora": q_lora, "heads": 16, "nope": 128, "latent": 512, "rope": 64}
    attributes |= {"epsilon": 1e-6, "cache_dtype": "bfloat16", "block_tokens": 64, "block_bytes": 64 * 1152}
    attributes |= {"joint": joint, "w_format": "bf16", "w_kv_format": "bf16" if joint else "wint8"}
    node, kernels = lowered("Qkv", inputs, attributes, arch, {"T": 1024})
    assert len(kernels["qkv_rows"]) == 1
    assert node.variants[-1].guard == ""
    assert all(entries(variant.steps)[-1] == "qkv_rows" for variant in node.variants)
