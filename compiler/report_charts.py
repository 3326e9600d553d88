"""Charts of an engine's report as inline SVG: a treemap of bytes, errors by layer, a memory plan. No script, no font."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#9c755f", "#edc948", "#bab0ac")
LEAST_LABEL = 70  # a rectangle this wide, and 28 high, has room for its name


@dataclass(frozen=True)
class Box:
    """A rectangle with what it stands for."""

    label: str
    title: str
    value: float
    color: str


@dataclass(frozen=True)
class _Area:
    x: float
    y: float
    width: float
    height: float


def treemap(boxes: Sequence[Box], width: int = 1000, height: int = 360) -> str:
    """Rectangles whose areas are the values: the larger side is cut into two halves of about the same sum, over and over."""
    kept = sorted((box for box in boxes if box.value > 0), key=lambda box: -box.value)
    cells = "".join(_cell(box, area) for box, area in _cut(kept, _Area(0, 0, width, height)))
    return _svg(width, height, cells)


def _cut(boxes: Sequence[Box], area: _Area) -> list[tuple[Box, _Area]]:
    if len(boxes) <= 1:
        return [(box, area) for box in boxes]
    total, first, count = sum(box.value for box in boxes), 0.0, 0
    while count < len(boxes) - 1 and (count == 0 or first + boxes[count].value <= total / 2):
        first += boxes[count].value
        count += 1
    share = first / total
    if area.width >= area.height:
        one = _Area(area.x, area.y, area.width * share, area.height)
        other = _Area(area.x + one.width, area.y, area.width - one.width, area.height)
    else:
        one = _Area(area.x, area.y, area.width, area.height * share)
        other = _Area(area.x, area.y + one.height, area.width, area.height - one.height)
    return [*_cut(boxes[:count], one), *_cut(boxes[count:], other)]


def _cell(box: Box, area: _Area) -> str:
    text = ""
    if area.width >= LEAST_LABEL and area.height >= 28:
        shown = box.label[: int(area.width // 7)]
        text = f'<text x="{area.x + 5:.1f}" y="{area.y + 17:.1f}" fill="#fff">{escape(shown)}</text>'
    return _rect(area, box.color, box.title) + text


def lines(
    series: Sequence[tuple[str, Sequence[float]]], labels: Sequence[str], width: int = 1000, height: int = 260
) -> str:
    """One line a series over the same labelled places, from 0 to the largest value, which the axis names."""
    left, bottom, top = 70, 40, 24
    most = max((value for _, values in series for value in values), default=0.0) or 1.0
    step = (width - left - 20) / max(len(labels) - 1, 1)

    def place(index: int, value: float) -> tuple[float, float]:
        return left + index * step, height - bottom - value / most * (height - bottom - top)

    parts = []
    for share in (0.0, 0.5, 1.0):
        y = place(0, most * share)[1]
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{width - 20}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{most * share:.3g}</text>')
    every = max(-(-len(labels) // 16), 1)
    for index in range(0, len(labels), every):
        x = place(index, 0)[0]
        parts.append(
            f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{escape(labels[index])}</text>'
        )
    for number, (name, values) in enumerate(series):
        color = COLORS[number % len(COLORS)]
        points = [place(index, value) for index, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (x, y), label, value in zip(points, labels, values, strict=True):
            title = escape(f"{name}, {label}: {value:.4g}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{title}</title></circle>')
        parts.append(f'<text x="{left + 190 * number}" y="14" fill="{color}">{escape(name)}</text>')
    return _svg(width, height, "".join(parts))


def memory_map(
    tensors: Sequence[tuple[str, int, int, int, int]],
    num_nodes: int,
    arena_bytes: int,
    width: int = 1000,
    height: int = 300,
) -> str:
    """Tensors (name, first and last byte, first and last node) as rectangles: nodes to the right, bytes up."""
    nodes, most = max(num_nodes, 1), max(arena_bytes, 1)
    parts = [f'<rect x="0" y="0" width="{width}" height="{height}" fill="#f4f4f4"/>']
    for number, (name, begin, end, first, last) in enumerate(tensors):
        area = _Area(
            first / nodes * width,
            height - end / most * height,
            max((last - first + 1) / nodes * width, 0.5),
            max((end - begin) / most * height, 0.5),
        )
        parts.append(
            _rect(
                area,
                COLORS[number % len(COLORS)],
                f"{name}: {end - begin:,} bytes at {begin:,}, nodes {first} to {last}",
            )
        )
    return _svg(width, height, "".join(parts))


def _rect(area: _Area, color: str, title: str) -> str:
    return (
        f'<rect x="{area.x:.2f}" y="{area.y:.2f}" width="{area.width:.2f}" height="{area.height:.2f}" fill="{color}" '
        f'stroke="#fff" stroke-width="0.6"><title>{escape(title)}</title></rect>'
    )


def _svg(width: int, height: int, content: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="100%" role="img">{content}</svg>'
