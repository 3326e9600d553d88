"""Progress of long work on standard error: one bar per step where somebody watches, else a line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

LINE_SECONDS = 60.0  # between lines where there is no terminal
SPEED_SECONDS = 30.0  # over which a speed is taken


class Progress:
    """`with Progress() as p: p.step("weights", total_bytes); p.advance(n)`. Use `quiet` for machine output."""

    def __init__(self, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True, quiet=quiet, soft_wrap=True)
        self._bars = not quiet and self._console.is_terminal
        self._rich = RichProgress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            DownloadColumn(binary_units=False),
            _SpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._bars,
            speed_estimate_period=SPEED_SECONDS,
        )
        self._task: TaskID | None = None
        self._clock, self._lock = clock, threading.Lock()
        self._description, self._total, self._done, self._began, self._told = "", 0, 0, 0.0, 0.0

    def __enter__(self) -> Progress:
        self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rich.stop()

    def step(self, description: str, total_bytes: int | None = None) -> None:
        """Begin the next step; the one before counts as finished."""
        self._finish()
        self._task = self._rich.add_task(description, total=total_bytes)
        self._description, self._total, self._done = description, total_bytes or 0, 0
        self._began = self._told = self._clock()

    def advance(self, num_bytes: int) -> None:
        """Count bytes of the current step as done. From any thread."""
        if self._task is None:
            return
        self._rich.advance(self._task, num_bytes)
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if not self._bars and self._total and now - self._told >= LINE_SECONDS:
                self._told = now
                self._console.print(self._line(now - self._began), highlight=False)

    def tell(self, text: str) -> None:
        """Say something at once."""
        self._console.print(text, highlight=False, markup=False)

    def _line(self, seconds: float) -> str:
        """`weights: 12.3 of 688.6 GB, 0.41 GB/s, 27 min left`; seconds where less than two minutes are left."""
        speed = self._done / seconds
        done = f"{self._description}: {self._done / 1e9:,.1f} of {self._total / 1e9:,.1f} GB, {speed / 1e9:.2f} GB/s"
        if not speed:
            return done
        left = max(self._total - self._done, 0) / speed
        return f"{done}, {left:.0f} s left" if left < 120 else f"{done}, {left / 60:,.0f} min left"

    def _finish(self) -> None:
        if self._task is not None:
            task = self._rich.tasks[self._task]
            self._rich.update(self._task, total=task.total or 1, completed=task.total or 1)


class _SpeedColumn(ProgressColumn):
    """Bytes a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed / 1e9:.2f} GB/s" if speed else "", style="progress.data.speed")
