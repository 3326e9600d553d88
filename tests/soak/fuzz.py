"""Feed one reader with files that atheris makes up, guided by what they reach in it: python tests/soak/fuzz.py TARGET [SECONDS]

Exit code 0 where nothing was found. Otherwise the input that did it lies in build/fuzz/TARGET, and the last lines say what it did.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random

import atheris  # type: ignore[import-not-found]

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

with atheris.instrument_imports(include=["dsc", "yaml"]):
    from support.fuzz_targets import TARGETS
    from support.witness import witness


def main(name: str, seconds: int) -> None:
    """Runs for so many seconds, then ends the process; that is how libFuzzer does it."""
    kept = TESTS.parent / "build" / "fuzz" / name
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as corpus:
        target = TARGETS[name](Path(scratch))
        for i, seed in enumerate(target.seeds):
            target.read(seed)  # a seed that is refused would leave most of the reader unreached
            (Path(corpus) / f"seed{i}").write_bytes(seed)

        def mutated(data: bytes, max_size: int, seed: int) -> bytes:
            random = Random(seed)
            if random.random() < 0.3:
                return bytes(atheris.Mutate(data, max_size))
            return target.mutate(data or target.seeds[0], random)[:max_size]

        def once(data: bytes) -> None:
            target.try_(data)
            assert not deeds, deeds

        options = [
            f"-max_total_time={seconds}", f"-max_len={4 * max(map(len, target.seeds))}", "-timeout=10", "-rss_limit_mb=3000",
            f"-artifact_prefix={kept}/", "-print_final_stats=1",
        ]  # fmt: skip
        with witness(Path(scratch), Path(scratch)) as deeds:
            atheris.Setup([sys.argv[0], *options, corpus], once, custom_mutator=mutated)
            atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60)
