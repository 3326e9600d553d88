"""Linear's kernels, the output head's and the sampler's on a GPU, side by side: microseconds a call.

    python benchmarks/gpu_linear.py [--ops linear,head,sample] [--formats wint4:128,wint8] [--shapes 2112x7168,...]
        [--tokens 1,4,16,64,256] [--ways chosen,gemm] [--before FILE] [--json FILE] [--compile-only]

Every way is held against the reference, then all ways of a number of tokens take turns in CUDA graphs, over copies of the
weight that fill several L2 caches, so every weight comes from memory; medians. Ways of Linear: `chosen`, what a node takes;
`triton` alone; `few` and `many`, few_tokens.cu and sm90_many_tokens.cu wherever they apply; `gemm`, dequantized for cuBLAS.
fp8 and the head have candidates by name, tiles of Triton (T) and of sm90_stream_k.cu (S): tokens, rows, warps or stages.
`scaled_mm` and `mm` are torch's, on activations that are quantized and gathered already. plugins/linear/kernel.py chooses by
these tables. --before is another kernel.py of Sample, timed beside it, whose results must be the same bit for bit.
--compile-only fills the kernels' cache on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.gpu import Cubins, node_program
from support.random_weights import random_weight
from support.sample_cases import differences
from support.tolerances import TOLERANCES, worst_row

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.lower_gpu import lower_gpu
from dsc.plugins.formats import parse_format
from dsc.plugins.gpu_node import Arch
from dsc.plugins.linear import kernel
from dsc.plugins.linear.kernel import Gemm16, Tile, Way
from dsc.plugins.linear.reference import reference
from dsc.plugins.linear.sm90_stream_k import StreamK
from dsc.plugins.sample import kernel as sample_kernel
from dsc.plugins.sample.reference import reference as sample_reference
from dsc.plugins.stored import StoredWeight, quantize_activations
from dsc.runtime.program import Program

ROTATED_BYTES = 240 << 20  # four times the L2 of an H200
ROUNDS = 9
SECONDS = 90  # a case with a kernel that never ends ends the run
R1 = "2112x7168,4096x7168,24576x1536,7168x16384,36864x7168,7168x18432"
V2_LITE = "3072x2048,576x2048,2048x2048,5632x2048,2048x2816"
HEAD = (129280, 7168)
STREAMS: dict[str, Way] = {
    "S64x256 5": StreamK(64, 2, 5),
    "S64x256 5 pair": StreamK(64, 2, 5, 2),
    "S128x128 7": StreamK(128, 1, 7),
    "S128x128 7 pair": StreamK(128, 1, 7, 2),
    "S128x256 4": StreamK(128, 2, 4),
    "S128x256 4 pair": StreamK(128, 2, 4, 2),
    "S256x128 4": StreamK(256, 1, 4),
    "S256x128 4 pair": StreamK(256, 1, 4, 2),
}
CANDIDATES: dict[str, dict[str, Way]] = {
    "fp8": {
        "T64x128 swap": Tile(64, 128, True),
        "T128x64 5": Tile(128, 64, False, stages=5),
        "T128x128 8w": Tile(128, 128, False, warps=8, programs=1),
        "T128x128 8w swap": Tile(128, 128, True, warps=8, programs=1),
        "T256x64 8w": Tile(256, 64, False, warps=8, programs=1),
        **STREAMS,
    },
    "head": {
        "T64x128 swap": Tile(64, 128, True, block_k=64),
        "T128x128 8w swap": Tile(128, 128, True, warps=8, programs=1, block_k=64),
        "T128x256 8w swap": Tile(128, 256, True, warps=8, programs=1, block_k=64),
        "T256x128 8w": Tile(256, 128, False, warps=8, programs=1, block_k=64),
        "T256x128 8w swap": Tile(256, 128, True, warps=8, programs=1, block_k=64),
        "gemm": Gemm16(),
        **STREAMS,
    },
    "wint4": {
        "T64x64": Tile(64, 64, False, stages=3),
        "T64x128 8w": Tile(64, 128, False, warps=8, stages=3),
    },
}


def ways(kind: str) -> dict[str, dict[str, object]]:
    """Settings of plugins/linear/kernel.py that make it take one way; `kind` of weight, or "head"."""
    never = {"FEW_WIDTH": 1 << 30, "MANY_FROM": 1, "MANY": kernel.TILES}
    never |= dict.fromkeys(("DEQUANTIZE_TOKENS", "DEQUANTIZE_TOKENS_SMALL"), 1 << 30)
    made: dict[str, dict[str, object]] = {"chosen": {}}
    if kind in ("wint4", "wint8"):
        made["triton"] = never
        made["few"] = {**never, "FEW_WIDTH": 0}
        made["many"] = {**never, "MANY": kernel.MANY}
        made["gemm"] = {**never, "DEQUANTIZE_TOKENS": 2, "DEQUANTIZE_TOKENS_SMALL": 2}
    for name, way in CANDIDATES.get(kind, {}).items():
        # Steps of Triton's splits of K are counted for these numbers of tokens.
        tiles = {**kernel.TILES, "bf16" if kind == "head" else kind: tuple((t, way) for t in (64, 128, 192, 256, 0))}
        made[name] = {**never, "TILES": tiles, "MANY": tiles}
    return made


@contextmanager
def changed(module: ModuleType, settings: Mapping[str, object]) -> Iterator[None]:
    """A module with other globals for a while."""
    before = {name: getattr(module, name) for name in settings}
    for name, value in settings.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@dataclass
class Case:
    """One node, all of whose ways are timed: operands by slot, the letter that counts tokens and its bound.

    module    whose globals `ways` change
    """

    op: str
    title: str
    module: ModuleType
    ways: Mapping[str, Mapping[str, object]]
    given: Mapping[str, torch.Tensor]
    attributes: Mapping[str, str]
    letter: str
    most: int

    def lowered(self) -> dict[str, tuple[Program, CubinCompiler]]:
        """The program of the node by way, kernels compiled."""
        made = {}
        for name, settings in self.ways.items():
            compiler = CubinCompiler(Arch("sm_90a"))
            with changed(self.module, settings):
                node = node_program(self.op, self.given, self.attributes, {self.letter: self.most})
                (program,) = lower_gpu([node], compiler)
            spilled = {b.compiled.entry: b.resources for b in compiler.built.values() if b.resources.stack_bytes}
            assert not spilled, (self.op, self.title, name, spilled)
            made[name] = program, compiler
        return made


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
    chosen = {name: way for name, way in ways("head").items() if not wanted or name in wanted}
    return Case("LmHead", f"head {HEAD[0]}x{HEAD[1]}", kernel, chosen, inputs, {"w_format": "bf16"}, "R", most)


def sample_case(tokens: Sequence[int], before: ModuleType | None) -> Case:
    """Sample on R1's vocabulary, as it is and as `before` has it."""
    most, vocabulary = max(tokens), HEAD[0]
    floats, ints = ("temperature", "top_p", "min_p"), ("top_k", "positions", "drafts")
    inputs = {name: torch.empty(most, device="meta") for name in floats}
    inputs |= {name: torch.empty(most, dtype=torch.int32, device="meta") for name in ints}
    inputs |= {
        "seeds": torch.empty(most, dtype=torch.int64, device="meta"),
        "logits": torch.empty(most, vocabulary, device="meta"),
        "token_mask": torch.empty(most, -(-vocabulary // 32), dtype=torch.int32, device="meta"),
    }
    made: dict[str, dict[str, object]] = {"now": {}}
    if before is not None:
        made = {"before": {"lower": before.lower}, **made}
    return Case("Sample", "", sample_kernel, made, inputs, {}, "R", most)


def make_weight(format_: str, shape: tuple[int, int], device: str) -> dict[str, torch.Tensor]:
    """Operands of a random weight, made on the device; on "meta", their types."""
    if device == "meta":
        parts = parse_format(format_).parts(shape)
        empty = {name: torch.empty(size, dtype=getattr(torch, d), device="meta") for name, (d, size) in parts.items()}
        return {"w" if name == "data" else "w.scales": tensor for name, tensor in empty.items()}
    with torch.device(device):
        weight = random_weight(format_, shape, torch.Generator(device).manual_seed(shape[0]))
    return {"w": weight.data} | ({} if weight.scales is None else {"w.scales": weight.scales})


class Bound:
    """A program with its memory: what is given, an arena, and memory of its own for what stays zero between steps."""

    def __init__(self, program: Program, compiler: CubinCompiler, given: Mapping[str, torch.Tensor]) -> None:
        from dsc.runtime.cuda.bind import Binder
        from dsc.runtime.cuda.driver import Library

        arena = torch.full((max(program.arena_bytes, 1),), 0xFF, dtype=torch.uint8, device="cuda")
        self.zeroed = []
        tensors = {}
        for name, operand in program.operands.items():
            if name in given:
                tensors[name] = given[name]
            elif operand.offset is not None:
                tensors[name] = arena[operand.offset : operand.offset + operand.bytes]
            else:
                tensors[name] = torch.zeros(operand.bytes, dtype=torch.uint8, device="cuda")
                self.zeroed.append(tensors[name])
        cubins, libraries = Cubins(compiler), dict[str, Library]()

        def library(name: str) -> Library:
            if name not in libraries:
                libraries[name] = Library(cubins.kernel(name), name)
            return libraries[name]

        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.binder = Binder(program, tensors, library, sms)

    def calls(self, letters: Mapping[str, int]) -> list[Callable[[int], object]]:
        """The launches of a step."""
        return [step.call for step in self.binder.bind(letters)]


Calls = Sequence[Callable[[int], object]]


def run(calls: Calls, stream: torch.cuda.Stream) -> None:
    """Launch a step behind what the default stream did, and wait for it."""
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call(stream.cuda_stream)
    stream.synchronize()


def microseconds(every: Mapping[str, Calls], copies: int, stream: torch.cuda.Stream) -> dict[str, float]:
    """Of one call: medians of graphs that take turns, each with the calls for all copies."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, calls in every.items():
        run(calls, stream)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):  # without the garbage collection of torch.cuda.graph
            graphs[name].capture_begin()
            for call in calls:
                call(stream.cuda_stream)
            graphs[name].capture_end()
    times: dict[str, list[float]] = {name: [] for name in every}
    with torch.cuda.stream(stream):
        for _ in range(ROUNDS + 2):
            for name, graph in graphs.items():
                graph.replay()  # the clock and the caches as this way leaves them
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                stream.synchronize()
                times[name].append(begin.elapsed_time(end) / copies * 1e3)
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def outliers(tokens: int, width: int) -> torch.Tensor:
    """Normal values, one in fifty twenty times as large."""
    values = torch.randn(tokens, width, device="cuda")
    return torch.where(torch.rand_like(values) < 0.02, 20 * values, values).bfloat16()


def products(case: Case, tokens: Sequence[int], add: Callable[..., None]) -> None:
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
    with torch.device("cuda"):
        stored = StoredWeight(format_, weights["w"], weights.get("w.scales"))
        (want,) = reference(x=taken, w=stored)
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
            if not torch.equal(first, y[: count * n]) or not clear or not y[count * n :].isnan().all():
                errors[name] = math.inf
            every[name] = [call for one in programs for call in one.calls({case.letter: count})]
        every |= peers(case, taken[:count], sets)
        for name, time in microseconds(every, copies, stream).items():
            add(case.title, name, count, time, errors.get(name, 0.0), limit)


def peers(case: Case, x: torch.Tensor, sets: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Calls]:
    """torch's products of the same size, as far as this torch has them."""
    if case.op == "LmHead":
        out = torch.empty(len(x), HEAD[0], dtype=torch.bfloat16, device="cuda")
        return {"mm to bfloat16": [lambda stream, w=one["w"]: torch.mm(x, w.T, out=out) for one in sets]}
    if case.attributes["w_format"] != "fp8":
        return {}
    scaling = getattr(torch.nn.functional, "ScalingType", None)
    if scaling is None:
        return {}
    x_codes, x_scales = quantize_activations(x)
    x_scales = x_scales.T.contiguous().T

    def product(stream: int, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        recipes = scaling.BlockWise1x128, scaling.BlockWise128x128
        return torch.nn.functional.scaled_mm(
            x_codes, w.T, x_scales, recipes[0], scales.T, recipes[1], output_dtype=torch.bfloat16
        )

    calls = [partial(product, w=one["w"], scales=one["w.scales"]) for one in sets]
    try:
        calls[0](0)
    except (RuntimeError, ValueError, TypeError) as error:
        print(f"scaled_mm, {len(x)} tokens: {str(error).splitlines()[0]}", flush=True)
        return {}
    return {"scaled_mm": calls}


def samples(case: Case, tokens: Sequence[int], add: Callable[..., None]) -> None:
    """Check and time Sample on greedy rows, on rows with a mask, on rows that draw."""
    made, stream = case.lowered(), torch.cuda.Stream()
    most = case.most
    results = {"tokens": torch.int32, "accepted": torch.int32, "logprobs": torch.float32}
    for kind in ("greedy", "masked", "drawn"):
        heat = torch.full((most,), 0.6 if kind == "drawn" else 0.0)
        mask = torch.full((most, case.given["token_mask"].shape[1]), -1, dtype=torch.int32)
        if kind == "masked":
            mask = torch.randint(-(2**31), 2**31, mask.shape).int()
        step = {
            "logits": 2 * torch.randn(most, HEAD[0]), "temperature": heat, "top_p": torch.full((most,), 0.95),
            "top_k": torch.zeros(most).int(), "min_p": torch.zeros(most), "seeds": torch.arange(most),
            "positions": torch.arange(most).int(), "token_mask": mask, "drafts": torch.full((most,), -1).int(),
        }  # fmt: skip
        want = sample_reference(**{name: tensor[:8] for name, tensor in step.items()})
        step = {name: tensor.cuda() for name, tensor in step.items()}
        out = {name: torch.empty(most, dtype=dtype, device="cuda") for name, dtype in results.items()}
        bound = {name: Bound(*program, {**step, **out}) for name, program in made.items()}
        for count in tokens:
            found: dict[str, torch.Tensor] = {}
            errors, every = {}, {}
            for name, one in bound.items():
                every[name] = one.calls({"R": count})
                for tensor in out.values():
                    tensor.view(torch.uint8).fill_(0xFF)
                run(every[name], stream)
                got = {key: tensor[: min(count, 8)].clone() for key, tensor in out.items()}
                wrong = differences(got, tuple(tensor[:count] for tensor in want))
                found[name] = torch.cat([tensor.view(torch.int32).clone() for tensor in out.values()])
                errors[name] = math.inf if wrong or not torch.equal(found[name], next(iter(found.values()))) else 0.0
            for name, time in microseconds(every, 1, stream).items():
                add(f"sample {kind}", name, count, time, errors[name], 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default="linear")
    parser.add_argument("--formats", default="wint4:128,wint8")
    parser.add_argument("--shapes", default=f"{R1},{V2_LITE}")
    parser.add_argument("--tokens", default="1,4,8,16,32,64,128,256,512,1024")
    parser.add_argument("--ways", default="")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    tokens = [int(t) for t in options.tokens.split(",")]
    wanted = [way for way in options.ways.split(",") if way]
    device = "meta" if options.compile_only else "cuda"
    before = None
    if options.before is not None:
        sys.path.insert(0, str(options.before.parent.resolve()))
        before = importlib.import_module(options.before.stem)

    def cases() -> Iterator[tuple[Case, Callable[..., None]]]:
        ops = options.ops.split(",")
        if "sample" in ops:
            yield sample_case(tokens, before), samples
        if "head" in ops:
            yield head_case(tokens, wanted, device), products
        if "linear" in ops:
            for format_ in options.formats.split(","):
                for shape in options.shapes.split(","):
                    n, k = (int(size) for size in shape.split("x"))
                    yield linear_case(format_, (n, k), tokens, wanted, device), products

    rows: dict[tuple[str, str], dict[int, str]] = {}
    records: list[dict[str, Any]] = []

    def add(title: str, way: str, count: int, time: float, error: float, limit: float) -> None:
        records.append({"case": title, "way": way, "tokens": count, "us": time, "error": error, "limit": limit})
        rows.setdefault((title, way), {})[count] = f"{time:.1f}" + ("" if error <= limit else f" WRONG {error:.1e}")

    for case, measure in cases():
        if options.compile_only:
            case.lowered()
            print(f"{case.op} {case.title}: {', '.join(case.ways)}", flush=True)
            continue
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        measure(case, tokens, add)
        for (title, way), row in rows.items():
            if title == case.title or case.op == "Sample":
                print(f"{title} {way}: {' '.join(row.get(t, '-') for t in tokens)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(records, indent=1))
        torch.cuda.empty_cache()
    table = Table("case", "way", *(str(t) for t in tokens))
    for (title, way), row in rows.items():
        table.add_row(title, way, *(row.get(t, "-") for t in tokens))
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
