"""Moe and Router on a GPU: microseconds of a whole layer by model, format and tokens, and what they read a second.

    python benchmarks/gpu_moe.py [--cases r1:wint4:128:fp8,r1:fp8:fp8,...] [--tokens 1,16,64,256,4096]
        [--dequantize-pairs 1,1000000] [--compile-only]

A case is the model's shape, the experts' format and the shared expert's, once for each number of pairs an expert from
which integer codes become bfloat16 first, by default as a node takes it. Each step is planned for its tokens and runs in a
CUDA graph with several sets of tokens in turn, random weights and routing; the median of replays. TB/s counts the weights
of the experts hit. --compile-only fills the kernels' cache on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from node_times import changed
from support.gpu import GpuOp, node_program

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.formats import parse_format
from dsc.plugins.gpu_node import Arch
from dsc.plugins.moe import kernel
from dsc.runtime.bench_layers import capture, graph_seconds

# Experts, of a token, D, F, F of the shared one.
MODELS = {"r1": (256, 8, 7168, 2048, 2048), "v2-lite": (64, 6, 2048, 1408, 2816)}
CASES = "r1:wint4:128:fp8,r1:fp8:fp8,r1:wint8:wint8,v2-lite:wint4:128:wint4:128,v2-lite:bf16:bf16"
ROUTER = {"top_k": 8, "groups": 8, "topk_groups": 4, "scoring": "sigmoid", "group_score": "top2_sum"}
SPREAD = {"bf16": 1.0, "fp8": 1.0, "wint8": 74.0, "wint4": 4.6}  # of codes


def random_parts(name: str, kind: str, shape: tuple[int, ...], device: str) -> dict[str, torch.Tensor]:
    """A weight of a spread of about 1 / sqrt(K), by slot name."""
    format_, made = parse_format(kind), {}
    for part, (dtype, size) in format_.parts(shape).items():
        slot = name if part == "data" else f"{name}.{part}"
        made[slot] = tensor = torch.empty(size, dtype=getattr(torch, dtype), device=device)
        if device == "meta":
            continue
        if part == "scales":
            tensor.copy_((0.5 + torch.rand(size, device=device)) * (shape[-1] ** -0.5 / SPREAD[format_.kind]))
        elif tensor.is_floating_point():
            spread = shape[-1] ** -0.5 if format_.kind == "bf16" else 1.0
            for rows in tensor.view(-1, size[-2], size[-1]):
                rows.copy_(torch.randn(rows.shape, device=device) * spread)
        else:
            tensor.random_(0 if format_.kind == "wint4" else -127, 256 if format_.kind == "wint4" else 128)
    return made


def weights_of(model: str, experts: str, shared: str, device: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Weights by slot name, and their formats as attributes."""
    count, _, d, f, shared_f = MODELS[model]
    inputs: dict[str, torch.Tensor] = {}
    attributes = {}
    for prefix, kind, lead, width in (("", experts, (count,), f), ("shared_", shared, (), shared_f)):
        for name, shape in (("gate", (width, d)), ("up", (width, d)), ("down", (d, width))):
            inputs |= random_parts(f"{prefix}{name}", kind, (*lead, *shape), device)
            attributes[f"{prefix}{name}_format"] = kind
    return inputs, attributes


def step_of(model: str, tokens: int, device: str) -> dict[str, torch.Tensor]:
    """Random tokens and their routing."""
    count, top_k, d, *_ = MODELS[model]
    if device == "meta":
        ids = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    else:
        ids = torch.rand(tokens, count, device=device).topk(top_k, 1).indices.int()
    x = torch.randn(tokens, d, device=device).bfloat16()
    return {"x": x, "ids": ids, "weights": torch.rand(tokens, top_k, device=device)}


def seconds(ops: list[GpuOp]) -> float:
    """Of one of these, run one after the other."""
    for op in ops:
        op()
    stream = ops[0].executor.shared.stream
    return graph_seconds(capture([call for op in ops for call in op.calls()], stream), stream, 7) / len(ops)


def moe_row(case: str, tokens: list[int], compile_only: bool) -> list[str]:
    """Microseconds and TB/s at each number of tokens."""
    model, _, formats = case.partition(":")
    half = next(i for i, sign in enumerate(formats) if sign == ":" and not formats[i + 1].isdigit())
    device = "meta" if compile_only else "cuda"
    weights, attributes = weights_of(model, formats[:half], formats[half + 1 :], device)
    row = []
    for count in tokens:
        if compile_only:
            node = node_program("Moe", {**step_of(model, count, device), **weights}, attributes, {"T": count})
            lower_gpu([node], CubinCompiler(Arch("sm_90a")))
            continue
        sets = 6 if count <= 4 else 3 if count <= 64 else 1
        steps = [step_of(model, count, device) for _ in range(sets)]
        took = seconds([GpuOp("Moe", {**step, **weights}, attributes, bounds={"T": count}) for step in steps])
        hit = sum(len(step["ids"].unique()) for step in steps) / sets
        routed = sum(t.nbytes for name, t in weights.items() if not name.startswith("shared"))
        read = routed * hit / MODELS[model][0] + sum(t.nbytes for n, t in weights.items() if n.startswith("shared"))
        row.append(f"{took * 1e6:.1f} ({read / took / 1e12:.2f})")
    return row


def router_row(tokens: list[int], compile_only: bool) -> list[str]:
    """Microseconds of R1's router at each number of tokens, of as many weights as do not stay in the L2."""
    row = []
    attributes = {**ROUTER, "normalize": 1, "scale": 2.5}
    for count in tokens:
        w, bias = torch.randn(256, 7168) * 7168**-0.5, torch.randn(256) * 0.1
        slots = torch.arange(count, dtype=torch.int32)
        inputs = {"x": torch.randn(count, 7168).bfloat16(), "w": w, "bias": bias, "slots": slots}
        if compile_only:
            lower_gpu([node_program("Router", inputs, attributes, {"T": count})], CubinCompiler(Arch("sm_90a")))
            continue
        row.append(
            f"{seconds([GpuOp('Router', inputs | {'w': w + i}, attributes, bounds={'T': count}) for i in range(32)]) * 1e6:.1f}"
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--tokens", default="1,2,4,8,16,64,128,256,512,1024,2048,4096")
    parser.add_argument("--dequantize-pairs", default="")
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    tokens = [int(t) for t in options.tokens.split(",")]
    table = Table("us (TB/s)", *(str(t) for t in tokens))
    # A format's group belongs to it: wint4:128.
    for case in options.cases.split(","):
        for pairs in options.dequantize_pairs.split(","):
            settings = {"DEQUANTIZE_PAIRS": dict.fromkeys(kernel.DEQUANTIZE_PAIRS, int(pairs))} if pairs else {}
            with changed(kernel, settings):
                row = moe_row(case, tokens, options.compile_only)
            name = f"{case}, {pairs}" if pairs else case
            table.add_row(name, *row)
            print(f"{name}: {' '.join(row)}", flush=True)
    table.add_row("router", *router_row(tokens, options.compile_only))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
