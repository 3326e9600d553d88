"""What torch offers for packed weights on a CPU, and what the plugins make of it: microseconds a call, the best of many.

    python benchmarks/cpu_ops.py [--threads N] [--shapes 256x256,2048x256] [--tokens 1,2,8,64,512]

The choices in plugins/cpu_linear.py and plugins/moe/cpu.py rest on these tables; a kernel marked * is the one taken.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

from dsc.plugins.cpu_linear import make_product
from dsc.plugins.cpu_node import CpuNode, StepMemo
from dsc.plugins.formats import parse_format
from dsc.plugins.moe import cpu as moe
from dsc.plugins.router import cpu as router
from dsc.plugins.schema import Attribute, Type
from dsc.plugins.stored import StoredWeight, unpack_nibbles

BF16 = torch.bfloat16
Timed = Callable[[], object]


def microseconds(call: Timed, budget_s: float = 0.05) -> float:
    """The fastest of several runs of some calls: others on the machine only add."""
    call()
    start = time.perf_counter()
    call()
    calls = max(1, int(budget_s / 10 / max(time.perf_counter() - start, 1e-7)))
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def random_weight(format_: str, *shape: int) -> StoredWeight:
    """Random codes; scales such that values are about 1 / sqrt(K), as a model's: larger ones end in subnormal products."""
    kind = parse_format(format_)
    spread = shape[-1] ** -0.5
    (dtype, size), largest = kind.parts(shape)["data"], {"wint8": 127, "wint4": 8}.get(kind.kind, 1)
    data = torch.rand(size).mul_(2).sub_(1)
    if not kind.quantized:
        return StoredWeight(kind, (data * spread).to(getattr(torch, dtype)))
    if kind.kind == "fp8":
        codes = data.to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(-127, 128, size, dtype=torch.int8).view(getattr(torch, dtype))
    dtype, size = kind.parts(shape)["scales"]
    return StoredWeight(kind, codes, torch.full(size, spread / largest, dtype=getattr(torch, dtype)))


def wint4(rows: int, columns: int, x: torch.Tensor) -> Iterator[tuple[str, Timed]]:
    for group in (32, 64, 128):
        product = make_product(random_weight(f"wint4:{group}", rows, columns), BF16)
        yield f"* Int4, groups of {group}", partial(product, x)
    w = random_weight("wint4:128", rows, columns)
    assert w.scales is not None
    codes = torch._convert_weight_to_int4pack_for_cpu(unpack_nibbles(w.data).int() + 8, 1)
    scales = torch.stack((w.scales.mT, torch.zeros_like(w.scales.mT)), -1).contiguous()
    yield "_weight_int4pack_mm_for_cpu, g128", lambda: torch._weight_int4pack_mm_for_cpu(x, codes, 128, scales)
    dynamic = torch._dyn_quant_pack_4bit_weight(w.data, w.scales, None, 128, columns, rows)
    wide = x.float()
    yield "_dyn_quant_matmul_4bit, g128", lambda: torch._dyn_quant_matmul_4bit(wide, dynamic, 128, columns, rows)
    yield "dequantize, float32 product, g128", lambda: linear(x.float(), w.dequantize()).bfloat16()


def wint8(rows: int, columns: int, x: torch.Tensor) -> Iterator[tuple[str, Timed]]:
    w = random_weight("wint8", rows, columns)
    assert w.scales is not None
    scales, product, codes = w.scales, make_product(w, BF16), (x * 8).to(torch.int8)
    yield "* Int8", lambda: product(x)
    yield "_weight_int8pack_mm", lambda: torch._weight_int8pack_mm(x, w.data, scales)
    yield "_int_mm (rounds activations too)", lambda: torch._int_mm(codes, w.data.mT)
    yield "dequantize, float32 product", lambda: linear(x.float(), w.dequantize()).bfloat16()


def fp8(rows: int, columns: int, x: torch.Tensor) -> Iterator[tuple[str, Timed]]:
    w = random_weight("fp8", rows, columns)
    product, codes, one = make_product(w, BF16), x.to(torch.float8_e4m3fn), torch.ones(1)
    yield "* Dequantized (activations rounded 1x128)", lambda: product(x)
    yield "torch's own cast to float32, alone", lambda: w.data.float()
    yield "_scaled_mm (one scale for all)", lambda: torch._scaled_mm(codes, w.data.mT, one, one, out_dtype=BF16)


def bf16(rows: int, columns: int, x: torch.Tensor) -> Iterator[tuple[str, Timed]]:
    w = random_weight("bf16", rows, columns)
    product, wide, wide_x = make_product(w, BF16), w.data.float(), x.float()
    yield "* Blocked (oneDNN, packed once)", lambda: product(x)
    yield "linear", lambda: linear(x, w.data)
    yield "cast, float32 product", lambda: linear(x.float(), w.data.float()).bfloat16()
    yield "float32 weight and activations", lambda: linear(wide_x, wide)


def moe_node(
    tokens: int, format_: str, experts: int = 16, chosen: int = 4, hidden: int = 256, inner: int = 128
) -> Timed:
    """tiny-r1's Moe node with one shared expert."""
    up, down = (experts, inner, hidden), (experts, hidden, inner)
    shapes = {"gate": up, "up": up, "down": down, "shared_gate": up[1:], "shared_up": up[1:], "shared_down": down[1:]}
    weights = {name: random_weight(format_, *shape) for name, shape in shapes.items()}
    run = moe.bind(CpuNode("moe", "Moe", {}, {"x": Type("bfloat16", ("T", hidden))}, weights))
    weights_TK, ids_TK = torch.rand(tokens, experts).topk(chosen)
    x, ids, step = torch.randn(tokens, hidden).to(BF16), ids_TK.int(), StepMemo()
    return lambda: run(step, x, ids, weights_TK, None, None)


def router_node(tokens: int, experts: int = 16, hidden: int = 256) -> Timed:
    """tiny-r1's Router node."""
    attributes: dict[str, Attribute] = {
        "top_k": 4,
        "groups": 4,
        "topk_groups": 2,
        "scoring": "sigmoid",
        "group_score": "top2_sum",
    }
    attributes |= {"normalize": 1, "scale": 2.5}
    constants = {"w": torch.randn(experts, hidden), "bias": torch.rand(experts)}
    run = router.bind(CpuNode("router", "Router", attributes, constants=constants))
    x, slots, step = torch.randn(tokens, hidden).to(BF16), torch.arange(tokens, dtype=torch.int32), StepMemo()
    return lambda: run(step, x, slots)


def print_table(title: str, tokens: list[int], rows: dict[str, list[float]]) -> None:
    table = Table("", *(f"T {count}" for count in tokens), title=title, title_justify="left")
    for name, times in rows.items():
        table.add_row(name, *(f"{us:.1f}" for us in times))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", default="256x256,2048x256", help="rows x columns of a weight")
    parser.add_argument("--tokens", default="1,2,8,64,512")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens = [int(count) for count in options.tokens.split(",")]
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {options.threads} threads; us a call")
    for shape in options.shapes.split(","):
        rows, columns = map(int, shape.split("x"))
        for kind in (wint4, wint8, fp8, bf16):
            times: dict[str, list[float]] = {}
            for count in tokens:
                for name, call in kind(rows, columns, torch.randn(count, columns).to(BF16)):
                    times.setdefault(name, []).append(microseconds(call))
            print_table(f"{kind.__name__} [{rows}, {columns}], bfloat16 activations", tokens, times)
    nodes = {
        f"Moe {name}": [microseconds(moe_node(count, name)) for count in tokens]
        for name in ("wint4:128", "wint8", "fp8", "bf16")
    }
    nodes["Router"] = [microseconds(router_node(count)) for count in tokens]
    print_table("nodes of tiny-r1", tokens, nodes)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
