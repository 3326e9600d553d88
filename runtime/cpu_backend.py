"""An engine on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.backends import Runner
from dsc.runtime.cache import SHARE_OF_MEMORY, free_memory_bytes
from dsc.runtime.errors import DscError
from dsc.runtime.executor import Executor
from dsc.runtime.program import Program
from dsc.runtime.ranks.group import Group
from dsc.runtime.shards import ALONE, Place
from dsc.runtime.weights import Weights


class CpuBackend:
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
        if device not in (None, "cpu"):
            raise DscError(
                f"an engine for cpu cannot run on {device}", where=str(folder.path), wanted="cpu", got=device
            )
        if gpu_memory is not None:
            raise DscError("an engine for cpu takes no GPU memory", where=str(folder.path), got="a limit for it")
        self.device = torch.device("cpu")
        self._folder, self._place = folder, place
        self._local_ranks = 1 if group is None else group.local_ranks
        self._weights = Weights(folder, place)

    def program(self, name: str) -> Executor:
        """The executor of one graph; weights are packed once for all of them."""
        return self.bind(self._folder.program(name, self._place.rank))

    def bind(self, program: Program, kind: type[Executor] = Executor) -> Executor:
        """The executor of any program over the engine's weights."""
        return kind(program, self._folder, shared=self._weights)

    def cache_bytes(self) -> int:
        """Half of the memory that is free, or a rank's part of that."""
        return int(free_memory_bytes() * SHARE_OF_MEMORY) // self._local_ranks

    def resident_weight_bytes(self) -> int:
        """Bytes of the rank's weights, packed for this machine or mapped as stored."""
        return self._weights.resident_bytes

    def run_ahead(self, programs: Mapping[str, Runner]) -> None:
        """A CPU has no second device to keep busy."""

    def describe(self) -> dict[str, Any]:
        """Nothing: weights are mapped, and read where they are packed."""
        return {}
