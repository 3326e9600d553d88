"""An engine on one GPU: weights and caches on the device, programs as kernels, decode steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.backends import Runner
from dsc.runtime.cuda.ahead import RunAhead
from dsc.runtime.cuda.executor import CudaExecutor, CudaShared
from dsc.runtime.cuda.load import Loaded, load_files, load_parts, parts_bytes
from dsc.runtime.cuda.parts import Part
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import Manifest
from dsc.runtime.program import Program
from dsc.runtime.ranks.group import Group
from dsc.runtime.shards import ALONE, Place
from dsc.runtime.steps import Gemm, Step, kernels_in
from dsc.runtime.weights import part_name

SPARE_BYTES = 1 << 30  # left to the driver, CUDA graphs and cuBLAS
SCALED_CUDA = (12, 9)  # the first whose cuBLAS multiplies e4m3 by scales of groups and blocks


class CudaBackend:
    """See `dsc.runtime.backends.Backend`."""

    def __init__(
        self,
        folder: EngineFolder,
        device: str | None,
        gpu_memory: float | None = None,
        least_cache_bytes: int = 0,
        *,
        place: Place = ALONE,
        group: Group | None = None,
    ) -> None:
        self.device = find_device(folder, device if group is None else device_of(group, device, str(folder.path)))
        self._folder = folder
        torch.cuda.empty_cache()  # what an engine deleted before has left to torch is free too
        free, _ = torch.cuda.mem_get_info(self.device)
        self._floor = 0 if gpu_memory is None else max(0, free - round(gpu_memory))  # bytes that stay free
        manifest = folder.manifest
        self._programs = {name: folder.program(name, place.rank) for name in manifest.graphs}
        check_cublas(self._programs.values(), str(folder.path))
        self._buckets = manifest.decode_buckets
        if group is None:
            weights = self._load_whole(least_cache_bytes)
            arena = torch.empty(self._arena_bytes(), dtype=torch.uint8, device=self.device)
            self._shared = CudaShared(self.device, weights, folder, arena)
        else:
            self._shared = self._join(group, place, least_cache_bytes)

    def _load_whole(self, cache_bytes: int) -> dict[str, torch.Tensor]:
        """All weights, whole files as blocks."""
        path, tensors = self._folder.path, self._folder.manifest.tensors
        files = sorted({entry.file for entry in tensors.values()})
        self._check_memory(sum((path / name).stat().st_size for name in files), cache_bytes)
        loaded = load_files(path, files, self.device)
        self._weight_bytes = sum(entry.bytes for entry in tensors.values())
        self._loaded = _loading(loaded)
        return {
            name: loaded.tensors[entry.file][entry.offset : entry.offset + entry.bytes].view(
                getattr(torch, entry.dtype)
            )
            for name, entry in tensors.items()
        }

    def _join(self, group: Group, place: Place, cache_bytes: int) -> CudaShared:
        """The rank's part of the weights, and its way to the other ranks."""
        from dsc.runtime.cuda.collectives import Collectives

        torch.cuda.set_device(self.device)  # NCCL and drivers' calls take the current one
        path = self._folder.path
        parts = parts_of(self._programs.values(), self._folder.manifest, place)
        self._check_memory(parts_bytes(parts.values()), cache_bytes)
        collectives = Collectives(group, self.device, self._arena_bytes(), str(path))
        loaded = load_parts(path, parts, self.device)
        self._weight_bytes = loaded.num_bytes
        self._loaded = {**_loading(loaded), "all_reduce": collectives.describe()}
        shared = CudaShared(self.device, loaded.tensors, self._folder, collectives.arena, collectives)
        self._load_kernels(shared)
        return shared

    def _load_kernels(self, shared: CudaShared) -> None:
        """All of them: one that is loaded in a step may wait for a kernel that waits for a rank, which then cannot be freed."""
        kernels = kernels_in(_steps(self._programs.values()))
        for cubin, entry, shared_bytes in sorted({(k.cubin, k.entry, k.shared_bytes) for k in kernels}):
            shared.library(cubin).function(entry, shared_bytes)

    def _arena_bytes(self) -> int:
        return max(1, *(program.arena_bytes for program in self._programs.values()))

    def _check_memory(self, weight_bytes: int, cache_bytes: int) -> None:
        fixed = self._arena_bytes() + sum(fixed_bytes(program) for program in self._programs.values())
        free, total = torch.cuda.mem_get_info(self.device)
        may_take = free - self._floor
        need = weight_bytes + fixed + cache_bytes + SPARE_BYTES
        if need > may_take:
            raise DscError(
                "the engine does not fit on the GPU",
                where=str(self._folder.path),
                details=[
                    ("weights", f"{weight_bytes:,} bytes"),
                    ("steps", f"{fixed:,} bytes"),
                    ("cache", f"{cache_bytes:,} bytes at least"),
                ],
                wanted=f"{need:,} bytes",
                got=f"{may_take:,} bytes to take, {free:,} of {total:,} free",
                try_="a smaller cache, smaller limits, a recipe with fewer bits, or a GPU that nobody else uses",
            )

    def program(self, name: str) -> CudaExecutor:
        """The executor of one graph."""
        program = self._programs[name]
        return CudaExecutor(program, self._shared, self._buckets if name.endswith(".decode") else ())

    def bind(self, program: Program) -> CudaExecutor:
        """The executor of any program over the engine's weights; its arena is no larger than the engine's."""
        return CudaExecutor(program, self._shared)

    def cache_bytes(self) -> int:
        """Device memory that the cache may take: what is left, less a spare."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(0, free - self._floor - SPARE_BYTES)

    def resident_weight_bytes(self) -> int:
        """Bytes of the rank's weights, which lie on the device."""
        return self._weight_bytes

    def run_ahead(self, programs: Mapping[str, Runner]) -> RunAhead | None:
        """Decode, sample and advance in one CUDA graph."""
        if not self._buckets or "advance" not in programs:
            return None
        return RunAhead(*(cast(CudaExecutor, programs[name]) for name in ("main.decode", "sample", "advance")))

    def describe(self) -> dict[str, Any]:
        """How loading went: GB, seconds, GB a second; of several ranks, how they add up what each has. For `dsc generate`,
        `dsc bench` and logs."""
        return dict(self._loaded)


def check_cublas(programs: Iterable[Program], where: str) -> None:
    """Raise DscError where a program has gemms with scales and torch's cuBLAS is older than those are."""
    if not any(isinstance(step, Gemm) and step.a_scales is not None for step in _steps(programs)):
        return
    version = torch.version.cuda or "none"
    if [int(part) for part in version.split(".") if part.isdigit()] < [*SCALED_CUDA]:
        raise DscError(
            "the engine multiplies FP8 by cuBLAS, which this torch has an older one of",
            where=where,
            wanted=f"torch for CUDA {SCALED_CUDA[0]}.{SCALED_CUDA[1]} or later",
            got=f"torch {torch.__version__}, CUDA {version}",
            try_="a torch that is built for it",
        )


def _steps(programs: Iterable[Program]) -> list[Step]:
    """Of all variants of all nodes."""
    return [s for p in programs for node in p.nodes for variant in node.variants for s in variant.steps]


def parts_of(programs: Iterable[Program], manifest: Manifest, place: Place) -> dict[str, Part]:
    """What a rank has of every stored tensor that its programs read, by `part_name`."""
    weights = (o for program in programs for o in program.operands.values() if o.role == "weight")
    return {part_name(o): Part(manifest.tensors[o.tensor], o.cuts, place) for o in weights}


def _loading(loaded: Loaded) -> dict[str, Any]:
    return {
        "gb": round(loaded.num_bytes / 1e9, 3),
        "gb_per_s": round(loaded.gb_per_s, 2),
        "load_seconds": round(loaded.seconds, 2),
    }


def fixed_bytes(program: Program) -> int:
    """Device memory that a program has for itself, outside the arena: inputs, outputs, what its kernels leave zero."""
    return sum(o.bytes for o in program.operands.values() if o.role in ("input", "output", "zeroed") and not o.alias)


def device_of(group: Group, device: str | None, where: str) -> str:
    """The GPU of a rank: each takes that of its number on its machine."""
    if device not in (None, "cuda"):
        raise DscError(
            "every rank takes a GPU by its own number", where=where, wanted="no device, or cuda", got=str(device)
        )
    count = torch.cuda.device_count()
    if group.local_rank >= count:
        raise DscError(
            f"rank {group.rank} of the engine has no GPU",
            where=where,
            wanted=f"a GPU for each of {group.ranks} ranks: cuda:{group.local_rank} for this one",
            got=f"{count} on its machine",
            try_=f"dsc compile --ranks {count}" if count else "a machine with GPUs",
        )
    return f"cuda:{group.local_rank}"


def find_device(folder: EngineFolder, device: str | None) -> torch.device:
    """The GPU asked for, if there is one that runs the engine's kernels."""
    target = folder.manifest.target
    if not torch.cuda.is_available():
        raise DscError(f"an engine for {target} needs a GPU", where=str(folder.path), got="no CUDA device")
    try:
        found = torch.device(device or "cuda")
    except RuntimeError as error:  # no name of a device
        raise DscError("no such device", where=str(folder.path), wanted="cuda, or cuda:N", got=str(device)) from error
    if found.type != "cuda":
        raise DscError(f"an engine for {target} cannot run on {device}", where=str(folder.path), wanted="cuda")
    found = torch.device("cuda", found.index or 0)
    major, minor = torch.cuda.get_device_capability(found)
    want = int(target.removeprefix("sm_").rstrip("a"))
    exact = target.endswith("a")
    have = major * 10 + minor
    if have != want if exact else (have // 10 != want // 10 or have < want):
        raise DscError(
            f"an engine for {target} cannot run on this GPU",
            where=str(folder.path),
            wanted=target,
            got=f"{torch.cuda.get_device_name(found)}, sm_{have}",
            try_=f"dsc compile --target sm_{have}{'a' if have >= 90 else ''}",
        )
    return found
