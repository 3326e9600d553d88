"""The whole way from a checkpoint to an engine, in one page."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dsc.compiler import (
    convert,
    evaluate,
    float8,
    keep_codes,
    packing,
    quantize,
    random_numbers,
    round_fp8,
    round_integers,
    tables,
    unpack,
)
from dsc.compiler.certify.certify import certify_build
from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.download import download_checkpoint
from dsc.compiler.emission_plan import EmissionPlan, plan_emission
from dsc.compiler.emit import emit, gather, outgrows, place, remaining_bytes, threads_for
from dsc.compiler.engine_writer import EngineContents, toolchain, weight_bytes, write_engine
from dsc.compiler.fit import check_fit
from dsc.compiler.graphs import make_graphs
from dsc.compiler.hub import find_model
from dsc.compiler.ledger import Ledger, make_ledger
from dsc.compiler.lower import lower
from dsc.compiler.pipeline import PipelineReport
from dsc.compiler.planning.serving import serving_settings
from dsc.compiler.planning.sharding import check_parallel, unbuilt, uncut
from dsc.compiler.planning.weights import planned_weights
from dsc.compiler.progress import Progress
from dsc.compiler.random_checkpoint import RandomCheckpoint, describe
from dsc.compiler.recipe import Mtp, Recipe
from dsc.compiler.staging import Staging
from dsc.compiler.targets import Target, make_target
from dsc.compiler.tokenizer_check import check_tokenizer
from dsc.runtime.errors import DscError, raise_all

AnyCheckpoint = Checkpoint | RandomCheckpoint
# A build is not gone on with after one of these changed: the same weights could become other bytes.
MAKERS_OF_BYTES = (
    convert, evaluate, float8, keep_codes, packing, quantize, random_numbers, round_fp8, round_integers, tables, unpack,
)  # fmt: skip


@dataclass(frozen=True)
class RandomWeights:
    """What `dsc compile --weights random` asks for.

    layers  decoder layers to keep, None for all
    mtp     keep the MTP layer of a slice, which otherwise goes: it would be a large part of it
    """

    layers: int | None = None
    mtp: bool = False

    def apply(self, model: str, recipe: Recipe) -> tuple[RandomCheckpoint, Recipe]:
        """Random weights of a model's shape, and the recipe of their engine, under a name and a model that tell."""
        mtp = recipe.mtp if self.mtp or self.layers is None else Mtp(enabled=False, drafts=0)
        checkpoint = RandomCheckpoint.open(model, layers=self.layers, mtp=mtp.enabled)
        told = f"random weights, {describe(checkpoint.spec)}"
        # A budget says nothing of weights that predict nothing.
        return checkpoint, replace(recipe, name=f"{recipe.name}-random", model=told, mtp=mtp, verify=None)


@dataclass(frozen=True)
class Built:
    """What a build made: the engine's folder and the numbers a user looks for first."""

    folder: Path
    source_bytes: int
    weight_bytes: int
    seconds: float
    fusions: dict[str, tuple[int, int]]  # pass -> found, expected, over all graphs that promise a number
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return {**data, "folder": str(self.folder), "seconds": round(self.seconds, 2)}

    def text(self) -> str:
        """What `dsc compile` prints."""
        lines = [f"note: {note}" for note in self.notes]
        found, expected = (sum(numbers[i] for numbers in self.fusions.values()) for i in (0, 1))
        lines.append(f"{found} of {expected} sites found in {len(self.fusions)} passes")
        source = f" from {self.source_bytes / 1e6:,.1f} MB" if self.source_bytes else ""
        lines.append(f"{self.weight_bytes / 1e6:,.1f} MB of weights{source} in {self.seconds:.1f} s")
        lines.append(f"{self.folder}    look into it: dsc inspect {self.folder}")
        return "\n".join(lines)


def compile_engine(
    recipe: Recipe,
    *,
    model: str | None = None,
    output: Path | None = None,
    dump: Path | None = None,
    download: bool = False,
    random: RandomWeights | None = None,
    max_ram: int | None = None,
    progress: Progress | None = None,
) -> Built:
    """Build an engine, or go on with a build of it that was cut short.

    model     checkpoint folder or Hugging Face name instead of the recipe's
    download  fetch what is not here, weights only after everything that can be refused without them
    output    the engine's folder, default ./<recipe>.engine
    dump      folder for the graphs' text after each pass that changed them
    random    weights made up instead of read: of the model only config.json is needed
    max_ram   bytes of memory to keep to, mapped files included; without it a quarter of the machine, or what it takes
    raises    DscError for every user's mistake, and for an engine over its recipe's `verify` budget; nothing half-written
              stands at `output` then
    """
    begin = time.monotonic()
    progress = progress or Progress(quiet=True)
    target = check_buildable(recipe)
    checkpoint: AnyCheckpoint
    told: tuple[str, ...] = ()
    if random is not None:
        checkpoint, recipe = random.apply(model or recipe.model, recipe)
    else:
        fetch = partial(download_checkpoint, recipe=recipe, output=_engine_folder(output, recipe)) if download else None
        folder = find_model(model or recipe.model, [] if model else [Path(recipe.where).parent], fetch)
        checkpoint = Checkpoint.open(folder, read_config(folder), mtp=recipe.mtp.enabled)
        told = check_tokenizer(folder, recipe)
    check_fit(recipe, checkpoint.spec)
    check_parallel(checkpoint.spec, planned_weights(checkpoint.spec, recipe), recipe.parallel, recipe.where)
    progress.step("graphs")
    graphs, report = make_graphs(recipe, checkpoint, dump)
    weights = gather(graphs)
    ledger = make_ledger(checkpoint, {name: values.expression for name, values in weights.items()})
    if random is not None:
        ledger = Ledger(())  # it balanced; of tensors that never were there is nothing to report
    notes = (*checkpoint.notes, *told, *report.notes())
    plan = plan_emission(weights, position=checkpoint.position, store=checkpoint.store)
    threads = threads_for(plan, max_ram)
    total = weight_bytes(graphs)
    with _staging(output, recipe, checkpoint, plan, progress) as stage:
        progress.step("kernels")
        target.prepare([lower(graph, onnx_sha256="") for graph in graphs])
        progress.step("weights", remaining_bytes(plan, stage.journal))
        with stage.discarding():
            emission = emit(
                plan,
                checkpoint.read,
                stage.folder,
                expect=checkpoint.expect,
                release=checkpoint.release if outgrows(plan, max_ram) else None,
                threads=threads,
                journal=stage.journal,
                advance=progress.advance,
            )
            checkpoint.check_unchanged()
        place(graphs, emission.placements)
        progress.step("engine")
        serving = serving_settings(checkpoint.spec, recipe)
        contents = EngineContents(
            checkpoint.spec, recipe, graphs, emission, report, ledger, checkpoint.folder, notes, serving
        )
        write_engine(stage.folder, contents, target)
        if recipe.verify is not None and isinstance(checkpoint, Checkpoint):
            progress.step("verify")
            with stage.discarding():
                certificate = certify_build(stage.folder, recipe, checkpoint)
            notes = (*notes, f"verified: {certificate.end_to_end.text()}")
        stage.commit()
    sizes = checkpoint.files()
    return Built(stage.target, sum(sizes.values()), total, time.monotonic() - begin, _fusions(report), notes)


@contextmanager
def _staging(
    output: Path | None, recipe: Recipe, checkpoint: AnyCheckpoint, plan: EmissionPlan, progress: Progress
) -> Iterator[Staging]:
    """The folder to build in. What an earlier build left in it, or this one leaves when it fails, is told."""
    identity = {
        "the recipe": _sha256(json.dumps(recipe.to_json(), sort_keys=True)),
        "config.json": _sha256(repr(checkpoint.spec)),
        "dsc or its packages": _sha256(repr(toolchain()) + "".join(map(inspect.getsource, MAKERS_OF_BYTES))),
        "weights": plan.identity,
        **checkpoint.identity(),
    }
    stage = Staging(_engine_folder(output, recipe), plan.file_bytes, identity)
    try:
        with stage:
            if told := stage.resumed():
                progress.tell(f"note: {told}")
            yield stage
    except BaseException:
        if stage.kept:
            progress.tell(f"note: what is done is kept in {stage.folder}: the same command goes on from there")
        raise


def _engine_folder(output: Path | None, recipe: Recipe) -> Path:
    return output or Path(f"{recipe.name}.engine")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_buildable(recipe: Recipe) -> Target:
    """The recipe's target; DscError naming all the recipe asks for that is not built yet."""
    faults = []
    try:
        target: Target | None = make_target(recipe.target, recipe.allow_kernels)
    except DscError as error:
        target = None
        faults.append(error)
    faults += _parallel_faults(recipe)
    raise_all(recipe.where, faults)
    assert target is not None
    return target


def _parallel_faults(recipe: Recipe) -> list[DscError]:
    """What of `parallel` is not built yet, and several ranks without the pass that cuts weights for them."""
    tensor, expert, pipeline = recipe.parallel.tensor, recipe.parallel.expert, recipe.parallel.pipeline
    got = f"parallel: {{tensor: {tensor}, expert: {expert}, pipeline: {pipeline}}}"
    wanted = "pipeline: 1, and expert: a divisor of tensor"
    try_ = f"parallel: {{tensor: {tensor}, expert: {math.gcd(tensor, expert)}, pipeline: 1}}"
    faults = [
        DscError(what, where=recipe.where, wanted=wanted, got=got, try_=try_) for what in unbuilt(recipe.parallel)
    ]
    listed = ", ".join(entry.name for entry in recipe.passes)
    try_ = "the line `  - shard` before `  - plan_memory`, or --ranks 1"
    faults += [
        DscError(what, where=recipe.where, wanted="shard in passes, before plan_memory", got=listed, try_=try_)
        for what in uncut(recipe)
    ]
    return faults


def _fusions(report: PipelineReport) -> dict[str, tuple[int, int]]:
    promised = {p.name: [run for run in p.runs if run.expected is not None] for p in report.passes}
    return {
        name: (sum(run.found for run in runs), sum(run.expected or 0 for run in runs))
        for name, runs in promised.items()
        if runs
    }
