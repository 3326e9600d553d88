"""GPUs that a plan may name: what they run and how much memory they have."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.runtime.errors import DscError, nearest

MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """A GPU. `memory_bytes` is all of its memory, as nvidia-smi tells it; `target` is what engines for it are built for."""

    name: str
    title: str
    target: str
    memory_bytes: int


_TABLE = (
    ("h200", "H200", "sm_90a", 143771),
    ("h100", "H100 80 GB", "sm_90a", 81559),
    ("h800", "H800", "sm_90a", 81559),
    ("h20", "H20", "sm_90a", 97871),
    ("a100", "A100 80 GB", "sm_80", 81920),
    ("a100-40", "A100 40 GB", "sm_80", 40960),
    ("a800", "A800", "sm_80", 81920),
    ("b200", "B200", "sm_100a", 183359),
)
GPUS = {name: Gpu(name, title, target, mib * MIB) for name, title, target, mib in _TABLE}


def find_gpu(name: str) -> Gpu:
    """A GPU by its name in any case; DscError with the nearest known one otherwise."""
    key = name.lower()
    if key not in GPUS:
        raise DscError(f"unknown GPU {name}", wanted=", ".join(GPUS), try_=nearest(key, GPUS))
    return GPUS[key]


def default_gpu(target: str) -> Gpu | None:
    """The GPU that an engine is meant for where nobody names one: its target's first. None for the CPU."""
    return next(iter(gpus_of(target)), None)


def gpus_of(target: str) -> list[Gpu]:
    """The GPUs that an engine of a target runs on."""
    return [gpu for gpu in GPUS.values() if gpu.target == target]
