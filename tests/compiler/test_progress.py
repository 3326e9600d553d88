"""Progress of long work: how much of what is done, how fast and how long it takes yet; nothing where nobody is to read it."""

from __future__ import annotations

import threading

import pytest

from dsc.compiler.progress import LINE_SECONDS, Progress

GB = 10**9


class Clock:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):  # what makes rich take a pipe for a terminal
        monkeypatch.delenv(name, raising=False)
    return Clock()


def advance(progress: Progress, clock: Clock, seconds: float, num_bytes: int) -> None:
    clock.now += seconds
    progress.advance(num_bytes)


def test_a_line_a_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(clock=clock) as progress:
        progress.step("weights", 700 * GB)
        advance(progress, clock, 59, 20 * GB)
        assert capsys.readouterr() == ("", "")
        advance(progress, clock, 1, 4 * GB)
        assert capsys.readouterr() == ("", "weights: 24.0 of 700.0 GB, 0.40 GB/s, 28 min left\n")
        advance(progress, clock, 59, 0)
        assert capsys.readouterr() == ("", "")
        advance(progress, clock, 1, 3 * GB)
        assert capsys.readouterr().err == "weights: 27.0 of 700.0 GB, 0.23 GB/s, 50 min left\n"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("total", "left"),
    [
        (200 * GB, "190 min left"),
        (3_600 * GB, "3,590 min left"),
        (2_000 * GB + 10 * GB, "2,000 min left"),
        (12 * GB, "2 min left"),  # from two minutes on
        (12 * GB - GB // 60, "119 s left"),
        (10 * GB + GB // 2, "30 s left"),
        (10 * GB + 1, "0 s left"),
        (10 * GB, "0 s left"),
        (9 * GB, "0 s left"),  # more than was announced
    ],
)
def test_what_is_left(total: int, left: str, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """10 GB in ten minutes are done."""
    with Progress(clock=clock) as progress:
        progress.step("weights", total)
        advance(progress, clock, 600, 10 * GB)
    assert capsys.readouterr().err.endswith(f" GB, 0.02 GB/s, {left}\n")


def test_nothing_done_promises_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(clock=clock) as progress:
        progress.step("weights", 5 * GB)
        advance(progress, clock, LINE_SECONDS, 0)
    assert capsys.readouterr().err == "weights: 0.0 of 5.0 GB, 0.00 GB/s\n"


def test_each_step_begins_anew(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A step without a size says nothing."""
    with Progress(clock=clock) as progress:
        progress.advance(GB)  # before any step
        progress.step("graphs")
        advance(progress, clock, 500, 70 * GB)
        progress.step("weights", 50 * GB)
        advance(progress, clock, LINE_SECONDS, 30 * GB)
        progress.tell("[a note]")
    assert capsys.readouterr().err == "weights: 30.0 of 50.0 GB, 0.50 GB/s, 40 s left\n[a note]\n"


def test_threads_count_together(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Every byte once, and a line once."""
    with Progress(clock=clock) as progress:
        progress.step("weights", 4 * GB)
        clock.now += 10
        workers = [
            threading.Thread(target=lambda: [progress.advance(10**6) for _ in range(500)]) for _ in range(4)
        ]  # fmt: skip
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        advance(progress, clock, 90, 0)
        advance(progress, clock, 0, 0)
    assert capsys.readouterr().err == "weights: 2.0 of 4.0 GB, 0.02 GB/s, 100 s left\n"


def test_quiet(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(quiet=True, clock=clock) as progress:
        progress.step("weights", 50 * GB)
        advance(progress, clock, 600, 30 * GB)
        progress.tell("a note")
    assert capsys.readouterr() == ("", "")


def test_bars_where_somebody_watches(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bars instead of lines, on standard error too."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Progress(clock=clock) as progress:
        progress.step("weights", 50 * GB)
        advance(progress, clock, 600, 30 * GB)
    told = capsys.readouterr()
    assert told.out == ""
    assert "weights" in told.err
    assert "30.0/50.0 GB" in told.err
    assert " left" not in told.err
