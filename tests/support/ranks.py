"""Engines of several ranks, and the processes that they run in."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from dsc.compiler.build import compile_engine
from dsc.compiler.recipe import parse_recipe
from support.builds import hear_interrupts
from support.engines import ROOT, TINY_R1

# Weights that two ranks cut in whole groups and blocks: the shared expert of tiny-r1 is 128 wide.
CHANGES = {
    "fp32": ("", ""),
    "bf16": ("", ""),
    "wint8": ("", ""),
    "wint4": ("      kv_b:", "      shared_experts: {format: wint4, groups: [64, 32]}\n      kv_b:"),
    "fp8": ("skip: [embeddings, lm_head]", "skip: [embeddings, lm_head, shared_experts]"),
}


def compile_ranks(recipe: str, ranks: int, folder: Path, target: str = "cpu") -> Path:
    """examples/tiny-r1 for a number of ranks, by a recipe changed as CHANGES says; returns the engine's folder."""
    text = (ROOT / "recipes" / f"tiny-r1-{recipe}.yaml").read_text()
    before, after = CHANGES[recipe]
    assert before in text
    loaded = parse_recipe(text.replace(before, after, 1), where=f"{recipe}.yaml", name=recipe).override(target, ranks)
    return compile_engine(loaded, model=str(TINY_R1), output=folder / f"{recipe}-{ranks}-{target}.engine").folder


def rank_processes(parent: int | None = None, folder: Path | str = "") -> list[psutil.Process]:
    """The processes that a leader started, by default this process; of one engine, if a folder is given."""
    found = []
    for child in psutil.Process(parent).children():
        try:
            command = child.cmdline()
            if "dsc.runtime.ranks.follow" in command and str(folder) in command[-1]:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until_gone(processes: Sequence[psutil.Process], seconds: float = 10.0) -> None:
    """Fail unless all end in time. One of ours that nobody has waited for is still there."""
    wait_for(lambda: not any(map(_is_there, processes)), seconds)


def _is_there(process: psutil.Process) -> bool:
    try:
        orphan = process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid()
        return process.is_running() and not orphan
    except psutil.NoSuchProcess:
        return False


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets on one machine, where rank 0 holds the store."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start(script: str, *arguments: object, given: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A Python process that runs a script, with its output to read."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_interrupts,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(given or {})},
    )


def rest(process: subprocess.Popen[str], seconds: float = 20.0) -> str:
    """What a process that ends by itself still prints. `communicate` would lose what came with the last line read."""
    assert process.stdout is not None
    ending = threading.Timer(seconds, process.kill)
    ending.start()
    try:
        text = process.stdout.read()
    finally:
        ending.cancel()
    process.wait(seconds)
    process.stdout.close()
    return text


def wait_for(found: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until `found()` is true."""
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
