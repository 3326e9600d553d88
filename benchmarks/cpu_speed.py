"""Decode rate of the tiny-r1-wint4 engine beside transformers on the same machine, in one run; compile and import times.

python benchmarks/cpu_speed.py [TOKENS]       default 128 tokens a sequence, batch 1 and 8
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from rich.console import Console
from rich.table import Table
from support.engines import TINY_R1, compile_tiny
from support.oracle import Oracle

from dsc import runtime

ROUNDS = 5
IMPORTS = ("onnx", "onnx_graphsurgeon", "transformers", "dsc.compiler")


def tokens_per_second(step: Callable[[], int]) -> float:
    start = time.perf_counter()
    return step() / (time.perf_counter() - start)


def main() -> None:
    """Rounds of ours and theirs alternate, so that the machine's mood hits both; medians are printed."""
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        engine = runtime.load(compile_tiny("tiny-r1-wint4", Path(scratch)))
        console.print(f"compile and load: {time.perf_counter() - start:.1f} s, {torch.get_num_threads()} threads")
        model = Oracle(TINY_R1, Path(scratch) / "dequantized").model
        table = Table(
            "batch", "engine tok/s", "with 1 draft", "transformers float32", "bfloat16", "ratio to the faster"
        )
        for batch in (1, 8):
            prompts = [[5 + i, 6, 7, 8] for i in range(batch)]

            def ours(drafts: int, prompts: list[list[int]] = prompts) -> int:
                options = {"max_tokens": length, "temperature": 0.0, "ignore_eos": True}
                return sum(len(o.token_ids) for o in engine.generate(prompts, drafts=drafts, **options))

            def theirs(dtype: torch.dtype, prompts: list[list[int]] = prompts) -> int:
                with torch.inference_mode():
                    options = {"do_sample": False, "min_new_tokens": length, "max_new_tokens": length}
                    out = model.to(dtype).generate(torch.tensor(prompts), pad_token_id=2, **options)
                return int((out.shape[1] - len(prompts[0])) * len(prompts))

            cases = [lambda: ours(0), lambda: ours(1), lambda: theirs(torch.float32), lambda: theirs(torch.bfloat16)]
            for case in cases:
                case()
            rates = [[tokens_per_second(case) for case in cases] for _ in range(ROUNDS)]
            plain, drafted, fp32, bf16 = (median(column) for column in zip(*rates, strict=True))
            ratio = max(plain, drafted) / max(fp32, bf16)
            table.add_row(str(batch), *(f"{rate:.0f}" for rate in (plain, drafted, fp32, bf16)), f"{ratio:.1f}x")
        console.print(table)
    code = f"import time, sys; t = time.perf_counter(); import dsc.runtime.engine; print(time.perf_counter() - t, [m for m in {IMPORTS} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    console.print(f"import dsc.runtime.engine: {done.stdout.strip()} (seconds, and what it should not have imported)")


if __name__ == "__main__":
    main()
