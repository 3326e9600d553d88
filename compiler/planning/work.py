"""The least time of an op in a step, from its widths and formats: what `dsc.runtime.bench_floor` reads off a program.

Ops that store nothing large are bound by their activations; for those, bytes are the schema's cost instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from dsc.compiler.ir.weight import DTYPE_BYTES
from dsc.compiler.planning.ops import PROJECTIONS, PlannedOp
from dsc.compiler.planning.weights import stored_bytes
from dsc.plugins.formats import parse_format
from dsc.plugins.schema import load_op
from dsc.runtime.bench_floor import Rates, independent_hits


@dataclass(frozen=True)
class Step:
    """A step: `sequences` of `queries` tokens each, at the end of `context` tokens (this step's included). `phase` is prefill
    or decode."""

    phase: str
    sequences: int
    queries: int
    context: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries

    @property
    def pairs(self) -> int:
        """Query-key pairs of causal attention."""
        before = self.context - self.queries
        return self.sequences * (self.queries * before + self.queries * (self.queries + 1) // 2)


@dataclass(frozen=True)
class Work:
    """Bytes and FLOPs of an op in a step, and the seconds that they take at least."""

    bytes: float
    flop: float
    seconds: float


def work(op: PlannedOp, step: Step, rates: Rates) -> Work:
    """What an op must do in a step."""
    num_bytes, flop = _COUNTS.get(op.op, _activations)(op, step)
    rate = rates.fp8 if op.op != "MlaAttention" and _multiplies_fp8(op) else rates.bf16
    return Work(num_bytes, flop, max(num_bytes / rates.memory, flop / rate))


def _multiplies_fp8(op: PlannedOp) -> bool:
    first = next((text for name, text in op.formats.items() if name in ("w_format", "down_format")), "")
    return first.startswith("fp8")


def _stored(format_: str, *shape: int) -> int:
    return stored_bytes(shape, parse_format(format_))


def _linear(op: PlannedOp, step: Step) -> tuple[float, float]:
    outer, inner = op.widths["O"], op.widths["I"]
    return _stored(op.formats["w_format"], outer, inner), 2.0 * step.tokens * outer * inner


def _head(op: PlannedOp, step: Step) -> tuple[float, float]:
    rows, width = op.widths["V"], op.widths["D"]
    return _stored(op.formats["w_format"], rows, width), 2.0 * step.sequences * rows * width


def _qkv(op: PlannedOp, step: Step) -> tuple[float, float]:
    w = SimpleNamespace(**op.widths)
    cached, format_, beside = w.latent + w.rope, op.formats["w_format"], op.formats["w_kv_format"]
    num_bytes = _stored(format_, w.q_width + w.joint * cached, w.D)
    num_bytes += 0 if w.joint else _stored(beside, cached, w.D)
    num_bytes += step.tokens * cached * DTYPE_BYTES[op.formats["cache_dtype"]]
    return num_bytes, 2.0 * step.tokens * w.D * (w.q_width + cached)


def _attention(op: PlannedOp, step: Step) -> tuple[float, float]:
    w = SimpleNamespace(**op.widths)
    absorbed, read = op.formats["mode"] == "absorbed", step.sequences * step.context
    num_bytes = _stored(op.formats["kv_b_format"], w.heads * (w.nope + w.v), w.latent_dim)
    num_bytes += read * (w.latent_dim + w.rope) * DTYPE_BYTES[op.formats["cache_dtype"]]
    through_kv_b = 2.0 * (step.tokens if absorbed else read) * w.heads * w.latent_dim * (w.nope + w.v)
    width = 2 * w.latent_dim + w.rope if absorbed else w.nope + w.rope + w.v
    return num_bytes, through_kv_b + 2.0 * step.pairs * w.heads * width


def _experts(op: PlannedOp, step: Step) -> tuple[float, float]:
    """Experts as independent routing hits them; one of several groups of ranks has its share of them and of the choices."""
    w = SimpleNamespace(**op.widths)
    share = 1 / op.widths.get("expert_groups", 1)
    hit = independent_hits(round(w.E / share), w.K, step.tokens) * share
    num_bytes, shared = 0.0, getattr(w, "FS", 0)
    for name in PROJECTIONS:
        rows, columns = (w.D, w.F) if name == "down" else (w.F, w.D)
        num_bytes += hit * _stored(op.formats[f"{name}_format"], rows, columns)
        if shared:
            rows, columns = (w.D, shared) if name == "down" else (shared, w.D)
            num_bytes += _stored(op.formats[f"shared_{name}_format"], rows, columns)
    return num_bytes, 6.0 * w.D * step.tokens * (w.K * share * w.F + shared)


def _activations(op: PlannedOp, step: Step) -> tuple[float, float]:
    quantize = op.formats.get("quantize", "")
    cost = load_op(op.op).cost(SimpleNamespace(**op.widths, T=step.tokens, R=step.sequences, MW=0, quantize=quantize))
    return float(cost.bytes), float(cost.flop)


_COUNTS: dict[str, Callable[[PlannedOp, Step], tuple[float, float]]] = {
    "Linear": _linear, "LmHead": _head, "Qkv": _qkv, "MlaAttention": _attention, "Moe": _experts,
}  # fmt: skip
