"""Predicted rates: a step is the sum of what its ops were measured to take, on the rank that does the most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.planning.measured import Estimate, Table, scaled_words
from dsc.compiler.planning.ops import PlannedOp, missing_passes, planned_ops
from dsc.compiler.planning.weights import PlannedWeight
from dsc.compiler.planning.work import Step
from dsc.compiler.recipe import Recipe
from dsc.runtime.spec import ModelSpec

BATCHES = (1, 16, 64, 128, 256)
COMMUNICATION = {"AllReduce", "GatherLogits"}


@dataclass(frozen=True)
class DecodeRate:
    """A decode step of `batch` sequences of `context` tokens over all ranks, one token each."""

    batch: int
    context: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.seconds


@dataclass(frozen=True)
class PrefillRate:
    """`prompts` of `tokens` each from an empty cache, in steps of at most `batch_tokens`."""

    prompts: int
    tokens: int
    batch_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.prompts * self.tokens / self.seconds


@dataclass(frozen=True)
class Prediction:
    """Rates on one kind of GPU.

    measured  dates of the tables; () where nothing is predicted
    notes     what the rates leave out, and which ops' times were scaled from others
    why       nothing is predicted; "" where something is
    """

    gpu: str
    measured: tuple[str, ...]
    decode: tuple[DecodeRate, ...]
    prefill: PrefillRate | None
    notes: tuple[str, ...] = ()
    why: str = ""


class Predictor:
    """Times of one engine's steps on one kind of GPU. `estimates` collects every op's time, for what is said of them."""

    def __init__(
        self, spec: ModelSpec, recipe: Recipe, weights: Sequence[PlannedWeight], mesh: Mesh, table: Table
    ) -> None:
        self.spec, self.mesh, self.table = spec, mesh, table
        self.pipeline = recipe.parallel.pipeline
        self.ops = {phase: planned_ops(spec, recipe, weights, mesh, phase) for phase in ("prefill", "decode")}
        self.estimates: list[tuple[PlannedOp, Estimate]] = []
        self.unknown: set[str] = set()

    def decode(self, batch: int, context: int) -> DecodeRate:
        """Sampling and the host's part are in it."""
        step = Step("decode", batch, 1, context)
        us = self._ops_us([*self.ops["decode"], _sample(self.spec)], step)
        return DecodeRate(batch, context, (us + self.table.gap_us(batch)) / 1e6)

    def prefill(self, tokens: int, batch_tokens: int, sequences: int) -> PrefillRate:
        """As many prompts as fill a step, or one in several steps."""
        prompts = max(1, min(batch_tokens // tokens, sequences))
        us = 0.0
        for start in range(0, tokens, batch_tokens):
            queries = min(batch_tokens, tokens - start)
            us += self._ops_us(self.ops["prefill"], Step("prefill", prompts, queries, start + queries))
        return PrefillRate(prompts, tokens, batch_tokens, us / 1e6)

    def notes(self) -> Iterator[str]:
        """What a reader of the rates must know."""
        unknown = sorted(self.unknown - COMMUNICATION)
        exchanges = {op.op for op in self.ops["decode"]} & COMMUNICATION  # none in meshes that are not built
        if self.mesh.num_ranks > 1 and not exchanges - self.unknown:
            yield f"what {self.mesh.num_ranks} ranks exchange is left out: it was not measured among so many"
        if self.pipeline > 1:
            yield f"{self.pipeline} pipeline stages one after the other: nothing is overlapped, nothing is counted for sending"
        if unknown:
            yield f"left out, since no such op was measured: {', '.join(unknown)}"
        yield from scaled_words(self.estimates)

    def _ops_us(self, ops: Sequence[PlannedOp], step: Step) -> float:
        """Sequences are spread over groups of tensor ranks; experts see the tokens of all of them."""
        groups = self.mesh.num_ranks // self.mesh.tensor
        own = replace(step, sequences=-(-step.sequences // groups))
        total = 0.0
        for op in ops:
            estimate = self.table.estimate(op, step if op.op == "Moe" else own)
            if estimate is None:
                self.unknown.add(op.op)
                continue
            self.estimates.append((op, estimate))
            total += op.count * estimate.us
        return total


def predict(
    spec: ModelSpec,
    recipe: Recipe,
    weights: Sequence[PlannedWeight],
    mesh: Mesh,
    table: Table | None,
    gpu: str,
    *,
    context: int,
    batch_tokens: int,
    sequences: int,
) -> Prediction:
    """Rates of an engine.

    context       tokens of a sequence in decode, and of a prompt in prefill
    batch_tokens  of the largest step; sequences: the most at once
    """
    why = _unpredictable(recipe, table)
    if table is None or why:
        return Prediction(gpu, (), (), None, why=why)
    predictor = Predictor(spec, recipe, weights, mesh, table)
    batches = sorted({*(batch for batch in BATCHES if batch <= sequences), sequences})
    decode = tuple(predictor.decode(batch, context) for batch in batches)
    prefill = predictor.prefill(context, batch_tokens, sequences)
    drafts = ("drafts are not counted: a step is one token of each sequence",) if recipe.mtp.enabled else ()
    return Prediction(gpu, table.dates, decode, prefill, (*drafts, *predictor.notes()))


def _unpredictable(recipe: Recipe, table: Table | None) -> str:
    """Why nothing is predicted, "" where something is."""
    if table is None:
        return "no kernels were measured there"
    missing = missing_passes(recipe)
    if missing:
        return f"the recipe leaves out {', '.join(missing)}, and tables are of their ops"
    dtypes = [getattr(e.instance, "activations", "fp32") for e in recipe.passes if e.name == "set_dtype"]
    return "" if dtypes == ["bf16"] else "tables are of bf16 activations"


def _sample(spec: ModelSpec) -> PlannedOp:
    return PlannedOp("sample", "Sample", 1, {"V": spec.vocab_size}, {})
