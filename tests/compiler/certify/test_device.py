"""`dsc verify --device cuda` without a GPU: GPU programs cut into segments, their weights loaded one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.engines import TINY_R1, compile_tiny, compile_tiny_gpu
from support.pretend_gpu import pretend_gpu

from dsc.compiler.certify import reference
from dsc.compiler.certify.certify import verify_engine
from dsc.compiler.certify.device import open_device
from dsc.compiler.certify.gpu import tensors_of
from dsc.compiler.certify.segments import cut
from dsc.compiler.cli import main
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.cuda.backend import SPARE_BYTES, fixed_bytes
from dsc.runtime.errors import DscError
from dsc.runtime.program import Program
from dsc.runtime.steps import operands_in

PROGRAMS = ("main.prefill", "main.decode", "mtp.prefill")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("engines")
    return cache(lambda name: compile_tiny_gpu(f"tiny-r1-{name}", folder))


@pytest.fixture(scope="module")
def cpu_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny("tiny-r1-wint8", tmp_path_factory.mktemp("cpu"))


def touched(program: Program) -> set[str]:
    """Operands that the steps of all variants name."""
    return {name for node in program.nodes for variant in node.variants for name in operands_in(variant.steps)}


@pytest.mark.parametrize("format_", ["wint4", "fp8"])
def test_a_segment_has_all_that_its_steps_touch(format_: str, build: Callable[[str], Path]) -> None:
    folder = EngineFolder.open(build(format_))
    for name in PROGRAMS:
        program = folder.program(name)
        segments = [segment.program for segment in cut(program)]
        assert [node for segment in segments for node in segment.nodes] == list(program.nodes)
        for segment in segments:
            segment.check(segment.name)
            assert touched(segment) <= segment.operands.keys()
            assert segment.arena_bytes == program.arena_bytes
            nodes = {n for node in segment.nodes for n in (*node.inputs, *node.outputs) if n}
            beside = segment.operands.keys() - nodes
            assert {segment.operands[n].role for n in beside} <= {"scratch", "zeroed"}
            assert all(segment.operands[n] == program.operands[n] for n in beside)
        scratch = {n for n, operand in program.operands.items() if operand.role == "scratch"}
        assert scratch
        assert scratch & touched(program) == {n for s in segments for n in s.operands if n in scratch}


def test_layer_by_layer_with_one_segments_weights_at_a_time(
    build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a GPU engine without a GPU: loading, binding, handing over. So the numbers are the CPU's."""
    path = build("wint4")
    folder, windows = EngineFolder.open(path), {"windows": 3, "window_tokens": 200}
    on_cpu = verify_engine(path, str(TINY_R1), **windows)
    gpu = pretend_gpu(monkeypatch, folder)
    found = verify_engine(path, str(TINY_R1), device="cuda", **windows)
    assert (on_cpu.device, found.device) == ("cpu, layer by layer", "cuda, layer by layer")
    assert replace(found, device=on_cpu.device) == on_cpu
    segments = [segment for model in ("main", "mtp") for segment in cut(folder.program(f"{model}.prefill"))]
    assert gpu.bound == [segment.program.name for segment in segments]
    assert gpu.loaded == [set(tensors_of(segment.program)) for segment in segments]
    assert set.union(*gpu.loaded) == folder.manifest.tensors.keys()
    # Two steps of at most 512 tokens, layers from the engine's rows and from the reference's; heads 32 of 600 rows, the
    # most that a step has logits for.
    assert {segment.program.letters["R"] for segment in segments} == {32}
    assert len(gpu.steps) == sum(19 if s.is_head else 2 if s.layer is None else 4 for s in segments)
    assert min(gpu.steps) >= 1
    assert not gpu.running


def test_a_segment_larger_than_the_gpu_is_refused_first(
    build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = EngineFolder.open(build("wint4"))
    gpu = pretend_gpu(monkeypatch, folder)
    programs = [folder.program(name) for name in ("main.prefill", "mtp.prefill")]
    sizes = {
        s.program.name: sum(folder.manifest.tensors[n].bytes for n in tensors_of(s.program)) + fixed_bytes(s.program)
        for program in programs
        for s in cut(program)
    }
    need = max(sizes.values()) + max(program.arena_bytes for program in programs) + SPARE_BYTES
    gpu.free = need
    open_device(folder, "cuda")
    gpu.free = need - 1
    with pytest.raises(DscError) as raised:
        verify_engine(folder.path, str(TINY_R1), device="cuda")
    assert raised.value.what == f"{max(sizes, key=lambda name: sizes[name])} does not fit on the GPU"
    assert (raised.value.wanted, raised.value.got) == (f"{need:,} bytes", f"{need - 1:,} of {1 << 40:,} free")
    assert gpu.loaded == []


def test_weights_laid_out_for_kernels_are_run_there_alone(
    build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = EngineFolder.open(build("wint4"))
    entries = {name: replace(entry, layout="tiles") for name, entry in folder.manifest.tensors.items()}
    folder.manifest = replace(folder.manifest, tensors=entries)
    with pytest.raises(DscError) as raised:
        open_device(folder, None)
    assert (raised.value.got, raised.value.try_) == ("tiles", "dsc verify --device cuda")
    pretend_gpu(monkeypatch, folder)
    open_device(folder, "cuda")


def test_an_engine_of_the_cpu_has_no_kernels(cpu_engine: Path) -> None:
    result = CliRunner().invoke(main, ["verify", str(cpu_engine), "--device", "cuda"])
    assert result.exit_code == 2
    assert "an engine for cpu cannot run on cuda" in result.output


@pytest.mark.parametrize(("name", "told"), [("cuda", "needs a GPU"), ("tpu", "no such device")])
def test_a_device_that_is_not_there(
    name: str, told: str, build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name != "cuda")
    with pytest.raises(DscError, match=told):
        verify_engine(build("wint4"), str(TINY_R1), device=name)


def test_the_reference_never_multiplies_in_less_than_float32(cpu_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    within = set()
    call = reference._Reference._call

    def watched(self: reference._Reference, *arguments: object) -> tuple[torch.Tensor, ...]:
        within.add(torch.get_float32_matmul_precision())
        return call(self, *arguments)

    monkeypatch.setattr(reference._Reference, "_call", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        verify_engine(cpu_engine, windows=1, window_tokens=16)
        assert within == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
