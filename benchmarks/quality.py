"""nats per token, KL and top-1 agreement of the tiny-r1 engines on held-out text, against transformers in float32.

python benchmarks/quality.py [WINDOWS]        default 8 windows of 512 tokens
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rich.console import Console
from rich.table import Table
from support.engines import TINY_R1, compile_tiny
from support.oracle import Oracle
from support.quality import engine_logits, held_out, judge

from dsc import runtime


def main() -> None:
    """Compile every tiny-r1 recipe, judge it, print one table."""
    windows = held_out(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
    table = Table("engine", "nats/token", "KL", "top-1 agreement", "worst gap", title=f"{len(windows)} x 512 tokens")
    with tempfile.TemporaryDirectory() as scratch:
        oracle = Oracle(TINY_R1, Path(scratch) / "dequantized")
        known = {tuple(window): oracle.main(window)[0] for window in windows}

        def reference(tokens: list[int]):
            return known[tuple(tokens)]

        quality = judge(reference, reference, windows)
        table.add_row("transformers float32", f"{quality.nats:.4f}", "", "", "")
        for recipe in ("fp32", "bf16", "fp8", "wint8", "wint4"):
            engine = runtime.load(compile_tiny(f"tiny-r1-{recipe}", Path(scratch)))
            quality = judge(engine_logits(engine), reference, windows)
            row = (f"{quality.nats:.4f}", f"{quality.kl:.5f}", f"{quality.top1:.2%}", f"{quality.worst_gap:.2f}")
            table.add_row(recipe, *row)
    Console().print(table)


if __name__ == "__main__":
    main()
