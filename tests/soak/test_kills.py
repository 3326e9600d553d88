"""Builds killed at any moment, many times: what stands at the output is whole, and the last run ends in the same bytes. About two minutes."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from support.builds import dsc, hashes, start
from support.engines import TINY_R1

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError

KILLS = 25


def test_kills_at_any_moment(tmp_path: Path) -> None:
    arguments = ("compile", "--recipe", "tiny-r1-wint4", "--model", TINY_R1, "--output")
    begin = time.monotonic()
    process = start(*arguments, tmp_path / "whole.engine", cwd=tmp_path)
    process.communicate(timeout=120)
    seconds = time.monotonic() - begin
    whole = hashes(tmp_path / "whole.engine")

    generator, killed = random.Random(0), 0
    folder = tmp_path / "killed"
    engine = folder / "x.engine"
    for _ in range(KILLS):
        process = start(*arguments, engine, cwd=tmp_path)
        time.sleep(seconds * generator.uniform(0.3, 1.05))  # before that, Python is still importing
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
        killed += process.returncode == -signal.SIGKILL
        if process.returncode != -signal.SIGKILL:
            seconds *= 0.8  # the machine was busier at first
        if engine.exists():  # killed right after it was moved there, its journal is still in it
            assert {name: sha for name, sha in hashes(engine).items() if name != ".journal"} == whole
        for manifest in folder.rglob("manifest.json"):
            if manifest.parent != engine:
                _cut_short_or_whole(manifest.parent)
    assert killed > KILLS // 2
    assert dsc(*arguments, engine).exit_code == 0
    assert hashes(engine) == whole
    assert {path.name for path in folder.iterdir()} == {"x.engine"}


def _cut_short_or_whole(folder: Path) -> None:
    """A manifest is written last: whatever has one is refused or has every byte."""
    try:
        EngineFolder.open(folder).verify_hashes()
    except DscError:
        return
    assert folder.name.startswith("."), folder
