"""Where an engine's segments are run: on the CPU, or on a GPU (`certify.gpu`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence

import torch

from dsc.compiler.certify.runners import Bind, RunSegment, Values
from dsc.plugins.cpu_node import Made, Packs
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.executor import Executor
from dsc.runtime.program import Program
from dsc.runtime.ranks.threads import run_ranks
from dsc.runtime.weights import Weights

PHASE = "prefill"
M_MMAP_THRESHOLD = -3  # of malloc.h


def open_device(folder: EngineFolder, name: str | None) -> tuple[torch.device, Bind]:
    """The device of that name, "cpu" for None, and what binds an engine's prefill segments there.

    Raises DscError where the engine cannot be run on it, or its largest segment has no room there. On the CPU all ranks of an
    engine run, as threads.
    """
    if name in (None, "cpu"):
        return torch.device("cpu"), bind_on_cpu(folder)
    if folder.manifest.ranks > 1:
        raise DscError(
            f"the {folder.manifest.ranks} ranks of an engine are verified on the CPU",
            where=str(folder.path),
            wanted="--device cpu",
            got=name or "",
        )
    if folder.manifest.target == "cpu":
        raise DscError(f"an engine for cpu cannot run on {name}", where=str(folder.path), wanted="cpu", got=name or "")
    from dsc.compiler.certify.gpu import GpuSegments  # here: it wants the packages of the GPU extra
    from dsc.runtime.cuda.backend import find_device

    device = find_device(folder, name)
    phases = [model.phases for model in folder.manifest.models.values()]
    programs = [folder.program(graphs[PHASE]) for graphs in phases if PHASE in graphs]
    return device, GpuSegments(folder, device, programs).bind


def bind_on_cpu(folder: EngineFolder) -> Bind:
    """Segments of an engine on the CPU, weights as stored. Raises DscError where they are laid out for a GPU's kernels."""
    layouts = {entry.layout for entry in folder.manifest.tensors.values()} - {"row_major"}
    if layouts:
        raise DscError(
            f"weights laid out for the kernels of {folder.manifest.target} cannot be run on the CPU",
            where=str(folder.path),
            wanted="row_major",
            got=", ".join(sorted(layouts)),
            try_="dsc verify --device cuda",
        )

    places = [folder.manifest.parallel.place(rank) for rank in range(folder.manifest.ranks)]

    def bind(program: Program) -> RunSegment:
        return_freed_memory()
        ranks = []
        for place in places:
            weights = Weights(folder, place)
            weights.packs = _ReleasingPacks(folder)
            ranks.append(Executor(program, folder, shared=weights).run)
        return ranks[0] if len(ranks) == 1 else _together(program, ranks)

    return bind


def _together(program: Program, ranks: Sequence[RunSegment]) -> RunSegment:
    """All ranks of a segment at a time, each with caches of its own; what the first one gives, which is what all give."""
    caches = [name for name in program.inputs if program.operands[name].role == "state"]

    def run(values: Values) -> dict[str, torch.Tensor]:
        return run_ranks(len(ranks), lambda rank: ranks[rank]({**values, **{n: values[n].clone() for n in caches}}))[0]

    return run


def return_freed_memory() -> None:
    """Have malloc, where it is glibc's, give back what was freed, and from now on at once what is freed of 1 MiB and more.

    Otherwise weights of 2 to 32 MiB lie between what their packing freed, and a layer stays while the next one is made.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
        libc.malloc_trim(0)


class _ReleasingPacks(Packs):
    """Packs that give back the pages a weight was read from before the next one is."""

    def __init__(self, folder: EngineFolder) -> None:
        super().__init__()
        self._folder = folder

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        made = super().get(key, make)
        self._folder.release_pages()
        return made
