"""The table of README.md is hand-kept beside the tests and the design.

Every test it names must exist, every file here must be in it, and every fault of the design.
"""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
DESIGN = FOLDER.parents[2] / "shared" / "design" / "faults.md"  # beside the repository, where it is
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", (FOLDER / "README.md").read_text())


def names_in(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def rows_in(path: Path) -> list[list[str]]:
    """Cells of the rows of a file's table, without its head."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_test_named_exists():
    assert len(NAMED) > 40
    assert [f"{file}::{test}" for file, test in NAMED if test not in names_in(FOLDER.parent / file)] == []


def test_every_file_of_this_folder_is_named():
    here = {f"faults/{path.name}" for path in FOLDER.glob("test_*.py")} - {"faults/test_table.py"}
    assert here <= {file for file, _ in NAMED}


def test_every_fault_has_a_test():
    rows = rows_in(FOLDER / "README.md")
    assert len(rows) > 25
    assert [fault for fault, tests in rows if "::test_" not in tests] == []


def test_every_fault_of_the_design_is_here():
    """Word for word. A row of the design may be more than one here, one after the other."""
    if not DESIGN.is_file():
        pytest.skip("the design is not beside this checkout: ../shared/design/faults.md")
    faults = [fault for fault, _ in rows_in(DESIGN)]
    assert len(faults) > 20
    here = ", ".join(fault for fault, _ in rows_in(FOLDER / "README.md"))
    assert [fault for fault in faults if fault not in here] == []
