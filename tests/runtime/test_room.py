"""An engine whose weights, steps and cache have no room on the device is refused with the numbers, before or after loading."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engines import compile_tiny

from dsc import runtime
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.cpu_backend import CpuBackend
from dsc.runtime.cuda import backend as cuda_backend
from dsc.runtime.cuda.backend import SPARE_BYTES, CudaBackend
from dsc.runtime.engine import Engine
from dsc.runtime.errors import DscError

BLOCK_TOKENS, BLOCKS_A_SEQUENCE = 64, 32  # of the tiny engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny("tiny-r1-fp32", tmp_path_factory.mktemp("room"))


class GpuOf:
    """A GPU of so many free bytes, as far as a backend asks before it loads anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.loads = 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
        monkeypatch.setattr(cuda_backend, "load_files", self._load)

    def _load(self, *_: object) -> None:
        self.loads += 1
        raise InterruptedError


def gpu_folder(path: Path) -> EngineFolder:
    engine = EngineFolder.open(path)
    engine.manifest = replace(engine.manifest, target="sm_90a")
    return engine


def weight_file_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path / "weights").iterdir())


def step_bytes(engine: EngineFolder) -> int:
    """The largest arena, and what every program has outside it."""
    programs = [engine.program(name) for name in engine.manifest.graphs]
    outside = [o.bytes for p in programs for o in p.operands.values() if o.role in ("input", "output") and not o.alias]
    return max(program.arena_bytes for program in programs) + sum(outside)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    engine, weights, cache = gpu_folder(folder), weight_file_bytes(folder), 12345
    need = weights + step_bytes(engine) + cache + SPARE_BYTES
    gpu = GpuOf(monkeypatch, need)
    with pytest.raises(InterruptedError):
        CudaBackend(engine, None, None, cache)
    with pytest.raises(DscError) as error:
        CudaBackend(engine, None, need - 1, cache)  # of what is free
    assert f"{need - 1:,} bytes to take, {need:,} of {1 << 40:,} free" in error.value.got
    GpuOf(monkeypatch, need - 1)
    with pytest.raises(DscError) as error:
        CudaBackend(engine, None, None, cache)
    assert (error.value.what, error.value.where) == ("the engine does not fit on the GPU", str(folder))
    assert error.value.details == (
        ("weights", f"{weights:,} bytes"),
        ("steps", f"{step_bytes(engine):,} bytes"),
        ("cache", "12,345 bytes at least"),
    )
    assert error.value.wanted == f"{need:,} bytes"
    assert error.value.got == f"{need - 1:,} bytes to take, {need - 1:,} of {1 << 40:,} free"
    assert gpu.loads == 1


@pytest.mark.parametrize(("cache_tokens", "blocks"), [(None, BLOCKS_A_SEQUENCE), (300, 5)])
def test_a_load_tells_the_backend_what_the_cache_needs(
    folder: Path, cache_tokens: int | None, blocks: int, monkeypatch: pytest.MonkeyPatch
):
    """So that a cache without room is refused before minutes of loading."""
    told = []

    def make(
        folder: EngineFolder, device: str | None, gpu_memory: float | None, least_cache_bytes: int, **_
    ) -> CpuBackend:
        told.append(least_cache_bytes)
        return CpuBackend(folder, device)

    monkeypatch.setattr("dsc.runtime.engine.make_backend", make)
    engine = runtime.load(folder, cache_tokens=cache_tokens)
    layers = sum(len(model.layers) for model in engine.manifest.models.values())
    assert told == [blocks * engine.manifest.kv_cache.block_bytes * layers]


class FullGpu(CpuBackend):
    """The CPU's backend, named a GPU, with so many bytes left for the cache."""

    def __init__(self, folder: EngineFolder, free: int) -> None:
        super().__init__(folder, None)
        self.free, self.device = free, torch.device("cuda")

    def cache_bytes(self) -> int:
        return self.free


@pytest.mark.parametrize(
    ("cache_tokens", "blocks", "asked"),
    [
        (None, BLOCKS_A_SEQUENCE, "one sequence of 2,048 tokens"),
        (33, 1, "cache_tokens 33"),
        (300, 5, "cache_tokens 300"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(folder: Path, cache_tokens: int | None, blocks: int, asked: str):
    engine = EngineFolder.open(folder)
    layers = sum(len(model.layers) for model in engine.manifest.models.values())
    block = engine.manifest.kv_cache.block_bytes * layers
    backend = FullGpu(engine, blocks * block - 1)
    with pytest.raises(DscError) as error:
        Engine(engine, backend, cache_tokens)
    assert error.value.where == str(folder)
    assert error.value.details == (
        ("weights", f"{backend.resident_weight_bytes():,} bytes"),
        ("cache", f"{blocks * block:,} bytes: {asked}"),
    )
    assert error.value.got == f"{blocks * block - 1:,} bytes free for it beside the weights"
    fitting = BLOCK_TOKENS * (blocks - 1)
    assert error.value.try_ == (f"cache_tokens {fitting}" if fitting else "a recipe with fewer bits, or more memory")


def test_memory_that_a_cpu_lacks_it_may_swap(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CpuBackend, "cache_bytes", lambda backend: 1)
    assert runtime.load(folder, cache_tokens=65).cache.capacity_tokens == 128
    with pytest.raises(DscError, match="weights and cache do not fit together"):
        runtime.load(folder)
