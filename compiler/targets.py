"""Targets: what an engine is built for. A target turns programs into ones its runtime executes; see docs/targets.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dsc.runtime.errors import DscError
from dsc.runtime.program import Program


@dataclass(frozen=True)
class Lowered:
    """Programs with the target's steps, and what the report says of their kernels."""

    programs: list[Program]
    kernels: list[dict[str, Any]] = field(default_factory=list)


class Target(Protocol):
    """One build for one target."""

    def prepare(self, programs: Sequence[Program]) -> None:
        """All that can fail or takes long, before any weight is written. Raises DscError."""
        ...

    def finish(self, programs: Sequence[Program], folder: Path) -> Lowered:
        """The same programs with their steps; files the steps name are written under `folder`/kernels."""
        ...


class CpuTarget:
    """The CPU runs plugins' cpu.py or reference.py: nothing to add."""

    def prepare(self, programs: Sequence[Program]) -> None:
        pass

    def finish(self, programs: Sequence[Program], folder: Path) -> Lowered:
        return Lowered(list(programs))


class GpuTarget:
    """Kernels cross-compiled to cubins, each held to what its source asks for (dsc.compiler.kernel_check)."""

    def __init__(self, name: str, allow_kernels: Mapping[str, str]) -> None:
        from dsc.compiler.codegen import CubinCompiler
        from dsc.plugins.gpu_node import Arch

        self._compiler, self._allowed = CubinCompiler(Arch(name)), allow_kernels

    def prepare(self, programs: Sequence[Program]) -> None:
        from dsc.compiler.kernel_check import check_kernels
        from dsc.compiler.lower_gpu import lower_gpu

        check_kernels(lower_gpu(list(programs), self._compiler), self._compiler, self._allowed)

    def finish(self, programs: Sequence[Program], folder: Path) -> Lowered:
        from dsc.compiler.lower_gpu import kernel_report, lower_gpu

        lowered = lower_gpu(list(programs), self._compiler)
        self._compiler.write(folder)
        return Lowered(lowered, kernel_report(self._compiler, self._allowed))


def _not_built(name: str, allow_kernels: Mapping[str, str]) -> Target:
    raise DscError(
        f"target {name} is not built yet", wanted="cpu or a GPU's architecture", got=name, try_="--target cpu"
    )


# The one list of targets that recipes may name.
TARGETS: dict[str, Callable[[str, Mapping[str, str]], Target]] = {
    "cpu": lambda name, allow_kernels: CpuTarget(),
    "sm_80": GpuTarget,
    "sm_90a": GpuTarget,
    "sm_100a": GpuTarget,
    "tensorrt": _not_built,
}


def make_target(name: str, allow_kernels: Mapping[str, str]) -> Target:
    """A build for one of TARGETS; DscError for one that is not built yet.

    allow_kernels  kernels by name that may spill or miss their instruction, and why
    """
    return TARGETS[name](name, allow_kernels)
