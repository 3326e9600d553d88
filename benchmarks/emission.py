"""How fast and in how much memory a checkpoint becomes an engine, beside a plain torch loop and a peer on the same files.

python benchmarks/emission.py [--gigabytes 8] [--folder build/emission] [--max-ram 2GB] [--formats wint4,wint8,fp8]
       [--rounds 1] [--limit] [--no-loop] [--peer PYTHON] [--json]

Makes a checkpoint of R1's shapes (synthetic_checkpoint.py), compiles it in each format and deletes everything at the end.
Before each run the checkpoint is dropped from the page cache. GB/s are bytes of the checkpoint over the time of the whole
command, start of Python and flush to the disk included; CPU seconds are those of the process, so that a machine that others
use shows. Memory is the process's peak resident set, mapped files included. `--limit` has dsc run in a memory cgroup of
--max-ram, which needs root; `--peer` is a Python that has llm-compressor (peer_llmcompressor.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from memory_cgroup import memory_cgroup
from synthetic_checkpoint import make

from dsc.compiler.ram import parse_bytes

RECIPE = """\
model: none
target: cpu
parallel: {{tensor: 1, expert: 1, pipeline: 1}}
limits: {{batch_tokens: 512, sequences: 16, context_tokens: 4096}}
decode_buckets: [1, 16]
kv_cache: {{dtype: bf16, block_tokens: 64}}
mtp: {{enabled: false, drafts: 0}}
passes:
  - insert_embedding
  - fuse_lm_head
  - fuse_add_rms_norm
  - fuse_qkv
  - insert_mla_attention: {{prefill: expanded, decode: absorbed}}
  - fuse_moe
  - fuse_swiglu
  - insert_rms_norm
  - insert_linear
  - set_dtype: {{activations: bf16}}
  - quantize_weights: {{default: {format}, skip: [embeddings, lm_head]}}
  - plan_memory
"""
FORMATS = {
    "wint4": "{format: wint4, group: 128}",
    "wint8": "{format: wint8}",
    "fp8": "{format: fp8, block: [128, 128]}",
}
MAIN = "from dsc.compiler.cli import main; main()"


@dataclass(frozen=True)
class Run:
    """One command: seconds of the clock and of processors, peak resident bytes, load of the machine when it began."""

    name: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    load: float


def run(name: str, command: list[str], limit_bytes: int | None = None) -> Run:
    """Run a command to its end, in a memory cgroup where there is a limit; SystemExit where it fails."""
    begin, load = time.monotonic(), os.getloadavg()[0]
    with ExitStack() as stack:
        group = stack.enter_context(memory_cgroup(limit_bytes)) if limit_bytes else None
        enter = group.enter if group else None
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=enter)
        _, status, usage = os.wait4(process.pid, 0)
        kills = group.kills() if group else 0
    if status or kills:
        raise SystemExit(f"{name}: {' '.join(command)} ended with status {status}, killed for memory {kills} times")
    cpu = usage.ru_utime + usage.ru_stime
    return Run(name, time.monotonic() - begin, cpu, usage.ru_maxrss * 1024, load)


def drop_from_cache(folder: Path) -> None:
    """Have the next reader of these files wait for the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def commands(arguments: argparse.Namespace, model: Path, engine: Path, format_: str) -> dict[str, list[str]]:
    """What is compared, by name."""
    recipe = arguments.folder / f"{format_}.yaml"
    recipe.write_text(RECIPE.format(format=FORMATS[format_]))
    here = Path(__file__).parent
    ours = ["-c", MAIN, "compile", "--recipe", str(recipe), "--model", str(model), "--output", str(engine)]
    found = {"dsc": [sys.executable, *ours, "--max-ram", arguments.max_ram]}
    if not arguments.no_loop:
        found["plain loop"] = [sys.executable, str(here / "plain_loop.py"), str(model), str(engine), format_]
    if arguments.peer:
        found["llm-compressor"] = [
            arguments.peer,
            str(here / "peer_llmcompressor.py"),
            str(model),
            str(engine),
            format_,
        ]
    return found


def table(runs: list[Run], size: int, title: str) -> Table:
    """One row a run."""
    made = Table("", "source GB/s", "seconds", "CPU s", "peak RSS, MB", "load before", title=title)
    for item in runs:
        made.add_row(
            item.name,
            f"{size / item.seconds / 1e9:.3f}",
            f"{item.seconds:.1f}",
            f"{item.cpu_seconds:.1f}",
            f"{item.peak_bytes / 1e6:,.0f}",
            f"{item.load:.1f}",
        )
    return made


def main() -> None:
    """Make the checkpoint, run everything, print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--folder", type=Path, default=Path("build/emission"))
    parser.add_argument("--max-ram", default="2GB")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", action="store_true", help="dsc in a memory cgroup of --max-ram")
    parser.add_argument("--no-loop", action="store_true", help="without the plain torch loop")
    parser.add_argument("--peer", help="a Python with llm-compressor")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model, engine = arguments.folder / "model", arguments.folder / "x.engine"
    limit = parse_bytes(arguments.max_ram) if arguments.limit else None
    runs = []
    try:
        size = make(model, arguments.gigabytes)
        for _ in range(arguments.rounds):
            for format_ in arguments.formats.split(","):
                for name, command in commands(arguments, model, engine, format_).items():
                    drop_from_cache(model)
                    runs.append(run(f"{name} {format_}", command, limit if name == "dsc" else None))
                    shutil.rmtree(engine)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps([asdict(item) for item in runs]))
        return
    title = f"{size / 1e9:.2f} GB, --max-ram {arguments.max_ram}, {len(os.sched_getaffinity(0))} cores"
    Console().print(table(runs, size, f"{title}{', in a cgroup of that' if limit else ''}"))


if __name__ == "__main__":
    main()
