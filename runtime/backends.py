"""Backends: what runs the programs of a target. Found by the manifest's target; see docs/targets.md."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.program import Program
from dsc.runtime.ranks.group import Group
from dsc.runtime.shards import ALONE, Place

# Target -> "module:class"; the class is called as `make_backend` is.
BACKENDS: dict[str, str] = {
    "cpu": "dsc.runtime.cpu_backend:CpuBackend",
    "sm_80": "dsc.runtime.cuda.backend:CudaBackend",
    "sm_90a": "dsc.runtime.cuda.backend:CudaBackend",
    "sm_100a": "dsc.runtime.cuda.backend:CudaBackend",
}


class Runner(Protocol):
    """One program, ready to run. `executed` names the nodes of the last step, in order."""

    program: Program
    executed: tuple[str, ...]

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Caches for all steps to come."""
        ...

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One step: inputs by name to outputs by name; caches are written in place."""
        ...


class Ahead(Protocol):
    """Runs decode steps without waiting for the host in between."""

    def fits(self, sequences: int) -> bool:
        """Whether it serves steps of so many sequences."""
        ...

    def burst(
        self,
        inputs: Mapping[str, torch.Tensor],
        rows: Mapping[str, torch.Tensor],
        steps: int,
        take: Callable[[list[int]], bool],
        busy: list[Any] | None = None,
    ) -> None:
        """Run up to `steps` steps of one token a sequence from `inputs` of main.decode and `rows` of sample; `take` gets
        each step's tokens (-1: broken logits) and says whether to go on. The block table must hold all blocks. `busy`,
        for profiles, gets a pair of timing events around each step's work on the device."""
        ...


class Backend(Protocol):
    """A rank's part of an engine's weights, and its programs, on one device."""

    device: torch.device

    def program(self, name: str) -> Runner:
        """The runner of one graph; runners share weights."""
        ...

    def bind(self, program: Program) -> Runner:
        """A runner of a program that is not the engine's own: one changed to show what it computes."""
        ...

    def cache_bytes(self) -> int:
        """Memory the latent cache may take."""
        ...

    def resident_weight_bytes(self) -> int:
        """Bytes of the rank's weights, all that are kept in memory."""
        ...

    def run_ahead(self, programs: Mapping[str, Runner]) -> Ahead | None:
        """What runs decode steps in bursts over these programs; None where that gains nothing."""
        ...

    def describe(self) -> dict[str, Any]:
        """How the engine was loaded: `gb`, `gb_per_s` and `load_seconds`; {} where nothing was copied to a device."""
        ...


def make_backend(
    folder: EngineFolder,
    device: str | None,
    gpu_memory: float | None = None,
    least_cache_bytes: int = 0,
    *,
    place: Place = ALONE,
    group: Group | None = None,
) -> Backend:
    """The backend of an engine's target. Raises DscError where this version or this machine cannot run it.

    gpu_memory         bytes of a GPU's memory that the rank may take in all; None: what is free
    least_cache_bytes  that a cache will need beside the weights: refused before those are loaded
    place              whose programs, and whose part of the weights
    group              the ranks of an engine of several, this one among them; None for one rank
    """
    target = folder.manifest.target
    if target not in BACKENDS:
        wanted = ", ".join(BACKENDS)
        raise DscError(f"engines for {target} cannot be run by this version", where=str(folder.path), wanted=wanted)
    module, _, name = BACKENDS[target].partition(":")
    made: Callable[..., Backend] = getattr(importlib.import_module(module), name)
    return made(folder, device, gpu_memory, least_cache_bytes, place=place, group=group)
