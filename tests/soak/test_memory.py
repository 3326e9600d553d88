"""Emission in a memory cgroup of `--max-ram`, page cache counted: the system would kill it. About a minute, 4 GB of disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.engines import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from memory_cgroup import memory_cgroup

MAX_RAM = 600_000_000


def test_a_checkpoint_larger_than_memory(tmp_path: Path) -> None:
    try:
        with memory_cgroup(MAX_RAM):
            pass
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    command = [str(ROOT / "benchmarks" / "emission.py"), "--folder", str(tmp_path / "emission"), "--gigabytes", "1",
               "--max-ram", str(MAX_RAM), "--limit", "--no-loop", "--json"]  # fmt: skip
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert [run["name"] for run in runs] == ["dsc wint4", "dsc wint8", "dsc fp8"]
    assert all(100e6 < run["peak_bytes"] < MAX_RAM for run in runs), runs
