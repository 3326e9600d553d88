"""The table of README.md is hand-kept beside the tests: every test it names must exist, and every file here must be in it."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", (FOLDER / "README.md").read_text())


def names_in(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_named_exists():
    assert len(NAMED) > 40
    assert [f"{file}::{test}" for file, test in NAMED if test not in names_in(FOLDER.parent / file)] == []


def test_every_file_of_this_folder_is_named():
    here = {f"faults/{path.name}" for path in FOLDER.glob("test_*.py")} - {"faults/test_table.py"}
    assert here <= {file for file, _ in NAMED}
