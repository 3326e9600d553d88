"""dsc bench --plot: every rate is where it belongs, with its floor above it; what was withheld is not drawn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsc.runtime.bench_plot import draw, plot

POINTS = [
    {"batch": 1, "context": 2048, "tokens_per_s": 50.0, "floor": 0.01},
    {"batch": 16, "context": 2048, "tokens_per_s": 400.0, "floor": 0.02},
    {"batch": 1, "context": 4096, "tokens_per_s": 40.0, "floor": None},
    {"batch": 16, "context": 4096, "tokens_per_s": None, "floor": 0.02},
]


def figure_of(points: list[dict[str, Any]]) -> Any:
    return draw({"engine": "some.engine", "device": "a chip", "decode": points}).axes[0]


def test_rates_and_floors() -> None:
    axes = figure_of(POINTS)
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert lines == {
        "context 2,048": ([1, 16], [50.0, 400.0]),
        "floor, context 2,048": ([1, 16], [100.0, 800.0]),  # sequences by the seconds a step takes at least
        "context 4,096": ([1], [40.0]),
    }
    styles = {line.get_label(): (line.get_linestyle(), line.get_color()) for line in axes.lines}
    assert styles["floor, context 2,048"] == ("--", styles["context 2,048"][1])
    assert styles["context 4,096"][1] != styles["context 2,048"][1]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_title() == "some.engine: decode on a chip"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(lines)


@pytest.mark.parametrize("points", [POINTS, [POINTS[-1]], []], ids=["some", "none with figures", "none"])
def test_the_file(points: list[dict[str, Any]], tmp_path: Path) -> None:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot({"engine": "e", "device": "d", "decode": points}, tmp_path / "plot.png")
    pixels = np.asarray(Image.open(tmp_path / "plot.png").convert("RGB"))
    assert pixels.shape == (500, 800, 3)
    blue = (abs(pixels.astype(int) - (31, 119, 180)) < 20).all(-1).sum()  # C0, the first context's colour
    assert (blue > 200) == (points == POINTS)
