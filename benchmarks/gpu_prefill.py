"""Attention of expanded prefill on a GPU, by sm90_mla_prefill.cu and by Triton: microseconds of a step of whole prompts.

    python benchmarks/gpu_prefill.py [--steps 128:1x4096,128:2x4096,...] [--json FILE] [--compile-only]

A step is heads:prompts x tokens. All launches of the attention kernel that have something to do, one for each pass, are
timed; kv is expanded before. Both ways' last queries of every prompt are held against the reference, and take turns in
CUDA graphs with FlashAttention 3 on tensors of its own, unchecked, if PEERS names a folder with _vllm_fa3_C.abi3.so of vllm.
tests/gpu/test_mla_attention.py checks ragged steps. --compile-only fills the kernels' cache on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from node_times import Bound, Calls, Case, Times, microseconds, run
from support.paged import make_batch, rope_tables
from support.tolerances import TOLERANCES, worst_row

from dsc.plugins.formats import parse_format
from dsc.plugins.mla_attention import expanded, sm90_mla_prefill
from dsc.plugins.mla_attention.reference import reference
from dsc.plugins.stored import StoredWeight

WAYS: dict[str, dict[str, object]] = {"sm90": {}, "triton": {"applies": lambda node: False}}
ATTRIBUTES = {"nope": 128, "rope": 64, "v": 128, "latent_dim": 512, "scale": 0.135234, "mode": "expanded"}
ATTRIBUTES |= {"cache_dtype": "bfloat16", "block_tokens": 64, "block_bytes": 64 * 576 * 2}
STEPS = "128:1x4096,128:2x4096,128:1x8192,128:4x2048,16:1x16384,16:16x512,16:2x4096"
REPEATS = 8  # of a step in a graph
CHECKED = 64  # queries of a prompt


def prompts(heads: int, count: int, tokens: int, device: str) -> Case:
    """A step of `count` prompts, its memory on the device ("meta": only its type)."""
    g = torch.Generator().manual_seed(count)
    lengths = [tokens] * count
    batch = make_batch(lengths, lengths, 576, dtype="bfloat16", generator=g)
    cos, sin = rope_tables(64, tokens)
    names = ("positions", "query_starts", "sequence_lengths", "block_table", "cache")
    given = {"cos": cos, "sin": sin, **{name: getattr(batch, name) for name in names}}
    given = {name: tensor.to(device) for name, tensor in given.items()}
    with torch.device(device):
        given["q"] = torch.randn(count * tokens, heads * 192, dtype=torch.bfloat16)
        given["kv_b"] = torch.randn(heads * 256, 512, dtype=torch.bfloat16) * 512**-0.5
    attributes = {"heads": heads, **ATTRIBUTES, "kv_b_format": "bf16"}
    title = f"{heads} heads, {count} x"
    return Case("MlaAttention", title, sm90_mla_prefill, WAYS, given, attributes, "T", count * tokens)


def last_queries(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """What the reference has for these rows, CHECKED of every prompt."""
    given, attributes = dict(case.given), dict(case.attributes)
    del attributes["kv_b_format"]
    given |= {"q": given["q"][rows], "positions": given["positions"][rows]}
    given["query_starts"] = torch.arange(0, len(rows) + 1, CHECKED, dtype=torch.int32)
    kv_b = StoredWeight(parse_format("fp32"), given.pop("kv_b").float())
    with torch.device("cuda"):
        return reference(**given, kv_b=kv_b, latent=None, k_rope=None, **attributes)[0]


def fa3(heads: int, count: int, tokens: int) -> Calls:
    """FlashAttention 3 on random prompts."""
    torch.ops.load_library(str(Path(os.environ["PEERS"]) / "_vllm_fa3_C.abi3.so"))
    q, k = (torch.randn(count * tokens, heads, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(count * tokens, heads, 128, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(0, count * tokens + 1, tokens, device="cuda", dtype=torch.int32)
    arguments = (q, k, v, *[None] * 4, starts, starts, None, None, None, tokens, tokens, *[None] * 9)
    rest = (192**-0.5, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)
    forward: Callable[..., Any] = torch.ops._vllm_fa3_C.fwd
    return [lambda stream: forward(*arguments, *rest)]


def attention(case: Case, heads: int, count: int, tokens: int) -> Iterator[tuple[str, str, int, float, float, float]]:
    """Check and time every way of a step."""
    made, stream = case.lowered(), torch.cuda.Stream()
    passes = math.ceil(case.most / (expanded.SCRATCH_ROWS // heads))
    o = torch.empty(case.most, heads * 128, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(case.most, device="cuda").view(count, tokens)[:, -CHECKED:].flatten()
    want, limit = last_queries(case, rows), TOLERANCES["attention", "bfloat16"]
    every: dict[str, Calls] = {}
    errors = {"fa3": 0.0}
    bound = {name: Bound(*program, {**case.given, "o": o}) for name, program in made.items()}
    for name, one in bound.items():
        steps = one.binder.bind(dict(one.binder.program.letters))
        o.view(torch.uint8).fill_(0xFF)
        run([step.call for step in steps], stream)
        first = o.clone()
        run([step.call for step in steps], stream)
        same = torch.equal(first, o) and not any(tensor.any() for tensor in one.zeroed)
        errors[name] = worst_row(o[rows], want) if same else math.inf
        every[name] = [s.call for s in steps if s.name in ("mla_prefill", "sm90_mla_prefill")][:passes] * REPEATS
    if "PEERS" in os.environ:
        every["fa3"] = [*fa3(heads, count, tokens)] * REPEATS
    for name, time in microseconds(every, REPEATS, stream).items():
        yield case.title, name, tokens, time, errors[name], limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", default=STEPS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    steps = [tuple(map(int, re.split("[:x]", step))) for step in options.steps.split(",")]
    times = Times(sorted({tokens for _, _, tokens in steps}), options.json)
    for heads, count, tokens in steps:
        case = prompts(heads, count, tokens, "meta" if options.compile_only else "cuda")
        if options.compile_only:
            case.lowered()
            print(f"{case.title} {tokens}", flush=True)
        else:
            times.measure(case, partial(attention, case, heads, count, tokens))
    times.show()


if __name__ == "__main__":
    main()
