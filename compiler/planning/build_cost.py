"""What building an engine takes: disk, memory, and the processor's time for its weights.

Rates are of one core of an Intel Xeon (2 cores, torch 2.13, one thread), measured on 2026-11-29 with
`dsc.compiler.convert` on 512 x 7168 matrices; a machine's own disk may be slower than they are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from dsc.compiler.planning.weights import PlannedWeight
from dsc.runtime.spec import ModelSpec

# (source, stored) -> values a second and core; what is not here is copied.
RATES = {
    ("fp8", "wint4"): 123e6, ("fp8", "wint8"): 214e6, ("fp8", "bf16"): 156e6, ("fp8", "fp32"): 156e6,
    ("bf16", "wint4"): 142e6, ("bf16", "wint8"): 248e6, ("bf16", "fp8"): 164e6,
}  # fmt: skip
COPIED = 3800e6
HASHED_BYTES = 1.2e9  # a second and core, sha256; stored bytes are hashed for their tensor and for their file
LINEAR = ("experts", "attention", "kv_b", "dense_mlp", "shared_experts")  # what an FP8 checkpoint stores as FP8
THREADS_MAX = 8
PROCESS_BYTES = 390_000_000  # Python, torch and the graphs of R1
SLACK_BYTES = (64 + 8) << 20
# As dsc.compiler.convert cuts its pieces: values of one at least, bytes of memory for each.
PIECE_VALUES, VALUE_BYTES, BLOCK_ROWS = 1 << 18, 40, 128
SPARE_BYTES = 16 << 20  # graphs, programs, tokenizer and manifest


@dataclass(frozen=True)
class BuildCost:
    """Bytes read, bytes of disk needed, peak memory, and seconds of conversion on `threads` cores of this machine."""

    read_bytes: int
    disk_bytes: int
    ram_bytes: int
    seconds: float
    threads: int


def build_cost(
    spec: ModelSpec, weights: Sequence[PlannedWeight], source_bytes: int, threads: int | None = None
) -> BuildCost:
    """The cost of a build on this machine, or on `threads` cores."""
    threads = min(threads or len(os.sched_getaffinity(0)), THREADS_MAX)
    stored = sum(weight.nbytes for weight in weights)
    work = sum(weight.count * math.prod(weight.shape) / _rate(spec, weight) for weight in weights)
    piece = max(_piece_bytes(spec, weight) for weight in weights)
    return BuildCost(
        read_bytes=source_bytes,
        disk_bytes=stored + SPARE_BYTES,
        ram_bytes=PROCESS_BYTES + SLACK_BYTES + threads * piece,
        seconds=(work + 2 * stored / HASHED_BYTES) / threads,
        threads=threads,
    )


def _kinds(spec: ModelSpec, weight: PlannedWeight) -> tuple[str, str]:
    source = spec.source.kind
    if source == "fp8" and weight.weight_class not in LINEAR:
        source = "bf16"
    return source, weight.format.kind if weight.format else "fp32"


def _rate(spec: ModelSpec, weight: PlannedWeight) -> float:
    return RATES.get(_kinds(spec, weight), COPIED)


def _piece_bytes(spec: ModelSpec, weight: PlannedWeight) -> int:
    """Memory of one thread for a piece of a weight: whole rows, whole blocks where it is rounded to FP8, a table at once."""
    if weight.name.startswith("rope."):
        return math.prod(weight.shape) * VALUE_BYTES
    source, stored = _kinds(spec, weight)
    rows = BLOCK_ROWS if stored == "fp8" and source != "fp8" else 1
    return max(PIECE_VALUES, rows * weight.shape[-1]) * VALUE_BYTES
