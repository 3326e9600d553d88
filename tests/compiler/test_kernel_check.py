"""A kernel that spills or misses its architecture's instruction fails the build, unless the recipe names it and says why."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from support import planted_kernels
from support.engines import ROOT
from support.gpu import node_program

from dsc.compiler.crosscompile import Dot, dots_of
from dsc.compiler.kernel_check import wanted_by
from dsc.compiler.recipe import load_recipe, parse_recipe, recipe_from_json
from dsc.compiler.targets import Lowered, make_target
from dsc.plugins.gpu_node import Arch, CudaSource, GpuNode
from dsc.plugins.swiglu import kernel
from dsc.runtime.errors import DscError, DscErrors
from dsc.runtime.program import Program
from dsc.runtime.steps import Kernel, Variant


def spill(node: GpuNode, block: int) -> Kernel:
    arguments = {"gate": node.at("gate"), "y": node.at("y"), "BLOCK": block}
    return node.triton(planted_kernels.planted_spill, (1,), arguments, num_warps=1)


def dot(node: GpuNode, rows: int, warps: int) -> Kernel:
    arguments = {"gate": node.at("gate"), "y": node.at("y"), "ROWS": rows}
    return node.triton(planted_kernels.planted_dot, (1,), arguments, num_warps=warps)


def build(
    steps: object, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a", allow: dict[str, str] | None = None
) -> tuple[object, list[Program]]:
    """A Swiglu node that is lowered to `steps(node)`, prepared as a build prepares it."""
    monkeypatch.setattr(kernel, "lower", lambda node: (Variant(tuple(steps(node))),))
    values = torch.empty(64, 64, dtype=torch.bfloat16)
    programs = [node_program("Swiglu", {"gate": values, "up": values}, {}, {})]
    target = make_target(arch, allow or {})
    target.prepare(programs)
    return target, programs


def refused(*args: object, **options: object) -> str:
    with pytest.raises(DscError) as caught:
        build(*args, **options)
    return str(caught.value)


def test_a_kernel_that_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(lambda node: [spill(node, 16384)], monkeypatch)
    head, *lines = said.splitlines()
    assert head == "Swiglu: kernel planted_spill spills to local memory"
    told = dict(line.strip().split(maxsplit=1) for line in lines)
    assert (told["op"], told["node"]) == ("dsc.Swiglu", "swiglu")
    assert told["cubin"].startswith("kernels/sm90_planted_spill-")
    assert told["wanted"] == "0 bytes of stack a thread"
    assert re.fullmatch(r"[1-9]\d*, at \d+ registers", told["got"])
    assert told["try"].endswith("or, in the recipe, allow_kernels: {planted_spill: why}")


def test_the_same_kernel_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    build(lambda node: [spill(node, 1024)], monkeypatch)


def test_a_kernel_that_misses_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warps are no warpgroup: the product of 64 rows becomes mma.sync."""
    said = refused(lambda node: [dot(node, 64, 2)], monkeypatch)
    assert said.splitlines()[0] == "Swiglu: kernel planted_dot misses its instruction on sm_90a"
    assert "  wanted  HGMMA for its product of 64 x 64 in bf16\n  got     HMMA\n" in said
    assert "allow_kernels: {planted_dot: why}" in said


@pytest.mark.parametrize(("rows", "warps"), [(64, 4), (32, 2)])
def test_products_that_have_theirs(rows: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    build(lambda node: [dot(node, rows, warps)], monkeypatch)


def test_instructions_in_a_header_are_asked_for_too() -> None:
    source = CudaSource("dsc.plugins.moe.kernel", "few_tokens.cu", "few_gate_up", ())
    assert "mma.sync" not in (files("dsc.plugins.moe") / "few_tokens.cu").read_text()
    assert dots_of(source, Arch("sm_90a")) == (Dot(0, 0, "mma.sync"),)


def test_before_hopper_mma_is_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    build(lambda node: [dot(node, 64, 2)], monkeypatch, arch="sm_80")


def test_all_faults_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DscErrors, match="kernels for sm_90a: 2 faults"):
        build(lambda node: [spill(node, 16384), dot(node, 64, 2)], monkeypatch)


def test_what_the_recipe_allows_is_in_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allow = {"planted_spill": "measured: faster so", "planted_dot": "a test"}
    target, programs = build(lambda node: [spill(node, 16384), dot(node, 64, 2)], monkeypatch, allow=allow)
    done: Lowered = target.finish(programs, tmp_path)
    found = {record["entry"]: record for record in done.kernels}
    assert {name: record["allowed"] for name, record in found.items()} == allow
    assert found["planted_spill"]["stack_bytes"] > 0
    assert found["planted_dot"]["tensor_cores"] == ["HMMA"]
    assert {(tmp_path / record["cubin"]).is_file() for record in done.kernels} == {True}


def test_an_allowance_that_nothing_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(lambda node: [dot(node, 64, 4)], monkeypatch, allow={"planted_dot": "a test"})
    assert said.splitlines()[0] == "kernel planted_dot needs no allowance on sm_90a"
    assert "take it out" in said


def test_fp8_where_there_is_none_is_never_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An sm_80 engine's kernel that was, by mistake, compiled with FP8 conversions: here, for another chip."""
    from dsc.compiler.codegen import CubinCompiler
    from dsc.compiler.kernel_check import check_kernels
    from dsc.compiler.lower_gpu import lower_gpu
    from dsc.plugins.triton_activations import quantize

    def lower(node: GpuNode) -> tuple[Variant, ...]:
        steps, _, _ = quantize(node, node.at("gate"), 256, "T", ue8m0=False, rows=None, name="gate")
        return (Variant(steps),)

    monkeypatch.setattr(kernel, "lower", lower)
    values = torch.empty(4, 256, dtype=torch.bfloat16)
    wrong = CubinCompiler(Arch("sm_90a"))
    lowered = lower_gpu([node_program("Swiglu", {"gate": values, "up": values}, {}, {})], wrong)
    check_kernels(lowered, wrong, {})  # on Hopper they are as they should be
    wrong.arch, wrong.chip = Arch("sm_80"), Arch("sm_90a")
    with pytest.raises(DscError, match="kernel quantize_rows holds FP8 instructions") as caught:
        check_kernels(lowered, wrong, {"quantize_rows": "no reason is good enough"})
    assert "none on sm_80, which has no FP8" in str(caught.value)
    assert "F2FP.SATFINITE.E4M3" in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "dot", "wanted"),
    [
        ("sm_80", Dot(128, 128, "bf16"), ("HMMA",)),
        ("sm_80", Dot(16, 64, "i8"), ("IMMA",)),
        ("sm_90a", Dot(64, 16, "bf16"), ("HGMMA",)),
        ("sm_90a", Dot(64, 8, "bf16"), ("HMMA",)),
        ("sm_90a", Dot(16, 64, "bf16"), ("HMMA",)),
        ("sm_90a", Dot(128, 64, "f8E4M3FN"), ("QGMMA",)),
        ("sm_90a", Dot(64, 64, "i8"), ("IGMMA",)),
        ("sm_90a", Dot(64, 64, "f32"), ()),
        ("sm_90a", Dot(0, 0, "wgmma.mma_async"), ("HGMMA", "QGMMA", "IGMMA")),
        ("sm_90a", Dot(0, 0, "mma.sync"), ("HMMA", "IMMA", "QMMA")),
        ("sm_100a", Dot(64, 16, "bf16"), ("UTCHMMA",)),
        ("sm_100a", Dot(64, 8, "bf16"), ("HMMA",)),
        ("sm_100a", Dot(128, 64, "f8E4M3FN"), ("UTCQMMA",)),
    ],
)
def test_the_rule(arch: str, dot: Dot, wanted: tuple[str, ...]) -> None:
    assert wanted_by(dot, Arch(arch)) == wanted


def test_the_recipe_names_kernels_and_reasons() -> None:
    text = (ROOT / "recipes" / "tiny-r1-wint4.yaml").read_text()
    recipe = parse_recipe(text + "allow_kernels: {linear: 'a spill of 8 bytes'}\n", where="mine.yaml", name="mine")
    assert recipe.allow_kernels == {"linear": "a spill of 8 bytes"}
    assert recipe_from_json(recipe.to_json(), "manifest.json").allow_kernels == recipe.allow_kernels
    assert load_recipe("tiny-r1-wint4").allow_kernels == {}
    with pytest.raises(DscError, match=r"allow_kernels\.linear does not fit"):
        parse_recipe(text + "allow_kernels: {linear: 1}\n", where="mine.yaml", name="mine")
