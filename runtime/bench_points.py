"""What `dsc bench` measures, point by point, and as JSON data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dsc.runtime.bench_layers import LaunchCost
from dsc.runtime.bench_nodes import NodeTime

KNEE = 0.8  # of the best rate


@dataclass(frozen=True)
class Plan:
    """What to measure. `nodes`: also every kind of node by itself."""

    batches: Sequence[int]
    contexts: Sequence[int]
    steps: int = 16
    prefill: bool = True
    nodes: bool = False


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer (or of what lies outside layers) beside its floor; launches None on CPUs."""

    name: str
    seconds: float
    floor: float | None
    launches: int | None
    moe: bool


@dataclass(frozen=True)
class DecodePoint:
    """A decode step of `batch` sequences of `context` tokens, this step's included.

    seconds          wall time of a step: inputs built, main and sample run, tokens fetched
    device_seconds   what the device was busy in it, None on CPUs; the rest of `seconds` is the host's gap
    sample_seconds   of the sample graph in it
    floor            least seconds of the main graph, None where the target has no measured rates
    experts          distinct experts hit by layer, and what independent routing would hit
    valid            False where routing hits too few experts for times of this model's experts to mean anything
    """

    batch: int
    context: int
    seconds: float
    device_seconds: float | None
    sample_seconds: float | None
    floor: float | None
    experts: dict[str, float]
    independent: float
    valid: bool
    memory_bytes: int
    layers: list[LayerTime] = field(default_factory=list)
    nodes: list[NodeTime] = field(default_factory=list)
    launch: LaunchCost | None = None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.batch / self.seconds


@dataclass(frozen=True)
class PrefillNodes:
    """Nodes of the first step of `prompts` prompts: so many query tokens of each."""

    prompts: int
    tokens: int
    nodes: list[NodeTime]


@dataclass(frozen=True)
class PrefillPoint:
    """Whole prompts from an empty cache: `batch` of `context` tokens each, `prompts` at once in chunks of the largest step.

    seconds          of the whole batch; the last prompt's logits are there then
    seconds_at_once  of `prompts` prompts
    experts          distinct experts hit by the first chunk, by layer; independent and valid as for decode
    nodes            of all prompts at once, and of one by itself
    """

    batch: int
    prompts: int
    context: int
    seconds: float
    seconds_at_once: float
    floor: float | None
    experts: dict[str, float]
    independent: float
    valid: bool
    memory_bytes: int
    nodes: list[PrefillNodes] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.batch * self.context / self.seconds


def knee(points: Sequence[DecodePoint]) -> int | None:
    """The smallest batch with at least KNEE of the best rate of these points: more sequences gain little beyond it."""
    sound = [point for point in points if point.valid]
    best = max((point.rate for point in sound), default=0.0)
    return min((point.batch for point in sound if point.rate >= KNEE * best), default=None)


def decode_data(point: DecodePoint) -> dict[str, Any]:
    """A point with what follows from it; where routing hit too few experts, without times and rates."""
    data = asdict(point)
    moe = [layer for layer in point.layers if layer.moe]
    busy = point.device_seconds
    derived: dict[str, Any] = {
        "tokens_per_s": point.rate,
        "host_gap": None if busy is None else max(0.0, 1.0 - busy / point.seconds),
        "floor_share": _share(point.floor, point.seconds if busy is None else busy - (point.sample_seconds or 0.0)),
        "moe_layer_seconds": statistics.median(layer.seconds for layer in moe) if moe else None,
        "moe_layer_floor": statistics.median(layer.floor or 0.0 for layer in moe) if moe and point.floor else None,
        "moe_layer_launches": moe[0].launches if moe else None,
    }
    if not point.valid:
        silent = ("seconds", "device_seconds", "layers", "nodes")
        data |= dict.fromkeys(silent)
        derived = dict.fromkeys(derived)
    return {**data, **derived}


_SILENT_PREFILL = ("seconds", "seconds_at_once", "tokens_per_s", "floor_share", "nodes")


def prefill_data(point: PrefillPoint) -> dict[str, Any]:
    """As `decode_data`."""
    data = {**asdict(point), "tokens_per_s": point.rate, "floor_share": _share(point.floor, point.seconds)}
    return data if point.valid else {**data, **dict.fromkeys(_SILENT_PREFILL)}


def _share(floor: float | None, seconds: float) -> float | None:
    return None if floor is None else floor / seconds
