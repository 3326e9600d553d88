"""What building an engine takes: disk, memory, and the processor's time for its weights.

Rates are of one of two cores (torch 2.13), from whole builds on 2026-11-30 with the checkpoint out of the page cache: an FP8
one of R1's shapes (7.9 GB, 13 to 20 s) on an AMD EPYC, a bfloat16 one of V2-Lite's (4.5 GB) before, on an Intel Xeon. Those
of packed weights are of AWQ's layout, the slowest, by matrices of 2048 x 7168 in memory.
Machines differ by a fifth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsc.compiler.packing import LAYOUTS
from dsc.compiler.pieces import (
    HELD_BYTES,
    INTEGERS,
    PIECE_BYTES,
    SLACK_BYTES,
    THREAD_BYTES,
    THREADS_MAX,
    cores_here,
    piece,
    threads_wanted,
)
from dsc.compiler.planning.weights import PlannedWeight
from dsc.runtime.spec import ModelSpec

# (source, stored) -> values read and rounded, a second and core; what is not here is copied.
RATES = {
    ("fp8", "wint4"): 275e6, ("fp8", "wint8"): 281e6, ("fp8", "bf16"): 92e6, ("fp8", "fp32"): 92e6,
    ("bf16", "wint4"): 190e6, ("bf16", "wint8"): 340e6, ("bf16", "fp8"): 150e6,
    ("packed", "wint4"): 130e6, ("packed", "wint8"): 190e6, ("packed", "fp8"): 138e6,
    ("packed", "bf16"): 116e6, ("packed", "fp32"): 181e6,
}  # fmt: skip
COPIED_BYTES = 577e6  # read and looked through for NaN, a second and core
WRITTEN_BYTES = 935e6  # a second and core: written and hashed
LINEAR = ("experts", "attention", "kv_b", "dense_mlp", "shared_experts")  # what an FP8 checkpoint stores as FP8
PROCESS_BYTES = 390_000_000  # Python, torch and the graphs of R1
SPARE_BYTES = 16 << 20  # graphs, programs, tokenizer and manifest


@dataclass(frozen=True)
class BuildCost:
    """Bytes read, bytes of disk needed, memory at most, and seconds of conversion on `cores` cores of this machine."""

    read_bytes: int
    disk_bytes: int
    ram_bytes: int
    seconds: float
    cores: int


def build_cost(
    spec: ModelSpec, weights: Sequence[PlannedWeight], source_bytes: int, cores: int | None = None
) -> BuildCost:
    """The cost of a build on this machine, or on `cores` cores."""
    cores = min(cores or cores_here(), THREADS_MAX)
    stored = sum(weight.nbytes for weight in weights)
    work = sum(weight.count * math.prod(weight.shape) / _rate(spec, weight) for weight in weights)
    thread_bytes = max(_piece_bytes(spec, weight) for weight in weights) + THREAD_BYTES
    return BuildCost(
        read_bytes=source_bytes,
        disk_bytes=stored + SPARE_BYTES,
        ram_bytes=PROCESS_BYTES + SLACK_BYTES + threads_wanted(cores) * thread_bytes,
        seconds=(work + stored / WRITTEN_BYTES) / cores,
        cores=cores,
    )


def _kinds(spec: ModelSpec, weight: PlannedWeight) -> tuple[str, str]:
    source = spec.source.kind
    if source in ("fp8", "packed") and weight.weight_class not in LINEAR:
        source = "bf16"
    return source, weight.format.kind if weight.format else "fp32"


def _rate(spec: ModelSpec, weight: PlannedWeight) -> float:
    kinds = _kinds(spec, weight)
    return RATES[kinds] if kinds in RATES else COPIED_BYTES / {"fp8": 1, "bf16": 2, "fp32": 4}[kinds[0]]


def _piece_bytes(spec: ModelSpec, weight: PlannedWeight) -> int:
    """Memory of one thread for a piece of a weight: whole rows, whole blocks where it is rounded to FP8, a table at once."""
    if weight.name.startswith("rope."):
        return math.prod(weight.shape) * PIECE_BYTES
    source, stored = _kinds(spec, weight)
    packing = spec.source.packing if source == "packed" else None
    turned = packing is not None and LAYOUTS[packing.method].turned
    cut = piece(stored if stored in INTEGERS or (source, stored) in RATES else None, turned)
    elements = max(cut.elements, cut.alike * weight.shape[-1])
    words = math.prod(weight.shape[-2:]) * packing.bits // 8 if packing is not None and turned else 0
    return min(elements, math.prod(weight.shape)) * cut.element_bytes + min(words, HELD_BYTES)
