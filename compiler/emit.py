"""Write the weights of an engine: every expression evaluated piece by piece and put where the plan says.

Pieces know their place, so neither threads nor order show in the bytes, and no more than a piece per thread is in memory.
What is done is kept in a journal, so that a build that was cut short can be gone on with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsc.compiler.convert import convert, memory_of, outcome
from dsc.compiler.emission_plan import EmissionPlan
from dsc.compiler.ir.graph import Graph, is_weight
from dsc.compiler.ir.weight import Placement, WeightValues
from dsc.compiler.journal import Journal
from dsc.compiler.pieces import THREAD_BYTES, threads_wanted
from dsc.compiler.quantize import Errors
from dsc.compiler.ram import memory_to_keep_to, threads_within
from dsc.compiler.safetensors_writer import SafetensorsWriter
from dsc.compiler.unpack import Read
from dsc.compiler.weight_record import Outcome, WeightRecord, make_record
from dsc.compiler.workers import work_through

SYNC_SECONDS = 2.0


@dataclass(frozen=True)
class Emission:
    """What was written: places and sha256 of tensors by name, parts_sha256 of files by path in the engine, a record per weight."""

    placements: dict[str, Placement]
    tensor_sha256: dict[str, str]
    parts_sha256: dict[str, str]
    weights: tuple[WeightRecord, ...]


def gather(graphs: Iterable[Graph]) -> dict[str, WeightValues]:
    """Every weight of some graphs once, in order of first use; one name means one expression everywhere."""
    found: dict[str, WeightValues] = {}
    for graph in graphs:
        for name, tensor in graph.weights().items():
            values: WeightValues = tensor._values
            known = found.setdefault(name, values)
            assert known.expression == values.expression, f"{graph.name}: {name} differs from another graph's"
    return found


def place(graphs: Iterable[Graph], placements: Mapping[str, Placement]) -> None:
    """Tell every weight constant of the graphs where its bytes lie, for ONNX external data."""
    for graph in graphs:
        for node in graph.nodes:
            for tensor in node.inputs:
                if is_weight(tensor):
                    tensor._values.placement = placements[tensor.name]


def emit(
    plan: EmissionPlan,
    read: Read,
    folder: Path,
    *,
    expect: Callable[[str], None] = lambda name: None,
    release: Callable[[str], None] | None = None,
    threads: int = 1,
    journal: Journal | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Emission:
    """Write the plan's files into a folder.

    read     source tensors, see `evaluate`; `expect` hears of those that will be read soon
    release  hears of those that are done with; what is written leaves the system's cache too then
    journal  jobs and files it knows are not done again
    advance  is told of source bytes as they are done with
    raises   DscError naming a weight that holds NaN or infinity; OSError
    """
    journal = journal or Journal()
    _forget_what_is_gone(plan, journal, folder)
    with SafetensorsWriter(folder, plan.layouts, journal, release is not None) as files, _Syncing(files) as syncing:
        _tell_what_lies_there(plan, journal, files)
        todo = [number for number in range(len(plan.jobs)) if number not in journal.jobs]
        following = dict(zip(todo, todo[threads:], strict=False))

        def work(number: int) -> None:
            if number in following:
                for source in plan.jobs[following[number]].sources:
                    expect(source.name)
            syncing.check()
            journal.add_job(number, convert(plan.jobs[number], read, files.write, advance))
            if release is not None:
                for source in plan.jobs[number].sources:
                    release(source.name)

        work_through(todo, work, threads)
        tensor_sha256, parts_sha256 = files.finish(threads)
    return Emission(plan.placements, tensor_sha256, parts_sha256, _records(plan, journal.jobs))


def remaining_bytes(plan: EmissionPlan, journal: Journal) -> int:
    """Source bytes that are still to be read."""
    return sum(job.source_bytes for number, job in enumerate(plan.jobs) if number not in journal.jobs)


def outgrows(plan: EmissionPlan, max_ram: int | None) -> bool:
    """Whether source and engine are more than the memory to keep to, and so shall not stay in the system's cache."""
    return plan.source_bytes + plan.file_bytes > memory_to_keep_to(max_ram)


def threads_for(plan: EmissionPlan, max_ram: int | None) -> int:
    """Threads that keep a build within `max_ram` bytes from now on; DscError where not even one does.

    Without it, those that fit a quarter of the machine, and one in any case.
    """
    thread_bytes = max((memory_of(job) for job in plan.jobs), default=0) + THREAD_BYTES
    return threads_within(max_ram, thread_bytes, threads_wanted())


class _Syncing:
    """Every few seconds, have what is written on the disk: so the end waits for little, and little is lost with the power."""

    def __init__(self, files: SafetensorsWriter) -> None:
        self._files, self._stop = files, threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Syncing:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise the OSError that ended it."""
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        while not self._stop.wait(SYNC_SECONDS) and self._failure is None:
            try:
                self._files.sync()
            except OSError as error:
                self._failure = error


def _forget_what_is_gone(plan: EmissionPlan, journal: Journal, folder: Path) -> None:
    """Jobs whose file somebody removed or cut are done again, and a file into which a job is to write is open again.

    The last job of a file is told after the file: a build that was killed in between had finished the file, not the job.
    """
    sizes = {layout.location: layout.nbytes for layout in plan.layouts}
    paths = {location: folder / location for location in sizes}
    gone = {
        location for location, path in paths.items() if not path.is_file() or path.stat().st_size != sizes[location]
    }
    places = [{plan.placements[target.tensor].location for target in job.targets.values()} for job in plan.jobs]
    journal.forget([], [number for number in journal.jobs if places[number] & gone])
    unfinished = gone.union(*(places[number] for number in range(len(places)) if number not in journal.jobs))
    journal.forget([location for location in journal.files if location in unfinished], [])


def _tell_what_lies_there(plan: EmissionPlan, journal: Journal, files: SafetensorsWriter) -> None:
    for number in journal.jobs:
        for target in plan.jobs[number].targets.values():
            files.done(target.tensor, target.offset, target.expression.nbytes)


def _records(plan: EmissionPlan, errors: Mapping[int, Errors]) -> tuple[WeightRecord, ...]:
    outcomes: dict[str, list[Outcome]] = {}
    for number, job in enumerate(plan.jobs):
        if "data" in job.targets:
            outcomes.setdefault(job.weight, []).append(Outcome(outcome(job.segment, errors[number]), errors[number]))
    return tuple(
        make_record(base, [plan.weights[name] for name in names], outcomes[base]) for base, names in plan.groups.items()
    )
