"""What the CUDA backend has of an engine of two ranks, as far as no device is needed: its GPU, its part, its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pretend_gpu import move_on_cpu
from support.ranks import compile_ranks

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.cuda import backend as cuda_backend
from dsc.runtime.cuda import collectives, load
from dsc.runtime.cuda.backend import SPARE_BYTES, CudaBackend, device_of
from dsc.runtime.cuda.executor import CudaShared
from dsc.runtime.errors import DscError
from dsc.runtime.ranks.group import Group
from dsc.runtime.shards import Place, take
from dsc.runtime.weights import part_name

FORMATS = ("fp32", "wint4", "fp8")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EngineFolder]:
    """tiny-r1 on two ranks, as if for a GPU: the same weights and cuts."""
    made: dict[str, Path] = {}

    def engine(recipe: str) -> EngineFolder:
        if recipe not in made:
            made[recipe] = compile_ranks(recipe, 2, tmp_path_factory.mktemp("ranks"))
        folder = EngineFolder.open(made[recipe])
        folder.manifest = replace(folder.manifest, target="sm_90a")
        return folder

    return engine


def group_of(rank: int, local_rank: int | None = None) -> Group:
    local = rank if local_rank is None else local_rank
    return Group(rank, 2, local, "127.0.0.1", dist.HashStore(), lambda number: number)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two GPUs that are the CPU, as far as a backend asks while it loads."""
    asked = SimpleNamespace(free=1 << 40, devices=[], arenas=[], moved=0)

    class Shared(CudaShared):
        def __post_init__(self) -> None:
            self.num_sms = 132

    def find(folder: EngineFolder, name: str | None) -> torch.device:
        asked.devices.append(name)
        return torch.device("cpu")

    def reach(group: Group, device: torch.device, arena_bytes: int, where: str) -> Any:
        asked.arenas.append(arena_bytes)
        return SimpleNamespace(arena=torch.zeros(arena_bytes, dtype=torch.uint8), describe=lambda: "by pigeons")

    def move(pieces: list[Any], device: torch.device) -> None:
        asked.moved += sum(piece.bytes for piece in pieces)
        move_on_cpu(pieces, device)

    monkeypatch.setattr(load, "_move", move)
    monkeypatch.setattr(collectives, "Collectives", reach)
    monkeypatch.setattr(cuda_backend, "CudaShared", Shared)
    monkeypatch.setattr(cuda_backend, "find_device", find)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.free, 1 << 40))
    return asked


def rank_of(folder: EngineFolder, rank: int, cache_bytes: int = 0) -> CudaBackend:
    place = folder.manifest.parallel.place(rank)
    return CudaBackend(folder, None, None, cache_bytes, place=place, group=group_of(rank))


@pytest.mark.parametrize("recipe", FORMATS)
def test_ranks_load_their_parts(recipe: str, engines: Callable[[str], EngineFolder], gpu: SimpleNamespace) -> None:
    """Every operand's memory is what `take` gives of the stored tensor; what no rank cuts is on both of them."""
    folder = engines(recipe)
    held = []
    cut = set()
    for rank in range(2):
        gpu.moved = 0
        made = rank_of(folder, rank)
        programs = [folder.program(name, rank) for name in folder.manifest.graphs]
        weights = [o for p in programs for o in p.operands.values() if o.role == "weight"]
        place = folder.manifest.parallel.place(rank)
        for operand in weights:
            want = take(folder.tensor(operand.tensor), operand.cuts, place).contiguous()
            got = made._shared.weights[part_name(operand)]
            assert tuple(want.shape) == operand.shape, operand
            assert got.dtype == want.dtype
            assert torch.equal(got.view(torch.uint8), want.view(-1).view(torch.uint8)), operand
            cut |= {operand.tensor} if operand.cuts else set()
        names = {part_name(operand) for operand in weights}
        assert made._shared.weights.keys() == names
        held.append(sum(made._shared.weights[name].nbytes for name in names))
        assert made.resident_weight_bytes() == held[-1]
        assert made.describe()["gb"] == round(held[-1] / 1e9, 3)
        assert made.describe()["all_reduce"] == "by pigeons"
        assert gpu.moved < 1.6 * held[-1]  # rows of which half is another rank's are read whole
        assert gpu.arenas[-1] == max(program.arena_bytes for program in programs)
    tensors = folder.manifest.tensors
    whole, split = sum(t.bytes for t in tensors.values()), sum(tensors[name].bytes for name in cut)
    assert gpu.devices == ["cuda:0", "cuda:1"]
    assert split > whole / 2
    assert sum(held) == pytest.approx(2 * (whole - split) + split, rel=0.01)  # the vocabulary is padded


def test_memory_is_counted_for_the_rank(engines: Callable[[str], EngineFolder], gpu: SimpleNamespace) -> None:
    """What fits by the rank's part is loaded, and one byte less is refused before any is."""
    folder = engines("wint4")
    programs = [folder.program(name, 1) for name in folder.manifest.graphs]
    parts = cuda_backend.parts_of(programs, folder.manifest, Place(1, 2, 2))
    outside = [o.bytes for p in programs for o in p.operands.values() if o.role in ("input", "output") and not o.alias]
    gpu.free = (
        load.parts_bytes(parts.values()) + sum(outside) + max(p.arena_bytes for p in programs) + 1234 + SPARE_BYTES
    )
    assert rank_of(folder, 1, 1234).resident_weight_bytes() < sum(t.bytes for t in folder.manifest.tensors.values())
    gpu.free -= 1
    gpu.moved, gpu.arenas = 0, []
    with pytest.raises(DscError, match="the engine does not fit on the GPU"):
        rank_of(folder, 1, 1234)
    assert (gpu.moved, gpu.arenas) == (0, [])


def test_ranks_without_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the GPU of its number on its own machine."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of(group_of(0), None, "x.engine") == "cuda:0"
    assert device_of(group_of(1, 0), "cuda", "x.engine") == "cuda:0"  # of another machine
    with pytest.raises(DscError) as error:
        device_of(group_of(1), None, "x.engine")
    assert error.value.text() == (
        "x.engine: rank 1 of the engine has no GPU\n"
        "  wanted  a GPU for each of 2 ranks: cuda:1 for this one\n"
        "  got     1 on its machine\n"
        "  try     dsc compile --ranks 1"
    )
    with pytest.raises(DscError, match="every rank takes a GPU by its own number"):
        device_of(group_of(0), "cuda:1", "x.engine")
