"""From nothing to the first token: an engine's files are dropped from the page cache, a new Python process loads it and generates.

    python benchmarks/cold_start.py ENGINE [--warm] [--rounds 3]

Seconds count from the start of the process; parts of them are imports, load and the first token, hashes included. What
was just written is flushed to the disk before. `--warm` leaves the page cache as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from emission import drop_from_cache

PROCESS = """
import json, sys, time
times = [time.monotonic()]
from dsc import runtime
times.append(time.monotonic())
engine = runtime.load(sys.argv[1])
times.append(time.monotonic())
engine.generate([[1, 2, 3, 4]], max_tokens=1, temperature=0.0)
times.append(time.monotonic())
parts = {name: round(b - a, 2) for name, a, b in zip(("imports", "load", "token"), times, times[1:])}
print(json.dumps({**parts, **engine.backend.describe()}))
"""


def start(engine: Path) -> tuple[float, dict[str, object]]:
    """Seconds to the first token, and what the backend tells of loading."""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROCESS, str(engine)], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return time.monotonic() - begin, found


def main() -> None:
    """Print one line a round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = sum(path.stat().st_size for path in options.engine.rglob("*") if path.is_file())
    for _ in range(options.rounds):
        if not options.warm:
            drop_from_cache(options.engine / "weights")
        seconds, found = start(options.engine)
        print(f"{size / 1e9:.2f} GB, {'warm' if options.warm else 'cold'}: {seconds:.2f} s to the first token; {found}")


if __name__ == "__main__":
    main()
