"""Expanded attention on a GPU: the Triton kernel and ways to launch sm90_mla_prefill.cu, checked and timed side by side.

    python benchmarks/gpu_prefill.py [--ways triton,overlap,...] [--cases 128:4096x1,...] [--check-only] [--compile-only]

Each way has a process of its own, which is ended when it takes too long: a kernel that hangs costs its own row only. All
check at once against the reference, on ragged steps in one pass and several; then they time one after the other, each in
CUDA graphs in turn with Triton's of the same step. TF are causal FLOPs at 192/128. `fa3` is FlashAttention 3, if PEERS names
a folder with vllm's _vllm_fa3_C.abi3.so. Numbers go to $OUT/gpu_prefill.json. --compile-only fills the kernels' cache on a
machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.gpu import GpuOp, hopper_compiler, node_program
from support.paged import make_batch, rope_tables
from support.tolerances import TOLERANCES, worst_row

from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.formats import parse_format
from dsc.plugins.gpu_node import GpuNode
from dsc.plugins.mla_attention import expanded, kernel
from dsc.plugins.mla_attention.expanded import Expanded
from dsc.plugins.mla_attention.reference import reference
from dsc.plugins.mla_attention.sm90_mla_prefill import BURST, SERIAL, Prefill
from dsc.plugins.stored import StoredWeight
from dsc.runtime.bench_layers import capture, graph_seconds
from dsc.runtime.steps import Variant

WAYS: dict[str, Prefill | None] = {
    "triton": None,
    "overlap": Prefill(),
    "overlap-turns": Prefill(turns=True),
    "overlap-late": Prefill(early=False),
    "overlap-static": Prefill(dynamic=False),
    "burst": Prefill(order=BURST),
    "burst-turns": Prefill(order=BURST, turns=True),
    "overlap-112": Prefill(keys=112),
    "serial-3x96": Prefill(groups=3, keys=96, order=SERIAL, early=False),
    "serial-3x96-turns": Prefill(groups=3, keys=96, order=SERIAL, early=False, turns=True),
    "overlap-3x80": Prefill(groups=3, keys=80),
    "burst-3x80-turns": Prefill(groups=3, keys=80, order=BURST, turns=True),
}
CASES = "128:4096x1,128:4096x2,128:8192x1,128:2048x4,16:16384x1,16:512x16,16:4096x2"
CHECKS = {  # lengths and queries; heads
    "one token": (([1], [1]), (16, 128)),
    "ragged": (([1, 127, 1065, 4397, 64], [1, 63, 65, 300, 0]), (16, 128)),
    "ragged, a context of three passes": (([4160, 63, 1600], [63, 63, 600]), (16, 128)),
    "whole tiles": (([512, 384], [512, 384]), (16,)),
}
WIDTHS = {"nope": 128, "rope": 64, "v": 128, "latent_dim": 512}
SCALE = 0.135234
SPANS = {"one": expanded.SCRATCH_ROWS, "several": 0}  # rows of a pass, 0: 640 tokens
BOUNDS = {"B": 32, "P": 257}  # so the kernels of all steps of one pass are the same
CHECK_SECONDS, TIME_SECONDS = 45, 30
ROUNDS = 3


def only_expanded(node: GpuNode) -> tuple[Variant, ...]:
    """As kernel.lower, but every sequence is expanded."""
    return (Variant(Expanded.of(node, 0).steps()),)


def choose(way: Prefill | None, span_rows: int, heads: int) -> None:
    """Let the next node that is lowered take this way."""
    kernel.lower = only_expanded
    expanded.SM90_PREFILL = way
    expanded.SCRATCH_ROWS = span_rows or 640 * heads


def node_of(
    lengths: Sequence[int], queries: Sequence[int], heads: int, device: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and attributes of a step; on the device "meta" its shapes alone."""
    blocks = [-(-n // 64) for n in lengths]
    cos, sin = rope_tables(64, max(lengths))
    if device == "meta":
        table = torch.empty(len(lengths), max(blocks), dtype=torch.int32)
        starts, sizes = torch.empty(len(lengths) + 1, dtype=torch.int32), torch.empty(len(lengths), dtype=torch.int32)
        positions = torch.empty(sum(queries), dtype=torch.int32)
        cache = torch.empty(sum(blocks) + 2, 64 * 576 * 2, dtype=torch.uint8, device=device)
    else:
        g = torch.Generator().manual_seed(len(lengths))
        batch = make_batch(lengths, queries, 576, dtype="bfloat16", generator=g)
        table, starts, sizes = batch.block_table, batch.query_starts, batch.sequence_lengths
        positions, cache = batch.positions, batch.cache
    inputs = {
        "q": torch.empty(sum(queries), heads * 192, dtype=torch.bfloat16, device=device),
        "kv_b": torch.empty(heads * 256, 512, dtype=torch.bfloat16, device=device),
        "cos": cos,
        "sin": sin,
        "positions": positions,
        "query_starts": starts,
        "sequence_lengths": sizes,
        "block_table": table,
        "cache": cache,
    }
    if device != "meta":
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        inputs["q"].normal_()
        inputs["kv_b"].normal_(std=512**-0.5)
    attributes = {"heads": heads, **WIDTHS, "scale": SCALE, "mode": "expanded", "cache_dtype": "bfloat16"}
    attributes |= {"block_tokens": 64, "block_bytes": 64 * 576 * 2}
    return inputs, attributes


def check(way: Prefill | None) -> dict[str, float]:
    """The worst row's error against the reference, by case; infinite where two runs differ."""
    found = {}
    for name, ((lengths, queries), many_heads) in CHECKS.items():
        for heads in many_heads:
            inputs, attributes = node_of(lengths, queries, heads, "cuda")
            kv_b = StoredWeight(parse_format("fp32"), inputs["kv_b"].float())
            with torch.device("cuda"):
                (want,) = reference(**{**inputs, "kv_b": kv_b}, latent=None, k_rope=None, **attributes)
            for passes, rows in SPANS.items():
                choose(way, rows, heads)
                op = GpuOp("MlaAttention", inputs, {**attributes, "kv_b_format": "bf16"}, bounds=BOUNDS)
                got = op()["o"]
                same = torch.equal(op()["o"], got)
                found[f"{name}, {heads} heads, {passes} pass"] = worst_row(got, want) if same else math.inf
    return found


def attention_calls(
    way: Prefill | None, inputs: Mapping[str, torch.Tensor], attributes: Mapping[str, Any]
) -> tuple[GpuOp, list[Any]]:
    """A step that ran, and its launches of the attention kernel that have something to do."""
    choose(way, SPANS["one"], attributes["heads"])
    op = GpuOp("MlaAttention", inputs, {**attributes, "kv_b_format": "bf16"}, bounds=BOUNDS)
    op()
    calls = [call for call in op.calls() if call.name in ("mla_prefill", "sm90_mla_prefill")]
    tokens = sum(-(-int(n) // 64) * 64 for n in inputs["sequence_lengths"])
    return op, calls[: math.ceil(tokens / (SPANS["one"] // attributes["heads"]))]


def parse_case(case: str) -> tuple[int, list[int]]:
    """`heads:tokens x sequences`."""
    heads, _, shape = case.partition(":")
    tokens, _, count = shape.partition("x")
    return int(heads), [int(tokens)] * int(count)


def teraflops(case: str, microseconds: float) -> float:
    heads, lengths = parse_case(case)
    return sum(2 * (192 + 128) * heads * n * (n + 1) // 2 for n in lengths) / microseconds / 1e6


def measure(way: Prefill | None, case: str) -> dict[str, list[float]]:
    """Microseconds of this way and of Triton, one after the other, ROUNDS times; every pass of the attention."""
    heads, lengths = parse_case(case)
    step, graphs = node_of(lengths, lengths, heads, "cuda"), {}
    for name, each in (("triton", None), ("way", way)) if way else (("way", way),):
        op, calls = attention_calls(each, *step)
        stream = op.executor.shared.stream
        once = graph_seconds(capture(calls, stream), stream, 1)
        repeats = max(1, math.ceil(2e-3 / once))
        graphs[name] = (op, capture(calls * repeats, stream), repeats)
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, (op, graph, repeats) in graphs.items():
            found[name].append(graph_seconds(graph, op.executor.shared.stream, 3) / repeats * 1e6)
    return found


def measure_fa3(case: str) -> dict[str, list[float]]:
    """Microseconds of FlashAttention 3 over sequences of equal length, keys of every head expanded."""
    heads, lengths = parse_case(case)
    total, longest = sum(lengths), lengths[0]
    q, k = (torch.randn(total, heads, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(total, heads, 128, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(0, total + 1, longest, device="cuda", dtype=torch.int32)
    none = [None] * 4
    arguments = (q, k, v, *none, starts, starts, None, None, None, longest, longest, *none, *none, None)
    rest = (192**-0.5, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)
    forward: Callable[..., Any] = torch.ops._vllm_fa3_C.fwd
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward(*arguments, *rest)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(2):
                forward(*arguments, *rest)
    return {"way": [graph_seconds(graph, stream, 3) / 2 * 1e6 for _ in range(ROUNDS)]}


def say(**message: object) -> None:
    """A line to the process that waits for it."""
    print(json.dumps(message), flush=True)


def work(name: str, cases: list[str]) -> None:
    """A way's process: check, say so, wait for a line, time."""
    if name == "fa3":
        torch.ops.load_library(str(Path(os.environ["PEERS"]) / "_vllm_fa3_C.abi3.so"))
        say(checked={})
    else:
        say(checked=check(WAYS[name]))
    sys.stdin.readline()
    for case in cases:
        say(case=case, times=measure_fa3(case) if name == "fa3" else measure(WAYS[name], case))
        torch.cuda.empty_cache()
    say(done=True)


class Worker:
    """The process of a way."""

    def __init__(self, name: str, cases: Sequence[str]) -> None:
        command = [sys.executable, __file__, "--worker", name, "--cases", ",".join(cases)]
        self.name, self.failed = name, ""
        self.said = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, bufsize=0
        )
        self.unread = b""

    def read(self, until: float) -> dict[str, Any] | None:
        """The next message; None, and the process is ended, if there is none by then (`time.monotonic`)."""
        assert self.process.stdout
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            read = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not read:
                self.end("ended" if ready else "took too long")
                return None
            self.unread += read
        line, _, self.unread = self.unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def go(self) -> None:
        assert self.process.stdin
        self.process.stdin.write(b"go\n")

    def end(self, why: str = "") -> None:
        """Stop it; `why`, if it failed, goes with its last words."""
        self.process.kill()
        self.process.wait()
        if why:
            self.said.seek(0)
            words = self.said.read().decode(errors="replace").strip().splitlines()
            self.failed = f"{why}: {' | '.join(words[-3:])}" if words else why


def compile_all(ways: Sequence[str], cases: Sequence[str]) -> None:
    """Every kernel that the run will want, into the cache."""
    seen = set()
    for name in ways:
        wanted = [(heads, rows) for _, many in CHECKS.values() for heads in many for rows in SPANS.values()]
        wanted += [(parse_case(case)[0], SPANS["one"]) for case in cases]
        for heads, rows in dict.fromkeys(wanted):
            inputs, attributes = node_of([64], [64], heads, "meta")
            choose(WAYS[name], rows, heads)
            compiler = hopper_compiler("sm_90a")
            lower_gpu([node_program("MlaAttention", inputs, {**attributes, "kv_b_format": "bf16"}, BOUNDS)], compiler)
            for built in compiler.built.values():
                if built.compiled.cubin not in seen:
                    used = f"{built.resources.registers} registers, {built.resources.stack_bytes} bytes of stack"
                    print(f"{name}, {heads} heads: {built.compiled.entry} {used}", flush=True)
                seen.add(built.compiled.cubin)


def run(ways: Sequence[str], cases: Sequence[str], check_only: bool) -> dict[str, Any]:
    """{way: {checked: {case: error}, times: {case: {way, triton: [us]}}, failed}}."""
    workers = [Worker(name, cases) for name in ways]
    results: dict[str, Any] = {name: {"checked": {}, "times": {}, "failed": ""} for name in ways}
    until = time.monotonic() + CHECK_SECONDS
    for worker in workers:
        message = worker.read(until)
        if message:
            results[worker.name]["checked"] = message["checked"]
            errors = ", ".join(f"{each}: {error:.2e}" for each, error in message["checked"].items())
            print(f"{worker.name}: {errors or 'not checked'}", flush=True)
    for worker in workers:
        if not worker.failed and not check_only:
            worker.go()
            until = time.monotonic() + TIME_SECONDS
            while (message := worker.read(until)) and "case" in message:
                results[worker.name]["times"][message["case"]] = message["times"]
        results[worker.name]["failed"] = worker.failed
        if worker.failed:
            print(f"{worker.name}: {worker.failed}", flush=True)
        worker.end()
    return results


def show(results: Mapping[str, Any], cases: Sequence[str]) -> None:
    """us (TF; Triton's time over it) by way and case; (x): worse than the table of tolerances allows, or failed."""
    limit = TOLERANCES["attention", "bfloat16"]
    table = Table("us (TF, x Triton)", "worst row", *cases)
    for name, result in results.items():
        row = []
        for case in cases:
            times = result["times"].get(case)
            if not times:
                row.append("-")
                continue
            took = statistics.median(times["way"])
            beside = f", {statistics.median(times['triton']) / took:.2f}" if "triton" in times else ""
            row.append(f"{took:.0f} ({teraflops(case, took):.0f}{beside})")
        worst = max(result["checked"].values(), default=0.0)
        wrong = " (x)" if worst > limit or result["failed"] else ""
        table.add_row(name, f"{worst:.2e}{wrong}", *row)
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    ways, cases = options.ways.split(","), options.cases.split(",")
    if options.worker:
        work(options.worker, cases)
        return
    if options.compile_only:
        compile_all(ways, cases)
        return
    if (Path(os.environ.get("PEERS", "/nowhere")) / "_vllm_fa3_C.abi3.so").exists():
        ways.append("fa3")
    else:
        print("fa3: not there, left out")
    results = run(ways, cases, options.check_only)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "gpu_prefill.json").write_text(json.dumps(results, indent=1))
    show(results, cases)
    limit = TOLERANCES["attention", "bfloat16"]
    if any(r["failed"] or max(r["checked"].values(), default=0.0) > limit for r in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
