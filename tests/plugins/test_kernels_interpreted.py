"""What an engine for sm_80 runs, on the CPU: its Triton kernels, interpreted step by step, compute what the reference computes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.op_cases import CASES

TESTS = Path(__file__).parents[1]
ELSEWHERE = {"Sample"}  # tests/plugins/test_kernels_sample.py


def interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: Triton decides once whether it interprets."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.interpreted_ops", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("op", [op for op in CASES if op not in ELSEWHERE])
def test_equals_the_reference(op: str) -> None:
    if op == "Moe" and shutil.which("g++") is None:
        pytest.skip("its work list is made in CUDA C++: needs g++")
    done = interpreted(op)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{op}: ")


def test_a_difference_is_seen() -> None:
    done = interpreted("--damaged", "Linear")
    assert done.returncode == 1
    assert "AssertionError: dsc.Linear.y, 1 tokens, bf16" in done.stderr
