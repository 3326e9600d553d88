"""What `dsc inspect --kernels` prints: the data of `dsc.runtime.inspect_kernels` as tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from dsc.runtime.inspect_tables import make_table, size_text

Data = dict[str, Any]
PIPE_COLUMNS = 190
ABSENT = "-"


def show_kernels(kernels: Sequence[Data], steps: Sequence[Data], console: Console | None = None) -> None:
    """Print every kernel, then what each step launches."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPE_COLUMNS)
    console.print(kernels_table(kernels))
    console.print(summary(kernels), markup=False, highlight=False)
    for kernel in kernels:
        name = f"{kernel['entry']} {_digits(kernel['cubin'])}"
        for key, told in (("remedy", "spilled, compiled again"), ("allowed", "allowed")):
            if kernel[key]:
                console.print(f"{name}: {told}: {kernel[key]}", markup=False, highlight=False)
    console.print(steps_table(steps))


def kernels_table(kernels: Sequence[Data]) -> Table:
    """A row a cubin; the last columns count its launches in a step of each graph, by the step's tokens."""
    graphs = [graph for graph in (kernels[0]["launches"] if kernels else {}) if _launched(kernels, graph)]
    rows = [
        (
            f"{k['entry']} {_digits(k['cubin'])}",
            ", ".join(k["ops"]),
            _told(k["registers"]),
            _told(k["stack_bytes"]),
            _told(k["static_shared_bytes"]),
            f"{k['dynamic_shared_bytes']:,}",
            str(k["threads"]),
            ABSENT if k["tensor_cores"] is None else ", ".join([*k["tensor_cores"], *["FP8"] * bool(k["fp8"])]),
            size_text(k["bytes"]),
            *("/".join(str(n or ABSENT) for n in k["launches"][graph].values()) for graph in graphs),
        )
        for k in kernels
    ]
    sizes = {graph: "/".join(kernels[0]["launches"][graph]) for graph in graphs}
    counted = [f"{graph.replace('.', chr(10))}\n{sizes[graph]}" for graph in graphs]
    facts = ("kernel", "op", "regs", "stack", "static\nshared", "dynamic\nshared", "threads", "tensor cores", "cubin")
    title = "kernels; the last columns are launches in a step of so many tokens"
    right = (2, 3, 4, 5, 6, 8, *range(len(facts), len(facts) + len(graphs)))
    return make_table(title, (*facts, *counted), rows, right=right)


def summary(kernels: Sequence[Data]) -> str:
    """One line: how many, how large, whether any spills."""
    spilling = sorted({k["entry"] for k in kernels if k["stack_bytes"]})
    spills = f"spilling: {', '.join(spilling)}" if spilling else "none spills"
    if any(k["stack_bytes"] is None for k in kernels):
        spills = "whether they spill was not looked at when this engine was built"
    count = "1 cubin" if len(kernels) == 1 else f"{len(kernels)} cubins"
    return f"{count}, {size_text(sum(k['bytes'] for k in kernels))}, {spills}"


def steps_table(steps: Sequence[Data]) -> Table:
    """A row a step: its launches, calls of cuBLAS and exchanges with other ranks among them, and how many each layer has."""
    calls = {"cuBLAS": "gemm"} | ({"exchanges": "collective"} if any("collective" in s["kinds"] for s in steps) else {})
    rows = [
        (
            s["graph"],
            f"{s['tokens']:,}",
            f"{s['launches']:,}",
            *(f"{s['kinds'].get(kind, 0)}" for kind in calls.values()),
            ", ".join(_parts(s["parts"])),
        )
        for s in steps
    ]
    columns = ("graph", "tokens", "launches", *calls, "by part")
    return make_table("launches a step", columns, rows, right=range(1, len(columns) - 1))


def _parts(parts: dict[str, int]) -> Iterable[str]:
    """Layers that follow each other with as many launches in one go."""
    layers = [(int(name.removeprefix("layers.")), n) for name, n in parts.items() if re.fullmatch(r"layers\.\d+", name)]
    for count, group in groupby(layers, key=lambda item: item[1]):
        numbers = [number for number, _ in group]
        name = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}"
        yield f"{name}: {count}{' each' if len(numbers) > 1 else ''}"
    yield from (f"{name}: {count}" for name, count in parts.items() if not name.startswith("layers."))


def _launched(kernels: Sequence[Data], graph: str) -> bool:
    return any(any(kernel["launches"][graph].values()) for kernel in kernels)


def _digits(cubin: str) -> str:
    """The part of a cubin's name that tells it from others of the same kernel."""
    return cubin.rpartition("-")[2].removesuffix(".cubin")


def _told(number: int | None) -> str:
    return ABSENT if number is None else f"{number:,}"
