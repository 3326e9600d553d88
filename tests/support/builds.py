"""Builds as a user runs them: recipes with other formats, and the command line, in this process or in one of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from dsc.compiler.cli import main
from dsc.compiler.recipe import Recipe, parse_recipe
from support.engines import ROOT

_QUANTIZE = """\
      default: {format: fp32}
      embeddings: {format: fp32}
      lm_head: {format: fp32}
"""


def recipe(
    formats: str = "", *, mtp: bool = True, activations: str = "fp32", edit: tuple[str, str] = ("", "")
) -> Recipe:
    """tiny-r1-fp32 with changes.

    formats      options of quantize_weights instead of fp32 throughout, one `class: {format: ...}` a line
    activations  fp32 or bf16
    edit         a piece of the recipe's text, and what takes its place
    """
    text = (ROOT / "recipes" / "tiny-r1-fp32.yaml").read_text()
    assert _QUANTIZE in text
    assert edit[0] in text
    if formats:
        text = text.replace(_QUANTIZE, "".join(f"      {line.strip()}\n" for line in formats.strip().splitlines()))
    text = text.replace("activations: fp32", f"activations: {activations}")
    if not mtp:
        text = text.replace("{enabled: true, drafts: 1}", "{enabled: false, drafts: 0}")
        text = text.replace("  - fuse_mtp_input\n", "")
    return parse_recipe(text.replace(*edit) if edit[0] else text, where="test.yaml", name="test")


def dsc(*arguments: str | Path, stdin: str | bytes | None = None) -> Result:
    """`dsc ARGUMENTS` in this process. An exception that would be a traceback is raised."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refusal(*arguments: str | Path, stdin: str | bytes | None = None) -> str:
    """What `dsc ARGUMENTS` says where it must refuse: exit code 2, a message and nothing else."""
    result = dsc(*arguments, stdin=stdin)
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert result.stdout == "", result.stdout
    assert result.stderr.strip()
    assert "Traceback" not in result.stderr
    return result.stderr


def hear_interrupts() -> None:
    """Undo what a shell does to a job in the background: it ignores SIGINT, and so would whatever the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(*arguments: str | Path, cwd: Path, **options: Any) -> subprocess.Popen[bytes]:
    """`dsc ARGUMENTS` in a process of its own, for kills and limits."""
    command = [sys.executable, "-m", "dsc.compiler.cli", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **{"preexec_fn": hear_interrupts, **options},
    )


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
