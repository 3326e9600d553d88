"""What a cubin uses of the chip: registers, stack and shared memory, and the instructions in it. Read with cuobjdump."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dsc.runtime.errors import DscError


@dataclass(frozen=True)
class Resources:
    """Registers a thread, bytes of stack a thread (spills and indexed arrays), static shared bytes a block."""

    registers: int
    stack_bytes: int
    shared_bytes: int


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_tool(), option, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DscError("cuobjdump cannot read a cubin", got=done.stderr[-500:])
    return done.stdout


def _tool() -> str:
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
        if packaged.exists():
            return str(packaged)
    found = shutil.which("cuobjdump")
    if found is None:
        raise DscError("reading cubins needs cuobjdump", try_="pip install 'dsc[gpu]'")
    return found


def read_resources(cubin: bytes, entry: str) -> Resources:
    """Resources of one kernel of a cubin."""
    text = _cuobjdump("--dump-resource-usage", cubin)
    found = re.search(rf"Function {re.escape(entry)}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert found, (entry, text)
    return Resources(int(found[1]), int(found[2]), int(found[3]))


def instructions(cubin: bytes) -> set[str]:
    """Opcodes of all instructions, for example HGMMA, QGMMA, IMMA."""
    return set(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9]*)", _cuobjdump("-sass", cubin), re.M))
