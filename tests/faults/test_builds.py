"""Builds that end half way: whatever happens, what stands at the output is whole or not there, and the next run is the same."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.builds import dsc, hashes, refusal, start
from support.engines import TINY_R1

from dsc.compiler.convert import convert
from dsc.compiler.hashed_file import write_all
from dsc.compiler.pieces import THREADS_MAX
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError

COMPILE = ("compile", "--recipe", "tiny-r1-wint4", "--model", TINY_R1, "--output", "x.engine")

TINY_WEIGHTS = 8_000_000  # bytes; the engine has more


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Hashes of an undisturbed build's files."""
    folder = tmp_path_factory.mktemp("whole") / "x.engine"
    assert dsc(*COMPILE[:-1], folder).exit_code == 0
    assert sum(path.stat().st_size for path in (folder / "weights").iterdir()) > TINY_WEIGHTS + 8192
    return hashes(folder)


def is_whole(engine: Path, whole: dict[str, str]) -> bool:
    return engine.is_dir() and hashes(engine) == whole


def no_engine_but(folder: Path, allowed: tuple[str, ...] = ()) -> bool:
    """Nothing below a folder passes for an engine, hidden folders included, unless it is one and whole."""
    for path in folder.rglob("manifest.json"):
        if path.parent.name in allowed:
            continue
        try:
            EngineFolder.open(path.parent).verify_hashes()
        except DscError:
            return False
    return True


# -- a disk that is full at half


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half the weights' size."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TINY_WEIGHTS // 2}", "tmpfs", str(disk)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_others_filled_meanwhile_ends_the_build_at_half(
    whole: dict[str, str], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was room when the build looked; later there is, and the same command goes on."""
    engine = small_disk / "x.engine"
    assert "disk" in refusal(*COMPILE[:-1], engine)
    assert not list(small_disk.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("dsc.compiler.staging.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
        text = refusal(*COMPILE[:-1], engine)
    assert "x.engine: the build cannot be written" in text
    assert "No space left on device" in text
    assert no_engine_but(small_disk)
    written = sum(path.stat().st_blocks * 512 for path in small_disk.rglob("*") if path.is_file())
    assert TINY_WEIGHTS // 4 < written < TINY_WEIGHTS * 3 // 5
    subprocess.run(["mount", "-o", "remount,size=100M", str(small_disk)], check=True)
    done = dsc(*COMPILE[:-1], engine)
    assert done.exit_code == 0
    assert "note: " in done.stderr
    assert is_whole(engine, whole)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_a_file_that_cannot_grow_ends_the_build_with_one_message(
    part: float, whole: dict[str, str], tmp_path: Path
) -> None:
    """A limit on the size of files: the room that the weights take is asked for at the start."""
    limit = 4096 + int(part * TINY_WEIGHTS)

    def small_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = start(*COMPILE, cwd=tmp_path, preexec_fn=small_disk)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2, stderr
    assert b"Traceback" not in stderr
    assert b"x.engine: the build cannot be written" in stderr
    assert not list(tmp_path.iterdir())
    assert dsc(*COMPILE[:-1], tmp_path / "x.engine").exit_code == 0
    assert is_whole(tmp_path / "x.engine", whole)


# -- killed at half


@pytest.mark.parametrize(
    ("number", "existing"),
    [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGTERM, False), (signal.SIGINT, True)],
)
def test_a_killed_build_leaves_the_old_engine_or_none(
    number: signal.Signals, existing: bool, whole: dict[str, str], tmp_path: Path
) -> None:
    """Killed as soon as the first weights are on the disk; the next run ends in the bytes of an undisturbed build."""
    engine = tmp_path / "x.engine"
    if existing:
        assert dsc("compile", "--recipe", "tiny-r1-bf16", "--model", TINY_R1, "--output", engine).exit_code == 0
    before = hashes(engine) if existing else {}
    process = start(*COMPILE, cwd=tmp_path)
    _wait_for(lambda: any(tmp_path.glob(".x.engine*/weights/*")), process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"Traceback" not in stderr
    assert (hashes(engine) if engine.exists() else {}) == before
    if number == signal.SIGINT:  # it could clean up, and says what it left
        left = {path.name for path in tmp_path.iterdir()} - {"x.engine"}
        assert left == ({".x.engine.partial"} if b"what is done is kept in" in stderr else set())
    assert no_engine_but(tmp_path)
    assert dsc(*COMPILE[:-1], engine).exit_code == 0
    assert is_whole(engine, whole)
    assert {path.name for path in tmp_path.iterdir()} == {"x.engine"}


# -- the next run goes on where it stopped

# Arguments: how many weights are done before the process kills itself, then those of dsc.
KILLED_AFTER = """
import os, signal, sys
from dsc.compiler.cli import main
from dsc.compiler.journal import Journal

left, add_job = int(sys.argv.pop(1)), Journal.add_job

def counted(journal, number, errors):
    global left
    add_job(journal, number, errors)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

Journal.add_job = counted
main()
"""


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every piece of a weight that a build in this process makes."""
    done: list[int] = []

    def counted(job: Any, *arguments: Any) -> Any:
        done.append(job.source_bytes)
        return convert(job, *arguments)

    monkeypatch.setattr("dsc.compiler.emit.convert", counted)
    return done


@pytest.fixture(scope="module")
def num_jobs(tmp_path_factory: pytest.TempPathFactory) -> int:
    with pytest.MonkeyPatch.context() as patch:
        done: list[int] = []
        patch.setattr("dsc.compiler.emit.convert", lambda *arguments: (done.append(1), convert(*arguments))[1])
        assert dsc(*COMPILE[:-1], tmp_path_factory.mktemp("counted") / "x.engine").exit_code == 0
    assert len(done) > 50
    return len(done)


def killed_after(count: int, folder: Path) -> None:
    command = [sys.executable, "-c", KILLED_AFTER, str(count), *map(str, COMPILE)]
    assert subprocess.run(command, cwd=folder, capture_output=True, timeout=120).returncode == -signal.SIGKILL


@pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
def test_a_second_run_goes_on_and_does_nothing_twice(
    part: float, whole: dict[str, str], num_jobs: int, converted: list[int], tmp_path: Path
) -> None:
    count = max(1, int(part * num_jobs))
    killed_after(count, tmp_path)
    result = dsc(*COMPILE[:-1], tmp_path / "x.engine")
    assert result.exit_code == 0
    assert "note: goes on with a build that was cut short" in result.stderr
    assert num_jobs - count - THREADS_MAX <= len(converted) <= num_jobs - count
    assert is_whole(tmp_path / "x.engine", whole)
    assert {path.name for path in tmp_path.iterdir()} == {"x.engine"}


def test_a_second_run_on_a_disk_with_room_goes_on(
    whole: dict[str, str], num_jobs: int, converted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        if len(converted) > num_jobs // 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("dsc.compiler.hashed_file.write_all", full)
        text = refusal(*COMPILE[:-1], tmp_path / "x.engine")
    assert "x.engine: the build cannot be written" in text
    assert "try  the same command, once there is room: it goes on from what is done" in text
    converted.clear()
    assert dsc(*COMPILE[:-1], tmp_path / "x.engine").exit_code == 0
    assert num_jobs // 3 < len(converted) <= num_jobs - num_jobs // 3
    assert is_whole(tmp_path / "x.engine", whole)


def test_a_second_run_of_something_else_starts_anew(num_jobs: int, converted: list[int], tmp_path: Path) -> None:
    killed_after(num_jobs // 2, tmp_path)
    other = dsc("compile", "--recipe", "tiny-r1-wint8", "--model", TINY_R1, "--output", tmp_path / "x.engine")
    assert other.exit_code == 0
    assert "starts anew: changed since the build that was cut short: the recipe" in " ".join(other.stderr.split())
    assert len(converted) > num_jobs // 2
    assert EngineFolder.open(tmp_path / "x.engine").manifest.recipe["name"] == "tiny-r1-wint8"


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.001)


# -- a source that is read only, and stays as it is


def test_a_source_is_only_read(tmp_path: Path, whole: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns it: root may write anywhere, so the folder is compared, times included."""
    model = shutil.copytree(TINY_R1, tmp_path / "model")
    for path in (*model.iterdir(), model):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat() for path in (model, *model.iterdir())}
    monkeypatch.chdir(tmp_path)
    assert dsc("compile", "--recipe", "tiny-r1-wint4", "--model", model, "--output", "x.engine").exit_code == 0
    for path, stats in before.items():
        after = path.stat()
        assert (after.st_mtime_ns, after.st_size, after.st_mode) == (stats.st_mtime_ns, stats.st_size, stats.st_mode)
    assert is_whole(tmp_path / "x.engine", whole)
    assert all(stat.S_IMODE(p.stat().st_mode) & 0o200 for p in (tmp_path / "x.engine").rglob("*"))
    model.chmod(0o755)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = refusal(*COMPILE[:-1], tmp_path / "file" / "x.engine")
    assert "x.engine: " in text
    assert "cannot be written" in text
    text = refusal(*COMPILE[:-1], tmp_path / "x.engine", "--dump", tmp_path / "file")
    assert str(tmp_path / "file") in text
    if os.path.isdir("/proc"):
        assert "/proc/x.engine" in refusal(*COMPILE[:-1], "/proc/x.engine")
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_what_is_no_engine_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("words")
    assert "holds something else than an engine" in refusal(*COMPILE[:-1], tmp_path / "thesis")
    (tmp_path / "file").write_text("words")
    assert "file" in refusal(*COMPILE[:-1], tmp_path / "file")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == (tmp_path / "file").read_text() == "words"
