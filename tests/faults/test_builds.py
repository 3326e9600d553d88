"""Builds that end half way: whatever happens, what stands at the output is whole or not there, and the next run is the same."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.builds import dsc, hashes, refusal, start
from support.engines import TINY_R1

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


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_a_file_that_cannot_grow_ends_the_build_with_one_message(
    part: float, whole: dict[str, str], tmp_path: Path
) -> None:
    """A limit on the size of files stands for a full disk: writes fail from some byte of the weights on."""
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
    if number == signal.SIGINT:
        assert {path.name for path in tmp_path.iterdir()} == ({"x.engine"} if existing else set())
    assert no_engine_but(tmp_path)
    assert dsc(*COMPILE[:-1], engine).exit_code == 0
    assert is_whole(engine, whole)
    assert {path.name for path in tmp_path.iterdir()} == {"x.engine"}


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
