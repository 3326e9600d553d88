"""MlaAttention and Qkv on this CPU: microseconds a layer, and for the step's plan, which all layers share.

    python benchmarks/cpu_attention.py [--threads 2] [--heads 4]

Sizes of tiny-r1, whose heads and latents are DeepSeek-R1's: hidden 256, q_lora 96, nope 128, rope 64, v 128, latent 512.
Times are the best of ten rounds; weights and cache of one layer stay in the processor's caches, as in no real model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from dsc.plugins.cpu_node import CpuNode, StepMemo
from dsc.plugins.formats import Format
from dsc.plugins.mla_attention import cpu as mla_attention
from dsc.plugins.mla_attention.ragged import make_plan
from dsc.plugins.qkv import cpu as qkv
from dsc.plugins.rope import rotation
from dsc.plugins.schema import Type
from dsc.plugins.stored import StoredWeight

HIDDEN, Q_LORA, NOPE, ROPE, V, LATENT, BLOCK = 256, 96, 128, 64, 128, 512, 64
DECODE = [
    (1, 1, 128),
    (1, 1, 1024),
    (1, 2, 128),
    (8, 1, 128),
    (8, 1, 1024),
    (64, 1, 128),
]  # sequences, queries, context
PREFILL = [(1, 64, 64), (1, 512, 512), (1, 512, 2048), (8, 20, 20)]


def best_us(call: Callable[[], object], rounds: int = 10) -> float:
    """The quickest of ten rounds of about 10 ms."""
    call()
    start = time.perf_counter()
    call()
    calls = max(1, int(0.01 / (time.perf_counter() - start)))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def measure(heads: int, dtype: torch.dtype, mode: str, sequences: int, queries: int, context: int) -> list[float]:
    """Microseconds of Qkv, of MlaAttention, and of the plan."""
    width, tokens = LATENT + ROPE, sequences * queries
    format_ = Format("bf16" if dtype is torch.bfloat16 else "fp32")
    name = str(dtype).removeprefix("torch.")
    blocks = -(-context // BLOCK)
    table = torch.randperm(sequences * blocks).view(sequences, blocks)
    offsets = torch.arange(context - queries, context).repeat(sequences)
    slots = table.repeat_interleave(queries, 0).gather(1, offsets[:, None] // BLOCK).flatten() * BLOCK + offsets % BLOCK
    starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32)
    lengths = torch.full((sequences,), context, dtype=torch.int32)
    cache = torch.zeros(sequences * blocks, BLOCK * width * dtype.itemsize, dtype=torch.uint8)
    angles = torch.rand(context, ROPE // 2)
    tables = {"cos": angles.cos(), "sin": angles.sin()}
    shared = {"rope": ROPE, "nope": NOPE, "heads": heads, "cache_dtype": name, "block_tokens": BLOCK}
    random = lambda *shape: StoredWeight(format_, (torch.randn(shape) / shape[-1] ** 0.5).to(dtype))  # noqa: E731
    front = CpuNode(
        "qkv", "Qkv", {**shared, "q_width": Q_LORA, "latent": LATENT, "epsilon": 1e-6},
        {"x": Type(name, ("T", HIDDEN))}, {"w": random(Q_LORA + width, HIDDEN)},
        {"q_norm": torch.ones(Q_LORA), "kv_norm": torch.ones(LATENT), **tables},
    )  # fmt: skip
    attention = CpuNode(
        "mla", "MlaAttention", {**shared, "v": V, "latent_dim": LATENT, "scale": 0.135, "mode": mode},
        {}, {"kv_b": random(heads * (NOPE + V), LATENT)}, tables,
    )  # fmt: skip
    run_front, run = qkv.bind(front), mla_attention.bind(attention)
    assert run is not None
    x, q = torch.randn(tokens, HIDDEN).to(dtype), torch.randn(tokens, heads * (NOPE + ROPE)).to(dtype)
    positions = offsets.int()
    step = StepMemo()
    layer = best_us(lambda: run(step, q, positions, starts, lengths, table.int(), cache))
    turns = rotation(tables["cos"], tables["sin"], positions)
    plan = best_us(lambda: make_plan(starts, lengths, table.int(), turns, BLOCK, heads * width, width))
    return [best_us(lambda: run_front(step, x, positions, slots.int(), cache, None, None)), layer, plan]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--heads", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table(title=f"us a layer, {arguments.threads} threads, {arguments.heads} heads, torch {torch.__version__}")
    for column in ("mode", "sequences", "queries", "context", "dtype", "Qkv", "MlaAttention", "plan, once a step"):
        table.add_column(column, justify="right")
    with torch.inference_mode():
        for mode, cases in (("absorbed", DECODE), ("expanded", PREFILL)):
            for case in cases:
                for dtype in (torch.float32, torch.bfloat16):
                    times = measure(arguments.heads, dtype, mode, *case)
                    name = str(dtype).removeprefix("torch.")
                    table.add_row(mode, *map(str, case), name, *(f"{us:.0f}" for us in times))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
