"""What became of each weight on its way into the engine, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsc.compiler.ir.weight import Quantize, WeightValues
from dsc.compiler.quantize import Errors, add_errors
from dsc.compiler.tensor_names import fold_names


@dataclass(frozen=True)
class Outcome:
    """What became of one segment of a weight: `dsc.compiler.convert.outcome`, and what rounding cost it."""

    verdict: str
    errors: Errors


@dataclass(frozen=True)
class WeightRecord:
    """What became of one weight, for the report. Errors are rounded to three significant digits.

    name       as in the checkpoint; format a storage format, or a dtype where the recipe has no say
    verdict    see `dsc.compiler.convert.outcome`; with counts where a weight's matrices differ
    sources    tensors of the checkpoint it is made of, numbers folded: experts.{0-255}; () for a table
    grids      wint4: matrices by their codes
    """

    name: str
    weight_class: str
    format: str
    shape: tuple[int, ...]
    stored_bytes: int
    verdict: str
    relative_error: float
    worst_row_error: float
    saturated: int
    zero_groups: int
    sources: tuple[str, ...]
    grids: Mapping[str, int]


def make_record(name: str, stored: Sequence[WeightValues], outcomes: Sequence[Outcome]) -> WeightRecord:
    """The record of a weight from its stored tensors (data, scales) and what became of its segments."""
    values, total = stored[0], add_errors([outcome.errors for outcome in outcomes])
    expression = values.expression
    counts = Counter(outcome.verdict for outcome in outcomes)
    return WeightRecord(
        name=name,
        weight_class=values.weight_class,
        format=expression.format if isinstance(expression, Quantize) else expression.dtype,
        shape=expression.x.shape if isinstance(expression, Quantize) else expression.shape,
        stored_bytes=sum(item.nbytes for item in stored),
        verdict=min(counts) if len(counts) == 1 else ", ".join(f"{key} {counts[key]}" for key in sorted(counts)),
        relative_error=_round(total.relative),
        worst_row_error=_round(total.worst_row),
        saturated=total.saturated,
        zero_groups=total.zero_groups,
        sources=tuple(fold_names(dict.fromkeys(source.name for source in expression.sources()))),
        grids=total.grids,
    )


def _round(value: float) -> float:
    """Three significant digits: no more than is meant, and none that the order of a sum could change."""
    return float(f"{value:.3g}")
