"""dsc doctor: facts of this machine, and what keeps an engine from running on it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.small_engine import make_small_engine

from dsc import runtime
from dsc.compiler.cli import main
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.doctor import PACKAGES, engine_demands, examine, report, targets_of
from dsc.runtime.errors import DscError


def test_this_machine(tmp_path: Path):
    data = examine(tmp_path)
    assert all(data["packages"][name] for name in PACKAGES)
    assert data["system"]["cpu_cores"] > 0
    assert data["system"]["free_memory_bytes"] > 1e8
    assert data["disk"]["read_bytes_per_s"] > 1e6
    assert len(data["peers"]) == len(data["gpus"])
    assert list(tmp_path.iterdir()) == []
    assert json.loads(json.dumps(data)) == data
    assert any(line.startswith("disk") for line in report(data))


def test_targets_by_capability():
    assert [targets_of(*c) for c in ((8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0), (7, 5))] == [
        ["sm_80"], ["sm_80"], ["sm_90a"], ["sm_100a"], [], [], [],
    ]  # fmt: skip


def test_an_engine_is_judged(tmp_path: Path):
    engine = EngineFolder.open(make_small_engine(tmp_path / "small.engine"))
    machine = examine(tmp_path)
    assert engine_demands(engine, machine)["faults"] == []
    machine["system"]["free_memory_bytes"] = 1000
    assert "1,000 are free" in engine_demands(engine, machine)["faults"][0]
    engine.manifest = replace(engine.manifest, target="sm_90a")
    machine["gpus"], machine["packages"]["cuda-bindings"] = [], None
    assert engine_demands(engine, machine)["faults"] == [
        "no GPU here runs sm_90a", "cuda-bindings is not installed: pip install 'dsc[gpu]'",
    ]  # fmt: skip


def test_the_command(tmp_path: Path):
    engine = make_small_engine(tmp_path / "small.engine")
    done = CliRunner().invoke(main, ["doctor", str(engine)])
    assert (done.exit_code, "it runs here" in done.output) == (0, True), done.output
    assert json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)["system"]
    missing = CliRunner().invoke(main, ["doctor", str(tmp_path / "nowhere")])
    assert (missing.exit_code, "no such folder" in missing.output) == (2, True)


def test_gpu_memory_is_not_for_the_cpu(tmp_path: Path):
    with pytest.raises(DscError) as error:
        runtime.load(make_small_engine(tmp_path / "small.engine"), gpu_memory=1e9)
    assert "takes no GPU memory" in str(error.value)
