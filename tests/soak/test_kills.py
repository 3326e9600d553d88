"""Builds killed at any moment, 20 times: what stands at the output is whole, and the last run ends in the same bytes.

A small one, and one of gigabytes that each run brings a little further. About six minutes.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.builds import dsc, hashes, start
from support.engines import ROOT, TINY_R1

sys.path.insert(0, str(ROOT / "benchmarks"))

from emission import FORMATS, RECIPE
from synthetic_checkpoint import make

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError

KILLS = 20
GIGABYTES = 2.0


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
    while killed < KILLS:
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
    assert dsc(*arguments, engine).exit_code == 0
    assert hashes(engine) == whole
    assert {path.name for path in folder.iterdir()} == {"x.engine"}


def test_kills_of_a_build_of_gigabytes(tmp_path: Path) -> None:
    """Each run goes on where the one before was killed; a build that got whole in between is compared and begun anew."""
    make(tmp_path / "model", GIGABYTES)
    (tmp_path / "x.yaml").write_text(RECIPE.format(format=FORMATS["wint4"]))
    arguments = (
        "compile",
        "--recipe",
        tmp_path / "x.yaml",
        "--model",
        tmp_path / "model",
        "--max-ram",
        "2GB",
        "--output",
    )
    begin = time.monotonic()
    start(*arguments, tmp_path / "whole.engine", cwd=tmp_path).communicate(timeout=600)
    seconds = time.monotonic() - begin
    whole = hashes(tmp_path / "whole.engine")

    generator, killed, runs = random.Random(0), 0, 0
    engine = tmp_path / "killed" / "x.engine"
    while killed < KILLS:
        process, runs = start(*arguments, engine, cwd=tmp_path), runs + 1
        try:
            process.communicate(timeout=seconds * generator.uniform(0.2, 0.9))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=120)
            killed += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            assert hashes(engine) == whole
            shutil.rmtree(engine)
        assert runs < 10 * KILLS
    assert dsc(*arguments, engine).exit_code == 0
    assert hashes(engine) == whole
    print(f"{killed} kills in {runs} runs; an undisturbed one took {seconds:.1f} s")


def _cut_short_or_whole(folder: Path) -> None:
    """A manifest is written last: whatever has one is refused or has every byte."""
    try:
        EngineFolder.open(folder).verify_hashes()
    except DscError:
        return
    assert folder.name.startswith("."), folder
