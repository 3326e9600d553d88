"""Progress of long work on the terminal: one bar per step, on standard error, silent where nobody watches."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress


class Progress:
    """`with Progress() as p: p.step("weights", total_bytes); p.advance(n)`. Use `quiet` for machine output."""

    def __init__(self, quiet: bool = False) -> None:
        console = Console(stderr=True, quiet=quiet)
        self._rich = RichProgress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            _OfBytes(DownloadColumn(binary_units=False)),
            _OfBytes(TransferSpeedColumn()),
            _OfBytes(TimeRemainingColumn(), TimeElapsedColumn()),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID | None = None

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
        self._task = self._rich.add_task(description, total=total_bytes, of_bytes=total_bytes is not None)

    def advance(self, num_bytes: int) -> None:
        """Count bytes of the current step as done."""
        if self._task is not None:
            self._rich.advance(self._task, num_bytes)

    def _finish(self) -> None:
        if self._task is not None:
            task = self._rich.tasks[self._task]
            self._rich.update(self._task, total=task.total or 1, completed=task.total or 1)


class _OfBytes(ProgressColumn):
    """A column of steps that count bytes; the others show `other`, or nothing."""

    def __init__(self, column: ProgressColumn, other: ProgressColumn | None = None) -> None:
        super().__init__()
        self._column, self._other = column, other

    def render(self, task: Task) -> RenderableType:
        column = self._column if task.fields["of_bytes"] else self._other
        return column.render(task) if column is not None else ""
