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


def mnemonics(cubin: bytes) -> set[str]:
    """All instructions with their modifiers, for example QGMMA.64x64x32.F32.E4M3.E4M3, of every kernel of a cubin."""
    return set(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", _cuobjdump("-sass", cubin), re.M))


def instructions(cubin: bytes) -> set[str]:
    """Opcodes of all instructions, for example HGMMA, QGMMA, IMMA."""
    return {name.partition(".")[0] for name in mnemonics(cubin)}


def is_tensor_core(mnemonic: str) -> bool:
    """Whether an instruction multiplies matrices: HMMA, IMMA, QMMA, wgmma's HGMMA and QGMMA, tcgen05's UTCHMMA, ..."""
    return mnemonic.partition(".")[0].endswith("MMA")


def is_fp8(mnemonic: str) -> bool:
    """Whether an instruction multiplies or converts 8-bit floats: chips before compute capability 8.9 have none."""
    opcode, *modifiers = mnemonic.split(".")
    return opcode in ("QMMA", "QGMMA", "UTCQMMA") or not {"E4M3", "E5M2"}.isdisjoint(modifiers)
