"""Rates predicted from the measured tables are the steps of benchmarks/RESULTS.md, within 10 %."""

import re
from collections.abc import Iterator
from itertools import dropwhile, takewhile

import pytest
from support.engines import ROOT

from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.model_shapes import first_layers, read_shape
from dsc.compiler.planning.measured import load_table
from dsc.compiler.planning.rates import Predictor
from dsc.compiler.planning.weights import planned_weights
from dsc.compiler.recipe import load_recipe
from dsc.runtime.bench_floor import RATES

RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
SLICE_LAYERS = 3
BATCHES = {1, 16, 64, 128, 256}


def table_of(heading: str) -> list[list[str]]:
    """Cells of the first table of a section of RESULTS.md, without its head."""
    section = next(part for part in RESULTS.split("\n## ") if part.startswith(heading))
    lines = dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    table = takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table][2:]


def measured_rows(heading: str = "Decode steps on one H200", column: int = 2) -> Iterator[tuple[str, int, float]]:
    """Engine, batch and ms a step of a decode table of RESULTS.md."""
    engine = ""
    for cells in table_of(heading):
        cells = cells if not cells[0].isdigit() else [engine, *cells]
        engine = cells[0] or engine
        yield engine, int(cells[1]), float(cells[column])


def engine_of(row: str) -> tuple[str, int | None]:
    """Recipe and decoder layers (None: all) of a row's name: "slice, wint4 experts", "V2-Lite whole, wint4"."""
    (kind,) = [kind for kind in ("wint4", "wint8", "fp8") if kind in row]
    if row.startswith("slice"):
        return f"r1-{kind}", SLICE_LAYERS
    assert (row[:7], kind) == ("V2-Lite", "wint4"), row
    return "v2-lite-wint4", None


def predictor(row: str, ranks: int = 1) -> Predictor:
    name, layers = engine_of(row)
    recipe = load_recipe(name).override("sm_90a", ranks)
    spec = read_shape(recipe.model)[0]
    spec = spec if layers is None else first_layers(spec, layers)
    found = load_table("h200", RATES["sm_90a"])
    assert found is not None
    return Predictor(spec, recipe, planned_weights(spec, recipe), Mesh(ranks, ranks), found)


@pytest.mark.parametrize("row", dict.fromkeys(row for row, _, _ in measured_rows()))
def test_predictions_are_within_10_percent_of_the_measured_steps(row: str) -> None:
    """From config.json and recipe to milliseconds, as `dsc plan` goes."""
    made = predictor(row)
    errors = {b: made.decode(b, 4096).seconds * 1e3 / ms - 1 for other, b, ms in measured_rows() if other == row}
    assert set(errors) == BATCHES
    assert max(map(abs, errors.values())) < 0.1, errors
    assert not list(made.notes())  # every time is a measured one


@pytest.mark.parametrize("row", dict.fromkeys(row for row, _, _ in measured_rows("Two H200s")))
def test_two_ranks_are_within_10_percent(row: str) -> None:
    """Of another run than the tables are of; what the ranks exchange is in it."""
    made, rows = predictor(row, 2), list(measured_rows("Two H200s", 3))
    errors = {b: made.decode(b, 4096).seconds * 1e3 / ms - 1 for other, b, ms in rows if other == row}
    assert set(errors) == BATCHES
    assert max(map(abs, errors.values())) < 0.1, errors
    assert not list(made.notes())


def test_contexts_that_no_table_has_are_within_10_percent() -> None:
    """The steps of a run that the tables were not made from, and the predictions as RESULTS.md tells them."""
    made, context, errors = predictor("slice, wint4 experts"), 0, []
    for cells in table_of("Other contexts"):
        first, *rest = cells if len(cells) == 9 else ["", *cells]
        context = int(first.replace(",", "")) if first else context
        found = made.decode(int(rest[0]), context).seconds * 1e3
        assert found == pytest.approx(float(rest[6]), rel=0.02), (context, rest)
        errors.append(found / float(rest[1]) - 1)
    assert len(errors) == 9
    assert max(map(abs, errors)) < 0.1, errors


def test_prefill_is_within_10_percent() -> None:
    sentence = re.search(r"Prefill of 4,096-token prompts, two at once: ([^;]+);", RESULTS)
    assert sentence is not None
    told = re.findall(r"([\d,]+)(?: tokens/s)? \((slice, \w+|V2-Lite)\)", " ".join(sentence[1].split()))
    assert len(told) == 4
    for rate, row in told:
        made = predictor(row if row.startswith("slice") else "V2-Lite, wint4")
        found = made.prefill(4096, 8192, 256)
        assert (found.prompts, found.tokens_per_s) == (2, pytest.approx(int(rate.replace(",", "")), rel=0.1)), row


def test_the_table_is_of_the_engines_of_the_results() -> None:
    """None of them is missing in the table or in RESULTS.md."""
    found = load_table("h200", RATES["sm_90a"])
    assert found is not None
    rows = {engine_of(row)[0] for row, _, _ in measured_rows()}
    rows |= {f"{engine_of(row)[0]}-2ranks" for row, _, _ in measured_rows("Two H200s")}
    assert rows == {source.engine.removesuffix(".engine") for source in found.sources}
