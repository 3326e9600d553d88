"""Linear's kernels on a GPU, side by side: microseconds a call, by format, shape and tokens.

    python benchmarks/gpu_linear.py [--formats wint4:128,wint8] [--shapes 2112x7168,...] [--tokens 1,4,16,64,256] [--compile-only]

Each call runs in a CUDA graph over copies of the weight that fill several L2 caches, so every weight comes from memory;
the median of replays. Ways: `chosen`, what a node takes; `triton` alone; `few` and `many`, few_tokens.cu and
sm90_many_tokens.cu wherever they apply; `gemm`, dequantized for cuBLAS. plugins/linear/kernel.py chooses among them by
these tables. --compile-only fills the kernels' cache on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.gpu import Cubins, node_program
from support.random_weights import random_weight

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.gpu_node import Arch
from dsc.plugins.linear import kernel
from dsc.runtime.bench_layers import capture, graph_seconds
from dsc.runtime.program import Program

LIMIT = 4096  # tokens of a step that the node is planned for
ROTATED_BYTES = 240 << 20  # four times the L2 of an H200
R1 = "2112x7168,4096x7168,24576x1536,7168x16384,36864x7168,7168x18432"
V2_LITE = "3072x2048,576x2048,2048x2048,5632x2048,2048x2816"


def ways() -> dict[str, dict[str, object]]:
    """Settings of plugins/linear/kernel.py that make it take one way."""
    never = {"FEW_WIDTH": 1 << 30, "MANY_FROM": 1, "MANY": kernel.TILES}
    never |= dict.fromkeys(("DEQUANTIZE_TOKENS", "DEQUANTIZE_TOKENS_SMALL"), 1 << 30)
    return {
        "chosen": {},
        "triton": never,
        "few": {**never, "FEW_WIDTH": 0},
        "many": {**never, "MANY": kernel.MANY},
        "gemm": {**never, "DEQUANTIZE_TOKENS": 2, "DEQUANTIZE_TOKENS_SMALL": 2},
    }


def lowered(
    format_: str, inputs: Mapping[str, torch.Tensor], settings: Mapping[str, object]
) -> tuple[Program, CubinCompiler]:
    """The program of one Linear node with these settings, kernels compiled."""
    before = {name: getattr(kernel, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(kernel, name, value)
        compiler = CubinCompiler(Arch("sm_90a"))
        (program,) = lower_gpu([node_program("Linear", inputs, {"w_format": format_}, {"T": LIMIT})], compiler)
        return program, compiler
    finally:
        for name, value in before.items():
            setattr(kernel, name, value)


def microseconds(
    program: Program, compiler: CubinCompiler, weights: Mapping[str, torch.Tensor], tokens: Sequence[int]
) -> list[float]:
    """Of one call at each number of tokens, over as many copies of the weight as it takes."""
    from dsc.runtime.cuda.executor import CudaExecutor, CudaShared

    device = torch.device("cuda")
    copies = math.ceil(ROTATED_BYTES / sum(t.nbytes for t in weights.values()))
    arena = torch.zeros(max(program.arena_bytes, 1), dtype=torch.uint8, device=device)
    cubins, executors = Cubins(compiler), []
    for _ in range(copies):
        placed = {name: tensor.to(device).reshape(-1).clone() for name, tensor in weights.items()}
        executors.append(CudaExecutor(program, CudaShared(device, placed, cubins, arena)))
        executors[-1].tensor("x").normal_()
    stream = executors[0].shared.stream
    found = []
    for count in tokens:
        calls = [call for executor in executors for call in executor.calls({"T": count})]
        found.append(graph_seconds(capture(calls, stream), stream, 7) / copies * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default="wint4:128,wint8")
    parser.add_argument("--shapes", default=f"{R1},{V2_LITE}")
    parser.add_argument("--tokens", default="1,4,8,16,32,64,128,256,512,1024")
    parser.add_argument("--ways", default=",".join(ways()))
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    tokens = [int(t) for t in options.tokens.split(",")]
    table = Table("format", "N x K", "way", *(str(t) for t in tokens))
    generator = torch.Generator().manual_seed(0)
    for format_ in options.formats.split(","):
        for text in options.shapes.split(","):
            n, k = (int(size) for size in text.split("x"))
            weight = random_weight(format_, (n, k), generator)
            weights = {"w": weight.data} | ({} if weight.scales is None else {"w.scales": weight.scales})
            for way in options.ways.split(","):
                program, compiler = lowered(format_, {"x": torch.empty(1, k).bfloat16(), **weights}, ways()[way])
                row = []
                if not options.compile_only:
                    row = [f"{each:.1f}" for each in microseconds(program, compiler, weights, tokens)]
                table.add_row(format_, text, way, *row)
                print(f"{format_} {text} {way}: {' '.join(row)}", flush=True)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
