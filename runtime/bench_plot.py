"""A plot of decode rate against batch, with the floor drawn in: `python -m dsc.runtime.bench_plot BENCH.json PLOT.png`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dsc.runtime.errors import DscError


def plot(data: dict[str, Any], file: Path) -> None:
    """Write a PNG of the data of `dsc.runtime.bench.measure`. Raises DscError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise DscError("a plot needs matplotlib", try_="pip install 'dsc[bench]'") from error
    FigureCanvasAgg(draw(data)).print_png(str(file))  # type: ignore[no-untyped-call,unused-ignore]


def draw(data: dict[str, Any]) -> Any:
    """The figure: for each context tokens a second over sequences, and, dashed, what the floor would give.

    Points whose figures are withheld (their routing hit too few experts) are left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    contexts = list(dict.fromkeys(point["context"] for point in data["decode"]))
    for number, context in enumerate(contexts):
        points = [p for p in data["decode"] if p["context"] == context and p["tokens_per_s"]]
        color = f"C{number}"
        if points:
            rates = [p["tokens_per_s"] for p in points]
            axes.plot([p["batch"] for p in points], rates, "o-", color=color, label=f"context {context:,}")
        bounded = [p for p in points if p["floor"]]
        if bounded:
            rates = [p["batch"] / p["floor"] for p in bounded]
            axes.plot([p["batch"] for p in bounded], rates, "--", color=color, label=f"floor, context {context:,}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="sequences", ylabel="tokens a second", title=f"{data['engine']}: decode on {data['device']}")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, which="both", alpha=0.3)
    if axes.lines:
        axes.legend()
    return figure


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
