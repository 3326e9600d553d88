"""The report page: well-formed, self-contained, its numbers the engine's own, and no name can break out of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builds import dsc, refusal
from support.engines import compile_tiny
from support.small_engine import make_small_engine

from dsc.compiler.certify.certify import verify_engine
from dsc.compiler.ir.rewrite import Changed, Declined, Report
from dsc.compiler.pipeline import PassRuns, PipelineReport, Run
from dsc.compiler.report_charts import Box, lines, memory_map, treemap
from dsc.compiler.report_page import report_page
from dsc.runtime.artifact import EngineFolder


class Tags(HTMLParser):
    """Collects tags and attributes, and holds open and closed ones to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = compile_tiny("tiny-r1-wint4", tmp_path_factory.mktemp("report"))
    verify_engine(engine, windows=1, window_tokens=24)
    return engine


def test_the_page_holds_what_it_needs(engine: Path) -> None:
    page = report_page(EngineFolder.open(engine))
    tags = parse(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(tags.seen)
    assert not [value for name, value in tags.attributes if name in ("src", "href") or name.startswith("on")]
    assert "url(" not in page
    assert page == report_page(EngineFolder.open(engine))


def test_its_numbers_are_the_engines(engine: Path) -> None:
    folder = EngineFolder.open(engine)
    page = report_page(folder)
    for entry in folder.report["passes"]:
        assert f"<td>{entry['name']}</td>" in page
    assert folder.content_hash in page
    assert page.count("<svg") == 1 + 2 + sum(1 for m in folder.report["memory"].values() if m["arena_bytes"])
    for record in folder.report["weights"]:
        assert f"<title>{record['name']}: {record['weight_class']} as {record['format']}" in page
    assert "main 3: " in page
    assert "mtp 4: " in page


def test_what_is_missed_or_measured_nowhere_is_told(tmp_path: Path) -> None:
    """A missed site in red with its reason; names with markup are text."""
    site = Declined("layers.0.<script>alert(1)</script>", 'a "second" reader', "one & only", "Cast <b>")
    runs = (Run("main.decode", "main", "decode", 2, Report([Changed("a")], [site])),)
    engine = make_small_engine(
        tmp_path / "small.engine", pipeline=PipelineReport([PassRuns("fuse_swiglu", {}, runs, None)])
    )
    page = report_page(EngineFolder.open(engine))
    assert '<td class="n bad">1 / 2</td>' in page
    assert "layers.0.&lt;script&gt;" in page
    assert "script" not in parse(page).seen
    assert "Not measured: <code>dsc verify small.engine</code>" in page


@given(st.lists(st.floats(0, 1e12, allow_subnormal=False), min_size=1, max_size=40))
def test_areas_are_the_values(values: list[float]) -> None:
    chart = treemap([Box(str(i), f"box {i}", value, "#000") for i, value in enumerate(values)], 1000, 500)
    found = {
        int(number): float(width) * float(height)
        for width, height, number in re.findall(r'width="([\d.]+)" height="([\d.]+)" fill.*?<title>box (\d+)<', chart)
    }
    total = sum(values)
    for index, value in enumerate(values):
        if value > 0:
            assert found[index] == pytest.approx(value / total * 500_000, abs=12)


def test_lines_and_memory_stay_inside() -> None:
    chart = lines([("a <b>", [0.0, 0.5, 1.0]), ("b", [0.2, 0.2, 0.2])], ["x", "y", "z"])
    parse(chart)
    for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', chart):
        assert 0 <= float(x) <= 1000
        assert 0 <= float(y) <= 260
    parse(lines([("nothing", [])], []))
    picture = memory_map([("t", 0, 100, 0, 4), ("u", 100, 200, 2, 3)], 5, 200)
    assert picture.count("<title>") == 2
    for y, height in re.findall(r' y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', picture):
        assert float(y) + float(height) <= 300.01


@pytest.mark.parametrize(
    ("option", "file"),
    [((), "tiny-r1-wint4.html"), (("--html",), "tiny-r1-wint4.html"), (("--html", "page.html"), "page.html")],
)
def test_the_command(
    option: tuple[str, ...], file: str, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file's name the page lies where the user stands, with `--html` and without; its path is told."""
    monkeypatch.chdir(tmp_path)
    assert dsc("report", engine, *option).stdout == f"{file}\n"
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_text().startswith("<!doctype html>")


def test_the_command_refuses(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no/such/folder/x.html" in refusal("report", engine, "--html", "no/such/folder/x.html")
    assert "Missing argument 'ENGINE'" in refusal("report", "--html", engine)  # taken for the file, and left as it is
    assert list(tmp_path.iterdir()) == []
