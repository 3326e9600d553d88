"""Sample on GPUs without sorting: one reading of the logits for what a softmax needs, and one more of rows that are drawn.

What is drawn is decided by draw.cu, a block a row.

Legend: R rows, V vocabulary, W words of a mask row, S splits of a row.
"""

from typing import Any

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode
from dsc.runtime.steps import Kernel, Variant

SPLIT = 4096  # logits of one program that reads a part of a row
# Of draw.cu. Two of its blocks fit on a multiprocessor of an H200.
THREADS, ROOM, FEW = 512, 2048, 128
DRAW_ARGUMENTS = (
    "logits", "token_mask", "temperature", "top_p", "top_k", "min_p", "seeds", "positions", "floats", "drawn",
)  # fmt: skip


@triton.jit
def sample_scan(
    logits, token_mask, floats, ints, V: tl.constexpr, W: tl.constexpr, S: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of each part of a row: floats[r, :, s] = largest logit, their sum of exponentials, largest allowed;
    ints[r, s] = where the largest allowed is. A NaN makes the largest logit infinite.

    Where all is allowed, without a look at every token's bit.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = split * SPLIT + tl.arange(0, SPLIT)
    raw = tl.load(logits + row * V + at, at < V, float("-inf"))
    word = split * (SPLIT // 32) + tl.arange(0, SPLIT // 32)
    masked = tl.max((tl.load(token_mask + row * W + word, word < W, -1) != -1).to(tl.int32), 0)
    largest = tl.max(raw, 0)
    # Nothing is subtracted where all are -inf; a NaN among the logits makes the sum one.
    total = tl.sum(tl.exp(raw - tl.where(largest > float("-inf"), largest, 0.0)), 0)
    to = floats + row * 3 * S + split
    if masked != 0:
        bits = tl.load(token_mask + row * W + at // 32, at < V, 0)
        values = tl.where(((bits >> (at % 32)) & 1 != 0) & (raw == raw), raw, float("-inf"))
        best = tl.max(values, 0)
        where = tl.min(tl.where(values == best, at, 0x7FFFFFFF), 0)
    else:
        best = largest
        where = tl.min(tl.where(raw == largest, at, 0x7FFFFFFF), 0)
    tl.store(to, tl.where(total != total, float("inf"), largest))
    tl.store(to + S, total)
    tl.store(to + 2 * S, tl.where(best == 0.0, 0.0, best))  # no negative zero
    tl.store(ints + row * S + split, where)


@triton.jit
def sample_pick(
    logits, temperature, floats, ints, drawn, tokens, logprobs, V: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Token and logprob of one row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, S2)
    real = splits < S
    raw = tl.load(floats + row * 3 * S + splits, real, float("-inf"))
    sums = tl.load(floats + row * 3 * S + S + splits, real, 0.0)
    best = tl.load(floats + row * 3 * S + 2 * S + splits, real, float("-inf"))
    where = tl.load(ints + row * S + splits, real, V)
    peak, largest = tl.max(raw, 0), tl.max(best, 0)
    token = tl.min(tl.where(best == largest, where, V), 0)
    sound = (tl.abs(peak) < float("inf")) & (tl.abs(largest) < float("inf"))
    scaled = tl.where(real & (raw > float("-inf")), sums * tl.exp(raw - peak), 0.0)
    total = peak + tl.log(tl.sum(scaled, 0))
    if sound & (tl.load(temperature + row) != 0.0):
        token = tl.load(drawn + row)
    logprob = tl.load(logits + row * V + tl.minimum(token, V - 1)) - total
    tl.store(tokens + row, tl.where(sound, token, -1))
    tl.store(logprobs + row, tl.where(sound, logprob, float("nan")))


@triton.jit
def _follow(reset, value, later_reset, later_value):
    """Two runs of drafts one after the other: a reset forgets what was before it."""
    return reset | later_reset, tl.where(later_reset != 0, later_value, value & later_value)


@triton.jit
def sample_accept(tokens, drafts, accepted, R, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """accepted[r] = 1 up to the first refused draft of each sequence; a row with draft -1 ends one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chain, start = R * 0 + 1, R * 0
    while start < R:
        at = start + tl.arange(0, BLOCK)
        token, draft = tl.load(tokens + at, at < R, -1), tl.load(drafts + at, at < R, -1)
        ends = draft < 0
        good = (ends | (token == draft)).to(tl.int32)
        resets, values = tl.associative_scan((ends.to(tl.int32), good), 0, _follow)
        values = tl.where(resets != 0, values, values & chain)
        tl.store(accepted + at, tl.where(ends, 0, values), at < R)
        chain = tl.sum(tl.where(at == start + BLOCK - 1, values, 0), 0)
        start += BLOCK


def draw_defines(V: int, W: int, S: int, pdl: bool, threads: int, room: int, few: int) -> dict[str, int]:
    """What draw.cu is compiled with, for blocks of `threads` that hold `room` tokens and compare `few` of them."""
    vector = 4 if V % 4 == 0 else 1
    # BUCKETS sums a thread, DEPTH loads under way, PACKED tokens a warp.
    sums, loads, packed = 11 * 8 * threads, 3 * (4 * vector + 4) * threads, 8 * (vector + 1) * threads
    shared_bytes = sums + loads + packed + 8 * room + 1024
    return {
        "V": V, "W": W, "S": S, "THREADS": threads, "ROOM": room, "FEW": few, "SHARED_BYTES": shared_bytes, "PDL": int(pdl),
    }  # fmt: skip


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """A launch over parts of rows, two over rows, one of a single block."""
    V, W = node.width("V"), node.width("MW")
    S, pdl = -(-V // SPLIT), node.arch.has_pdl
    given = {
        "V": V, "W": W, "S": S, "S2": triton.next_power_of_2(S), "SPLIT": SPLIT, "PDL": pdl, "R": "R", "BLOCK": 256,
        "floats": node.add_scratch("floats", "float32", ("R", 3, S)),
        "ints": node.add_scratch("ints", "int32", ("R", S)),
        "drawn": node.add_scratch("drawn", "int32", ("R",)),
        **{name: node.at(name) for name in (*node.inputs, *node.outputs)},
    }  # fmt: skip

    def launch(function: Any, grid: tuple[Any, ...], num_warps: int) -> Kernel:
        arguments = {parameter.name: given[parameter.name] for parameter in function.params}
        return node.triton(function, grid, arguments, num_warps=num_warps, pdl=True)

    defines = draw_defines(V, W, S, pdl, THREADS, ROOM, FEW)
    draw = node.cuda(
        __name__, "draw.cu", "sample_draw", ("R",), THREADS, [given[name] for name in DRAW_ARGUMENTS], defines=defines,
        shared_bytes=defines["SHARED_BYTES"], pdl=True,
    )  # fmt: skip
    return (
        Variant(
            (
                launch(sample_scan, ("R", S), 8),
                draw,
                launch(sample_pick, ("R",), 8),
                launch(sample_accept, (1,), 4),
            )
        ),
    )
