"""Every reader fed by atheris for a minute (tests/soak/fuzz.py). About ten minutes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.fuzz_targets import TARGETS

SECONDS = 60


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed: pip install '.[soak]' (it has wheels for Linux; elsewhere it needs clang)",
)
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found(name: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), name, str(SECONDS)]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS + 120)
    tail = "\n".join((ran.stdout + ran.stderr).splitlines()[-40:])
    assert ran.returncode == 0, tail
    assert "stat::number_of_executed_units" in tail, tail  # it came to its end
