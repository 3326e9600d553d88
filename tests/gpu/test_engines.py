"""tiny-r1 on a GPU against the CPU engine of the same recipe: the same weights, other kernels."""

import gc
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.engines import compile_tiny, compile_tiny_gpu, gpu_engine
from support.top_1 import check_top_1

from dsc import runtime
from dsc.compiler.targets import TARGETS, GpuTarget
from dsc.runtime.sampling import SamplingParams

pytestmark = pytest.mark.gpu

FORMATS = ("fp32", "bf16", "fp8", "wint8", "wint4")
PROMPTS = ("def ", "import ", "class Fraction", "The statistics module", "    return", "for i in range(", ".. function:: ",
           "try:\n    ", "while True:\n", "print(", "@property\n", "This module provides", "raise ValueError", "# ",
           "x = [", "from collections import")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def test_fp32_greedy_tokens(folder: Path) -> None:
    cpu, gpu = runtime.load(compile_tiny("tiny-r1-fp32", folder)), gpu_engine("tiny-r1-fp32", folder)
    options = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    wanted = [o.token_ids for o in cpu.generate(PROMPTS, drafts=0, **options)]
    assert [o.token_ids for o in gpu.generate(PROMPTS, drafts=0, **options)] == wanted
    assert [o.token_ids for o in gpu.generate(PROMPTS, drafts=1, **options)] == wanted
    for graph, executed in gpu.executed.items():
        assert executed == tuple(node["node"] for node in gpu.report["nodes"][graph]), graph


def test_sampled_tokens_are_the_cpu_engines(folder: Path) -> None:
    """In float32 the logits are so near that every draw falls on the same token, whatever narrows it."""
    cpu, gpu = runtime.load(compile_tiny("tiny-r1-fp32", folder)), gpu_engine("tiny-r1-fp32", folder)
    narrowed = (
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05, "repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
    )
    params = [
        SamplingParams(max_tokens=48, temperature=0.7 + seed / 20, seed=seed, ignore_eos=True, drafts=0,
                       **narrowed[seed % len(narrowed)])
        for seed in range(len(PROMPTS))
    ]  # fmt: skip
    wanted = [o.token_ids for o in cpu.generate(PROMPTS, params)]
    assert [o.token_ids for o in gpu.generate(PROMPTS, params)] == wanted
    assert [o.token_ids for o in gpu.generate(PROMPTS[:3], params[:3])] == wanted[:3]  # whatever runs beside them
    assert len({tuple(ids) for ids in wanted}) == len(wanted)


def test_a_deleted_engine_gives_its_memory_back(folder: Path) -> None:
    """Without waiting for Python's cycle collector: the next engine wants all of it. An engine takes over 400 MB; what
    torch keeps for cuBLAS are 32 MiB for the stream of each."""
    path, free = compile_tiny_gpu("tiny-r1-wint4", folder), []
    gc.disable()
    try:
        for _ in range(3):
            engine = runtime.load(path)
            engine.generate(PROMPTS[:4], max_tokens=8, seed=0)
            del engine
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
    finally:
        gc.enable()
    assert all(before - after < 40 << 20 for before, after in pairwise(free)), free


def test_memory_is_what_was_planned(folder: Path) -> None:
    """Weights, the largest arena, what lies outside it and the cache; the largest steps add cuBLAS's workspaces, and
    repeated ones nothing."""
    path = compile_tiny_gpu("tiny-r1-wint4", folder)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = runtime.load(path, cache_tokens=16 * 512)
    programs = [executor.program for executor in engine.programs.values()]
    outside = sum(
        o.bytes
        for p in programs
        for o in p.operands.values()
        if o.role in ("input", "output", "zeroed") and not o.alias
    )
    weights = sum(file.stat().st_size for file in (path / "weights").iterdir())
    planned = weights + max(p.arena_bytes for p in programs) + outside + engine.cache.nbytes
    held = torch.cuda.memory_allocated() - before
    shared = outside // 2  # programs of one step lie in each other's inputs and outputs
    assert planned - shared <= held < planned + (1 << 20), (planned, held)
    peaks = []
    for start in (2, 3):
        torch.cuda.reset_peak_memory_stats()
        engine.generate(PROMPTS, max_tokens=24, seed=0)  # steps of 16 as CUDA graphs
        longest = range(start, start + engine.manifest.limits.batch_tokens)  # one step of prefill
        engine.generate([list(longest)], max_tokens=1, seed=0)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < held + (80 << 20), (held, peaks)
    assert peaks[1] <= peaks[0] + (1 << 20), peaks


@pytest.mark.parametrize("name", FORMATS)
def test_top_1_where_the_gap_is_wide(name: str, folder: Path) -> None:
    check_top_1(name, runtime.load(compile_tiny(f"tiny-r1-{name}", folder)), gpu_engine(f"tiny-r1-{name}", folder))


@pytest.mark.parametrize("name", ["wint8", "wint4"])
def test_an_engine_of_ampere_sources(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine as `target: sm_80` makes it, its sources, tiles and splits, compiled for this chip."""
    from support.gpu import hopper_compiler

    class Ampere(GpuTarget):
        def __init__(self, name: str, allow_kernels: Mapping[str, str]) -> None:
            super().__init__("sm_80", allow_kernels)
            self._compiler = hopper_compiler("sm_80")

    monkeypatch.setitem(TARGETS, "sm_90a", Ampere)
    engine = gpu_engine(f"tiny-r1-{name}", tmp_path)
    assert not any(kernel["entry"].startswith("sm90") for kernel in engine.report["kernels"])
    check_top_1(name, runtime.load(compile_tiny(f"tiny-r1-{name}", tmp_path)), engine)
