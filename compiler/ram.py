"""How much memory a build may take, and what this process takes now."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dsc.compiler.pieces import SLACK_BYTES
from dsc.runtime.errors import DscError

UNITS = {
    "": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4,
    "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40,
}  # fmt: skip
CGROUPS, OWN_CGROUPS, OWN_MEMORY = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/self/statm")


def parse_bytes(text: str) -> int:
    """`2GB`, `1.5 GiB`, `800MB`, `2000000000` -> bytes; raises DscError."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", text.upper())
    if match is None:
        raise DscError("is no amount of memory", where="--max-ram", wanted="a number of bytes, or 2GB", got=text)
    return int(float(match[1]) * UNITS[match[2] or ""])


def machine_bytes() -> int:
    """Memory that this process could have: the machine's, or what its cgroup leaves of it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_cgroup_limits()]
    return min(limits)


def _cgroup_limits() -> list[int]:
    """Memory limits of the cgroups that this process is in, of version 2 and of version 1."""
    found = []
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        folder, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        inner = folder / path.lstrip("/")
        for level in (inner, *inner.parents):
            if not level.is_relative_to(folder):
                break
            try:
                found.append(int((level / name).read_text()))
            except (OSError, ValueError):  # not there, or "max"
                continue
    return found


def resident_bytes() -> int:
    """Memory of this process, pages of mapped files included."""
    try:
        pages = int(OWN_MEMORY.read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_to_keep_to(max_ram: int | None) -> int:
    """`max_ram`, or without it a quarter of the machine."""
    return machine_bytes() // 4 if max_ram is None else max_ram


def threads_within(max_ram: int | None, thread_bytes: int, wanted: int) -> int:
    """How many threads of `thread_bytes` each fit beside what is there already, at most `wanted`; DscError where none does.

    Without `max_ram` a quarter of the machine is kept to where that is possible.
    """
    there = resident_bytes() + SLACK_BYTES
    threads = (memory_to_keep_to(max_ram) - there) // thread_bytes
    if threads < 1 and max_ram is not None:
        need = there + thread_bytes
        raise DscError(
            "is too little memory for this model",
            where="--max-ram",
            wanted=f"{need / 1e6:,.0f} MB or more: {there / 1e6:,.0f} for the graphs, {thread_bytes / 1e6:,.0f} for weights",
            got=f"{max_ram / 1e6:,.0f} MB",
        )
    return min(max(threads, 1), wanted)
