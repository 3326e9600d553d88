"""Whether a checkpoint's tokenizer can be read, tried in a process of its own: a damaged one can end the process it is read in."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from dsc.compiler.recipe import Recipe
from dsc.runtime.errors import DscError
from dsc.runtime.tokenizer import Tokenizer

# -P: nothing is imported from the folder that the user stands in, which may be the checkpoint's.
READ = (
    sys.executable,
    "-P",
    "-c",
    "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1]).encode('def f(x): return 1')",
)


def check_tokenizer(folder: Path, recipe: Recipe) -> tuple[str, ...]:
    """Raise DscError for a tokenizer that no engine could read, or that is missing to verify with; say where there is none."""
    path = folder / "tokenizer.json"
    if path.is_file():
        _check_readable(folder, path)
        return ()
    if recipe.verify is not None:
        what = "verify needs the tokenizer, and the checkpoint has none"
        raise DscError(what, where=recipe.where, wanted=str(path), try_="no `verify` in the recipe")
    return (f"{folder.name} has no tokenizer.json: the engine takes and gives token ids",)


def _check_readable(folder: Path, path: Path) -> None:
    tried = subprocess.run([*READ, str(path)], capture_output=True, text=True, errors="replace")
    if tried.returncode < 0:  # a panic in the tokenizers library, which no code of Python's can catch
        reason = signal.Signals(-tried.returncode).name
        raise DscError(
            "is not a tokenizer",
            where=str(path),
            wanted="a tokenizer.json that the tokenizers library reads",
            got=f"it ends the process with {reason}",
            try_="download it again",
        )
    Tokenizer(folder)
