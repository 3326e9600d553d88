"""What `dsc diff` prints: the data of `dsc.runtime.diff.diff` as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from dsc.runtime.inspect_tables import PIPE_COLUMNS, make_table, size_text

Data = dict[str, Any]
SHOWN = 40  # rows of a table; --json has all


def show(data: Data, console: Console | None = None) -> None:
    """Print what differs, nothing of what does not."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPE_COLUMNS)
    if data["same"]:
        console.print(f"the same engine: content hash {data['a']['content_hash']}", highlight=False)
    for title in ("spec", "recipe", "toolchain"):
        _print(console, title, ("key", "a", "b"), [(row["key"], str(row["a"]), str(row["b"])) for row in data[title]])
    sites = [(row["pass"], row["graph"], _count(row["a"]), _count(row["b"])) for row in data["fusion"]]
    _print(console, "fusion sites found", ("pass", "graph", "a", "b"), sites)
    if data["tensors"]:
        schemes = Counter((row["a"], row["b"]) for row in data["tensors"])
        _print(console, "weights by format", ("a", "b", "weights"), [(*key, f"{n:,}") for key, n in schemes.items()])
        _print(
            console, "weights", ("weight", "a", "b", "bytes", "largest", "relative", "at"), _weights(data["tensors"])
        )
    _print(console, "kernels", ("kernel", "a", "b"), [(row["kernel"], row["a"], row["b"]) for row in data["kernels"]])
    _print(console, "other files that differ", ("file",), [(name,) for name in data["files"]])
    rows = [(row["key"], str(row["a"]), str(row["b"])) for row in data["certificate"]]
    _print(console, "certificate", ("measured", "a", "b"), rows)


def _weights(rows: Sequence[Data]) -> list[tuple[str, ...]]:
    """The largest relative changes first, weights that only one of them has before all."""
    rows = sorted(rows, key=lambda row: (-row.get("relative", float("inf")), row["weight"]))
    return [
        (
            row["weight"],
            row["a"],
            row["b"],
            " / ".join(size_text(size) for size in dict.fromkeys((row["bytes_a"], row["bytes_b"]))),
            f"{row['largest']:.4g}" if "largest" in row else "-",
            f"{row['relative']:.4g}" if "relative" in row else "-",
            row.get("at", "-"),
        )
        for row in rows
    ]  # fmt: skip


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _print(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        console.print(make_table(title, columns, rows[:SHOWN]))
    if len(rows) > SHOWN:
        console.print(f"and {len(rows) - SHOWN:,} more: --json has all of them\n", highlight=False)
