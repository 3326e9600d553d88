"""Decode and prefill of an engine of several ranks beside the engine of one rank, on the GPUs of one machine.

    dsc compile --recipe r1-fp8 --weights random --layers 3 --target sm_90a --ranks 1 --output one.engine
    dsc compile --recipe r1-fp8 --weights random --layers 3 --target sm_90a --ranks 2 --output two.engine
    python benchmarks/two_gpus.py one.engine two.engine [--batch 1,16,64,128,256] [--context 4096] [--steps 16]
        [--prefill] [--ways one,symmetric,nccl] [--json FILE]

Ways: `one` rank on one GPU; all ranks whose sums go through torch's symmetric memory, or through NCCL. Every way runs in
processes of its own, one after another, so that each has the GPUs for itself; a way that fails is told, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SECONDS = 400  # a way may take


def measure(options: argparse.Namespace) -> None:
    """Of one way, in this process; rank 0 writes JSON to standard output."""
    from dsc.runtime.bench import run_bench
    from dsc.runtime.cuda import collectives

    collectives.SYMMETRIC = options.measure != "nccl"
    data = run_bench(
        options.one if options.measure == "one" else options.several,
        batches=[int(batch) for batch in options.batch.split(",")],
        contexts=[options.context],
        steps=options.steps,
        prefill=options.prefill,
    )
    wanted = {"symmetric": True, "nccl": False}.get(options.measure)
    found = str(data["load"].get("all_reduce", ""))
    assert wanted is None or found.startswith("symmetric memory") == wanted, found
    print(json.dumps(data), flush=True)


def run(way: str, ranks: int, arguments: list[str]) -> dict[str, Any] | str:
    """What one way gives, measured by as many processes as it has ranks; text where it failed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, __file__, *arguments, "--measure", way]
    processes = []
    for rank in range(ranks):
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_PORT": port,
        }
        own = {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        env = {**os.environ, **(own if ranks > 1 else {})}
        processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, env=env))
    try:
        told, error = processes[0].communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        told, error = "", f"took longer than {SECONDS} s"
    failed = processes[0].returncode != 0
    for rank, process in enumerate(processes[1:], 1):
        process.kill() if failed else process.wait(60)
        _, other = process.communicate()
        error += f"\nrank {rank}: {other[-3000:]}" if failed else ""
    processes[0].kill()
    return error[-6000:] if failed else dict(json.loads(told.splitlines()[-1]))


def show(found: dict[str, dict[str, Any]]) -> None:
    """Milliseconds of a step, way by way, and how much faster the best of several ranks is than one."""
    for kind, key in (("decode", "seconds"), ("prefill", "seconds")):
        rows: dict[tuple[int, int], dict[str, float]] = {}
        for way, data in found.items():
            for point in data[kind]:
                if point[key] is not None:
                    rows.setdefault((point["batch"], point["context"]), {})[way] = 1e3 * point[key]
        table = Table("batch", "context", *(f"{way}, ms" for way in found), "one / best", title=kind)
        for (batch, context), times in rows.items():
            several = [time for way, time in times.items() if way != "one"]
            gain = f"{times['one'] / min(several):.2f}" if several and "one" in times else ""
            cells = [f"{times[way]:.3f}" if way in times else "" for way in found]
            table.add_row(str(batch), str(context), *cells, gain)
        if rows:
            Console(width=120).print(table)
    for way, data in found.items():
        load = ", ".join(f"{name} {value}" for name, value in data["load"].items())
        print(f"{way}: {data['weight_bytes'] / 1e9:.2f} GB of weights on a GPU; {load}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("one", type=Path)
    parser.add_argument("several", type=Path)
    parser.add_argument("--batch", default="1,16,64,128,256")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--ways", default="one,symmetric,nccl")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    ranks = json.loads((options.several / "manifest.json").read_text())["ranks"]
    found: dict[str, dict[str, Any]] = {}
    for way in options.ways.split(","):
        print(f"{way} ...", flush=True)
        data = run(way, 1 if way == "one" else ranks, sys.argv[1:])
        if isinstance(data, str):
            print(f"{way} failed: {data}", flush=True)
            continue
        found[way] = data
        if options.json:  # what is measured is not lost when the rest is cut short
            options.json.write_text(json.dumps(found, indent=2))
    show(found)


if __name__ == "__main__":
    main()
