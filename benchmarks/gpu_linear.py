"""Linear's kernels and the output head's on a GPU, side by side: microseconds a call.

    python benchmarks/gpu_linear.py [--ops linear,head] [--formats fp8,wint4:128] [--shapes 2112x7168,...]
        [--tokens 1,4,16,64,256] [--ways chosen,gemm] [--json FILE] [--compile-only]

Every way is held against the product in float64 (activations of fp8 quantized on the CPU: a GPU divides by multiplying), then
all ways of a number of tokens take turns in CUDA graphs, over copies of the weight that fill several L2 caches, so every
weight comes from memory; medians. Ways: `chosen`, what a node takes; `triton` alone; `few` and `many`, few_tokens.cu and
sm90_many_tokens.cu wherever they apply; `gemm`, cuBLAS: on codes of fp8, on dequantized integer codes, on gathered rows of
the head. plugins/linear/kernel.py chooses by these tables. --compile-only fills the kernels' cache on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from node_times import Bound, Calls, Case, Times, microseconds, run
from support.random_weights import random_weight
from support.tolerances import TOLERANCES, worst_row

from dsc.plugins.formats import Format, parse_format
from dsc.plugins.linear import kernel
from dsc.plugins.stored import StoredWeight, round_activations

ROTATED_BYTES = 240 << 20  # four times the L2 of an H200
R1 = "2112x7168,4096x7168,24576x1536,7168x16384,36864x7168,7168x18432"
V2_LITE = "3072x2048,576x2048,2048x2048,5632x2048,2048x2816"
HEAD = (129280, 7168)
FROM_CUBLAS = (
    "DEQUANTIZE_TOKENS",
    "DEQUANTIZE_TOKENS_SMALL",
    "DEQUANTIZE_TOKENS_ODD",
    "GEMM8_TOKENS",
    "GEMM8_TOKENS_SMALL",
    "GATHER_ROWS",
)


def ways(kind: str) -> dict[str, dict[str, object]]:
    """Settings of plugins/linear/kernel.py that make it take one way, for a kind of weight."""
    never = {"FEW_WIDTH": 1 << 30, "MANY_FROM": 1, "MANY": kernel.TILES, **dict.fromkeys(FROM_CUBLAS, 1 << 30)}
    made: dict[str, dict[str, object]] = {"chosen": {}, "triton": never}
    if kind in ("wint4", "wint8"):
        made["few"] = {**never, "FEW_WIDTH": 0}
        made["many"] = {**never, "MANY": kernel.MANY}
    return {**made, "gemm": {**never, **dict.fromkeys(FROM_CUBLAS, 2)}}


def linear_case(
    format_: str, shape: tuple[int, int], tokens: Sequence[int], wanted: Sequence[str], device: str
) -> Case:
    """Linear, its weight on the device ("meta": only its type)."""
    weight = make_weight(format_, shape, device)
    inputs = {"x": torch.empty(1, shape[1], dtype=torch.bfloat16, device="meta"), **weight}
    title, found = f"{format_} {shape[0]}x{shape[1]}", ways(parse_format(format_).kind)
    chosen = {name: way for name, way in found.items() if not wanted or name in wanted}
    return Case("Linear", title, kernel, chosen, inputs, {"w_format": format_}, "T", max(tokens))


def head_case(tokens: Sequence[int], wanted: Sequence[str], device: str) -> Case:
    """R1's head on rows of hidden that come in another order."""
    most = max(tokens)
    inputs = {
        "hidden": torch.empty(most, HEAD[1], dtype=torch.bfloat16, device="meta"),
        "logit_rows": torch.empty(most, dtype=torch.int32, device="meta"),
        **make_weight("bf16", HEAD, device),
    }
    chosen = {name: way for name, way in ways("bf16").items() if not wanted or name in wanted}
    return Case("LmHead", f"head {HEAD[0]}x{HEAD[1]}", kernel, chosen, inputs, {"w_format": "bf16"}, "R", most)


def make_weight(format_: str, shape: tuple[int, int], device: str) -> dict[str, torch.Tensor]:
    """Operands of a random weight, made on the device; on "meta", their types."""
    if device == "meta":
        parts = parse_format(format_).parts(shape)
        empty = {name: torch.empty(size, dtype=getattr(torch, d), device="meta") for name, (d, size) in parts.items()}
        return {"w" if name == "data" else "w.scales": tensor for name, tensor in empty.items()}
    with torch.device(device):
        weight = random_weight(format_, shape, torch.Generator(device).manual_seed(shape[0]))
    return {"w": weight.data} | ({} if weight.scales is None else {"w.scales": weight.scales})


def outliers(tokens: int, width: int) -> torch.Tensor:
    """Normal values, one in fifty twenty times as large."""
    values = torch.randn(tokens, width, device="cuda")
    return torch.where(torch.rand_like(values) < 0.02, 20 * values, values).bfloat16()


def exact(x: torch.Tensor, format_: Format, w: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """x times a weight as Linear means it, in float64."""
    values = round_activations(x.cpu(), format_.ue8m0).to(x.device) if format_.kind == "fp8" else x
    with torch.device(x.device):
        return values.double() @ StoredWeight(format_, w, scales).dequantize().double().T


def products(case: Case, tokens: Sequence[int]) -> Iterator[tuple[str, str, int, float, float, float]]:
    """Check and time every way of a Linear or an LmHead."""
    made = case.lowered()
    head, stream = case.op == "LmHead", torch.cuda.Stream()
    x_name, y_name = ("hidden", "logits") if head else ("x", "y")
    weights = {name: tensor for name, tensor in case.given.items() if name.startswith("w")}
    copies = math.ceil(ROTATED_BYTES / sum(tensor.nbytes for tensor in weights.values()))
    sets = [weights] + [{name: t.clone() for name, t in weights.items()} for _ in range(copies - 1)]
    n = HEAD[0] if head else len(weights["w"])
    format_ = parse_format(case.attributes["w_format"])
    x, rows = outliers(case.most, weights["w"].shape[1] * (2 if format_.kind == "wint4" else 1)), None
    y = torch.empty(case.most * n, dtype=torch.float32 if head else torch.bfloat16, device="cuda")
    step = {x_name: x, y_name: y}
    if head:
        rows = torch.randperm(case.most, device="cuda").int()
        step["logit_rows"] = rows
    bound = {name: [Bound(*program, {**one, **step}) for one in sets] for name, program in made.items()}
    taken = x if rows is None else x[rows.long()]
    want = exact(taken, format_, weights["w"], weights.get("w.scales")).to(y.dtype)
    limit = TOLERANCES["logits", format_.kind] if head else TOLERANCES["linear", "bfloat16"]
    for count in tokens:
        every: dict[str, Calls] = {}
        errors: dict[str, float] = {}
        for name, programs in bound.items():
            calls = programs[0].calls({case.letter: count})
            y.view(torch.uint8).fill_(0xFF)
            run(calls, stream)
            first = y[: count * n].clone()
            errors[name] = worst_row(first.view(count, n), want[:count])
            run(calls, stream)
            clear = all(not tensor.any() for one in programs for tensor in one.zeroed)
            if not torch.equal(first, y[: count * n]) or not clear or not y[-(-count // 4) * 4 * n :].isnan().all():
                errors[name] = math.inf
            every[name] = [call for one in programs for call in one.calls({case.letter: count})]
        for name, time in microseconds(every, copies, stream).items():
            yield case.title, name, count, time, errors[name], limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default="linear")
    parser.add_argument("--formats", default="wint4:128,wint8")
    parser.add_argument("--shapes", default=f"{R1},{V2_LITE}")
    parser.add_argument("--tokens", default="1,4,8,16,32,64,128,256,512,1024")
    parser.add_argument("--ways", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    tokens = [int(t) for t in options.tokens.split(",")]
    wanted = [way for way in options.ways.split(",") if way]
    device = "meta" if options.compile_only else "cuda"

    def cases() -> Iterator[Case]:
        ops = options.ops.split(",")
        if "head" in ops:
            yield head_case(tokens, wanted, device)
        if "linear" in ops:
            for format_ in options.formats.split(","):
                for shape in options.shapes.split(","):
                    n, k = (int(size) for size in shape.split("x"))
                    yield linear_case(format_, (n, k), tokens, wanted, device)

    times = Times(tokens, options.json)
    for case in cases():
        if options.compile_only:
            case.lowered()
            print(f"{case.op} {case.title}: {', '.join(case.ways)}", flush=True)
        else:
            times.measure(case, partial(products, case, tokens))
    times.show()


if __name__ == "__main__":
    main()
