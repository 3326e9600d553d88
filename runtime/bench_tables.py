"""What `dsc bench` prints: the data of `dsc.runtime.bench.measure` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dsc.runtime.bench_routing import LEAST_SHARE, spreads
from dsc.runtime.load_text import load_text
from dsc.runtime.program import layer_of

Data = dict[str, Any]
PIPE_COLUMNS = 160
ABSENT = "-"


def show(data: Data, console: Console | None = None) -> None:
    """Print all of it; figures that mean nothing are dashes, and a line says why."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPE_COLUMNS)
    console.print(f"{data['engine']}: {data['model']}, on {data['device']}", markup=False, highlight=False)
    console.print(load_text(data["load"], data["cache_tokens"]), markup=False, highlight=False)
    console.print(decode_table(data["decode"]))
    for line in notes(data):
        console.print(line, markup=False, highlight=False)
    if data["prefill"]:
        console.print(prefill_table(data["prefill"]))
        for line in prefill_notes(data["prefill"]):
            console.print(line, markup=False, highlight=False)
    sound = [point for point in data["decode"] if point["layers"]]
    if sound:
        console.print(layers_table(sound[-1]))
    if sound and sound[-1]["nodes"]:
        console.print(_times("one node of each kind", sound[-1]["nodes"]))


def decode_table(points: Sequence[Data]) -> Table:
    """One row a batch and context."""
    columns = (
        "batch", "context", "ms a step", "tokens/s", "host gap", "floor ms", "of floor", "experts hit", "MoE layer us",
        "its floor", "launches", "memory",
    )  # fmt: skip
    rows = [
        (
            str(p["batch"]), f"{p['context']:,}", _ms(p["seconds"]), _number(p["tokens_per_s"]), _percent(p["host_gap"]),
            _ms(p["floor"]), _percent(p["floor_share"]), _hits(p), _us(p["moe_layer_seconds"]), _us(p["moe_layer_floor"]),
            _number(p["moe_layer_launches"]), f"{p['memory_bytes'] / 1e9:.1f} GB",
        )
        for p in points
    ]  # fmt: skip
    return _table("decode", columns, rows)


def prefill_table(points: Sequence[Data]) -> Table:
    """One row a batch and context."""
    rows = [
        (str(p["batch"]), f"{p['context']:,}", str(p["prompts"]), _ms(p["seconds"]), _number(p["tokens_per_s"]), _ms(p["floor"]),
         _percent(p["floor_share"]), _hits(p), f"{p['memory_bytes'] / 1e9:.1f} GB")
        for p in points
    ]  # fmt: skip
    columns = ("prompts", "tokens each", "at once", "ms", "tokens/s", "floor ms", "of floor", "experts hit", "memory")
    return _table("prefill, all prompts; at once as many as fill the largest step", columns, rows)


def layers_table(point: Data) -> Table:
    """Every layer of one decode point."""
    return _times(f"a decode step of {point['batch']} x {point['context']:,}, by layer", point["layers"])


def notes(data: Data) -> Iterable[str]:
    """Sentences under the decode table."""
    for context, batch in data["knee"].items():
        if batch is not None and len({p["batch"] for p in data["decode"]}) > 1:
            yield f"context {int(context):,}: batch {batch} has 80 % of the best rate"
    for point in data["decode"]:
        yield from _routing(f"batch {point['batch']}, context {point['context']:,}", point)
    for point in data["decode"]:
        cost = point["launch"]
        if cost and point["layers"]:
            yield (
                f"batch {point['batch']}, context {point['context']:,}: {cost['launches']} launches, each "
                f"{cost['eager'] * 1e6:.1f} us of the host by itself, {cost['graph'] * 1e6:.2f} us in a CUDA graph"
            )


def prefill_notes(points: Sequence[Data]) -> Iterable[str]:
    """Sentences under the prefill table."""
    for point in {(p["prompts"], p["context"]): p for p in points}.values():
        yield from _routing(f"{point['prompts']} prompts of {point['context']:,} at once", point)


def _routing(where: str, point: Data) -> Iterable[str]:
    """What every layer hit, in order, and which ones hit too few experts for figures."""
    experts, independent = point["experts"], point["independent"]
    if not experts:
        return
    names = [layer_of(node) for node in experts]
    span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    counts = ", ".join(_runs([f"{count:.0f}" for count in experts.values()]))
    yield f"{where}: experts hit, {span}: {counts}; by independent routing: {independent:.1f}"
    if not point["valid"]:
        few = [name for name, hit in zip(names, experts.values(), strict=True) if not spreads({name: hit}, independent)]
        yield f"{where}: no figures, since {', '.join(few)} hit under {LEAST_SHARE:.0%} of what independent routing does"


def _runs(values: Sequence[str]) -> Iterable[str]:
    """Values in order, equal ones that follow each other as one: "8, 3 x 7"."""
    for value, equal in groupby(values):
        count = len(list(equal))
        yield value if count == 1 else f"{count} x {value}"


def _times(title: str, parts: Sequence[Data]) -> Table:
    rows = [
        (p["name"], "MoE" if p["moe"] else "", _us(p["seconds"]), _us(p["floor"]),
         _percent(p["floor"] / p["seconds"] if p["floor"] else None), _number(p["launches"]))
        for p in parts
    ]  # fmt: skip
    return _table(title, ("part", "", "us", "floor us", "of floor", "launches"), rows)


def _hits(point: Data) -> str:
    """Experts hit in each layer, as a range where layers differ."""
    hits = sorted({round(count) for count in point["experts"].values()})
    return ABSENT if not hits else str(hits[0]) if len(hits) == 1 else f"{hits[0]}..{hits[-1]}"


def _ms(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{seconds * 1e3:.3f}"


def _us(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{seconds * 1e6:.1f}"


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 and title.startswith(("a ", "one")) else "right")
    for row in rows:
        table.add_row(*row)
    return table
