"""Emission that is killed at many points and gone on with: the same bytes as undisturbed, and no job done twice without need."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.damage import parts_sha256
from support.families import make_checkpoint

from dsc.compiler import emit as emission_
from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.emission_plan import EmissionPlan, plan_emission
from dsc.compiler.emit import Emission, emit, gather, remaining_bytes
from dsc.compiler.importer.model import import_main
from dsc.compiler.ir.weight import Quantize, WeightValues
from dsc.compiler.journal import Journal
from dsc.compiler.quantize import Errors
from dsc.compiler.safetensors_writer import SafetensorsWriter
from dsc.plugins.formats import parse_format

IDENTITY = {"the recipe": "abc"}
FORMATS = {"experts": "wint4:32", "attention": "fp8", "dense_mlp": "wint8"}
FILE_BYTES = 300_000


class Build:
    """Emission of a small checkpoint into a folder, with its journal beside it."""

    def __init__(self, checkpoint: Checkpoint, plan: EmissionPlan, folder: Path) -> None:
        self.checkpoint, self.plan, self.folder = checkpoint, plan, folder
        self.path = folder / ".journal"
        self.read_bytes = 0

    def run(self, threads: int = 1) -> Emission:
        self.folder.mkdir(exist_ok=True)
        journal = Journal(self.path, IDENTITY)
        journal.begin()
        try:
            return emit(self.plan, self.read, self.folder, journal=journal, threads=threads)
        finally:
            journal.close()

    def read(self, name: str, rows: slice | None) -> torch.Tensor:
        values = self.checkpoint.read(name, rows)
        self.read_bytes += values.nbytes
        return values

    def parts_sha256(self, location: str) -> str:
        """Of a file as it lies there."""
        places = [(p.offset, p.length) for p in self.plan.placements.values() if p.location == location]
        return parts_sha256((self.folder / location).read_bytes(), places)

    def killed(self, arm: Callable[[], None]) -> None:
        """Run in a process of its own, which kills itself where `arm` says."""

        def child() -> None:
            arm()
            self.run(threads=2)
            os._exit(0)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, EmissionPlan]:
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "r1", num_hidden_layers=2)
    checkpoint = Checkpoint.open(folder, read_config(folder))
    weights = {}
    for name, values in gather([import_main(checkpoint.spec, checkpoint.source, 64)]).items():
        format_ = parse_format(FORMATS.get(values.weight_class, "bf16"))
        for part in format_.parts(values.expression.shape) if values.weight_class != "exact" else ():
            tensor = name if part == "data" else f"{name.removesuffix('.weight')}.scales"
            weights[tensor] = WeightValues(tensor, Quantize(values.expression, str(format_), part), values.weight_class)
    return checkpoint, plan_emission(weights, position=checkpoint.position, file_bytes_max=FILE_BYTES)


@pytest.fixture(scope="module")
def undisturbed(source: tuple[Checkpoint, EmissionPlan], tmp_path_factory: pytest.TempPathFactory) -> Emission:
    build = Build(*source, tmp_path_factory.mktemp("undisturbed"))
    emission = build.run()
    assert len(emission.parts_sha256) > 5
    return emission


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: object, name: str, call: int) -> Callable[[], None]:
    """Die at the n-th call of a function."""

    def arm() -> None:
        inner, calls, lock = getattr(owner, name), iter(range(call)), threading.Lock()

        def counted(*arguments: object, **options: object) -> object:
            with lock:
                if next(calls, None) is None:
                    kill()
            return inner(*arguments, **options)

        setattr(owner, name, counted)

    return arm


POINTS = {
    "at the first job": before(emission_, "convert", 0),
    "at a later job": before(emission_, "convert", 25),
    "before the first bytes": before(SafetensorsWriter, "write", 0),
    "between data and scales": before(SafetensorsWriter, "write", 41),
    "between the bytes and the journal": before(Journal, "add_job", 30),
    "before a file's hash is kept": before(Journal, "add_file", 2),
    "before all is hashed": before(SafetensorsWriter, "finish", 0),
    "before all is on the disk": before(SafetensorsWriter, "sync", 0),
    "between a file and the job that filled it": lambda: after_a_file(),
    "half way through a line of the journal": lambda: half_a_line(40),
}


def after_a_file() -> None:
    add_file, add_job, files = Journal.add_file, Journal.add_job, []

    def told(self: Journal, location: str, digest: str, tensors: dict[str, str]) -> None:
        add_file(self, location, digest, tensors)
        files.append(location)

    def not_told(self: Journal, number: int, errors: Errors) -> None:
        if len(files) > 2:
            kill()
        add_job(self, number, errors)

    Journal.add_file, Journal.add_job = told, not_told  # type: ignore[method-assign]


def half_a_line(number: int) -> None:
    append, lines = Journal._append, iter(range(number))

    def cut(self: Journal, entry: dict[str, object]) -> None:
        if next(lines, None) is None:
            os.write(self._handle, b'{"job":1')
            kill()
        append(self, entry)

    Journal._append = cut  # type: ignore[method-assign]


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed_is_as_undisturbed(
    point: str, source: tuple[Checkpoint, EmissionPlan], undisturbed: Emission, tmp_path: Path
) -> None:
    build = Build(*source, tmp_path / "killed")
    build.killed(POINTS[point])
    journal = Journal(build.path, IDENTITY)
    left = remaining_bytes(build.plan, journal)
    assert (left < build.plan.source_bytes) == bool(journal.jobs)
    assert bool(journal.jobs) == (point not in ("at the first job", "before the first bytes"))
    resumed = build.run(threads=2)
    assert resumed == undisturbed
    for location, digest in undisturbed.parts_sha256.items():
        assert build.parts_sha256(location) == digest
    # The grid of a matrix of 4-bit codes is chosen by a sample that is read twice; all else that is done is not read again.
    assert build.read_bytes <= 2 * left


def test_killed_again_and_again(source: tuple[Checkpoint, EmissionPlan], undisturbed: Emission, tmp_path: Path) -> None:
    build = Build(*source, tmp_path / "killed")
    done = [0]
    for _ in range(4):
        build.killed(before(Journal, "add_job", 12))
        done.append(len(Journal(build.path, IDENTITY).jobs))
    assert done == [0, 12, 24, 36, 48]
    assert build.run() == undisturbed


@pytest.mark.parametrize("fault", ["gone", "cut", "grown"])
def test_a_file_that_somebody_touched_is_made_again(
    fault: str, source: tuple[Checkpoint, EmissionPlan], undisturbed: Emission, tmp_path: Path
) -> None:
    build = Build(*source, tmp_path / "touched")
    build.killed(before(SafetensorsWriter, "sync", 0))
    location = sorted(undisturbed.parts_sha256)[2]
    file = build.folder / location
    if fault == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size + (-1 if fault == "cut" else 1))
    assert build.run() == undisturbed
    assert build.parts_sha256(location) == undisturbed.parts_sha256[location]


def test_what_is_done_is_not_done_again(
    source: tuple[Checkpoint, EmissionPlan], undisturbed: Emission, tmp_path: Path
) -> None:
    build = Build(*source, tmp_path / "twice")
    assert build.run() == undisturbed
    build.read_bytes = 0
    assert build.run() == undisturbed
    assert build.read_bytes == 0
