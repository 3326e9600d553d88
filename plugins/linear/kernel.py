"""Linear on GPUs: one Triton kernel for every storage format, with tiles chosen by the number of tokens.

A few tokens read every weight once, so memory sets the pace: K is split until all multiprocessors work, and the last
program of a tile adds up the parts in their order (the same sums in every run). Many tokens multiply bfloat16 by cuBLAS,
integer codes after their dequantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from dsc.plugins.formats import Format
from dsc.plugins.gpu_node import Arch, GpuNode, Typed
from dsc.plugins.triton_activations import quantize
from dsc.plugins.triton_weights import block_k, codes, decode_bytes, decode_nibbles, math_of, prefetch_rows, product
from dsc.runtime.steps import Gemm, Kernel, Matrix, Step, Variant

SMS = {80: 108, 90: 132, 100: 148}  # of the usual chip of an architecture: how often K is split aims at these
SPLIT_TOKENS = 256  # more of them fill the chip without splits
FIXED_STEPS = 6  # what a program costs before and after its loop, in steps of the loop
DEQUANTIZE_TOKENS = 1024  # from here on, integer codes become bfloat16 once and cuBLAS multiplies
DEQUANTIZE_BLOCK = 4096


@triton.jit
def linear(
    x,
    x_scales,
    rows,
    w,
    w_scales,
    y,
    parts,
    arrivals,
    count,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    MATH: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t] = W x[t or rows[t]], one tile of BM tokens and BN rows of W; the second grid axis splits K."""
    m, n = _tile(count, BM, (N + BN - 1) // BN)
    split = tl.program_id(1)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    begin = split * STEPS // SPLITS * BLOCK_K
    end = tl.minimum((split + 1) * STEPS // SPLITS * BLOCK_K, K)
    w_rows = n * BN + tl.arange(0, BN)
    valid_rows = w_rows if N % BN == 0 else tl.minimum(w_rows, N - 1)
    if PREFETCH > 0:
        prefetch_rows(w, valid_rows, begin, K, KIND, PREFETCH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    t = m * BM + tl.arange(0, BM)
    inside = t < count
    x_rows = t if rows is None else tl.load(rows + t, inside, 0)
    sums = product(
        x, x_scales, count, x_rows, inside, w, w_scales, valid_rows, begin, end, K, KIND, GROUP, MATH, SWAP, BLOCK_K
    )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SWAP:
        at = t[None, :].to(tl.int64) * N + w_rows[:, None]
        stored = inside[None, :] & (w_rows < N)[:, None]
        cell = tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
    else:
        at = t[:, None].to(tl.int64) * N + w_rows[None, :]
        stored = inside[:, None] & (w_rows < N)[None, :]
        cell = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    if SPLITS == 1:
        tl.store(y + at, sums.to(y.dtype.element_ty), stored)
    else:
        tile = tl.program_id(0)
        part = parts + tile.to(tl.int64) * (SPLITS * BM * BN) + cell
        tl.store(part + split * (BM * BN), sums, stored)
        tl.debug_barrier()  # every thread's part, before one thread says that it is there
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            total = tl.load(part, stored, 0.0, cache_modifier=".cg")
            for other in range(1, SPLITS):
                total += tl.load(part + other * (BM * BN), stored, 0.0, cache_modifier=".cg")
            tl.store(y + at, total.to(y.dtype.element_ty), stored)
            tl.store(arrivals + tile, 0)


@triton.jit
def _tile(count, BM: tl.constexpr, TILES_N: tl.constexpr):
    """Tiles in bands of eight token tiles, so that those running at a time share activations and weights in the L2."""
    BAND: tl.constexpr = 8
    tile = tl.program_id(0)
    band = tile // (BAND * TILES_N)
    height = tl.minimum(tl.cdiv(count, BM) - band * BAND, BAND)
    inner = tile % (BAND * TILES_N)
    return band * BAND + inner % height, inner // height


@triton.jit
def dequantize(w, w_scales, values, ROW: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """values[n, k] = bfloat16 of the weight; ROW stored bytes a row."""
    n = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < ROW
    data = tl.load(w + n * ROW + byte, inside, 0)
    if KIND == "wint4":
        low, high = decode_nibbles(data, "bf16")
        scale = tl.load(w_scales + n * (2 * ROW // GROUP) + byte * 2 // GROUP, inside, 0.0).to(tl.float32)
        low, high = (low.to(tl.float32) * scale).to(tl.bfloat16), (high.to(tl.float32) * scale).to(tl.bfloat16)
        k = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        tl.store(values + n * (2 * ROW) + k, tl.interleave(low, high), k < 2 * ROW)
    else:
        scale = tl.load(w_scales + n).to(tl.float32)
        tl.store(values + n * ROW + byte, (decode_bytes(data, "fp32") * scale).to(tl.bfloat16), inside)


@dataclass(frozen=True)
class Tile:
    """How a kernel goes about it. `tokens` x `rows` of the result a program; `swap`: rows are the first side of the dot.

    programs   that fit on a multiprocessor at a time: K is split to fill them
    prefetch   bytes of every weight row fetched to the L2 before the previous kernel ends
    splits     of K; 0: chosen from the weight's size
    """

    tokens: int
    rows: int
    swap: bool
    warps: int = 4
    stages: int = 4
    programs: int = 2
    block_k: int = 0
    prefetch: int = 512
    splits: int = 0


FLOAT32 = ((16, Tile(16, 64, False, stages=2)), (0, Tile(64, 64, False, warps=8, stages=2)))
# By the weight's kind, for bfloat16 activations: (most tokens, tile); 0 tokens: any number.
TILES: dict[str, tuple[tuple[int, Tile], ...]] = {
    "bf16": ((16, Tile(16, 64, True, stages=5, block_k=128)), (0, Tile(64, 128, True, block_k=64))),
    "fp8": (
        (16, Tile(16, 128, True, stages=5)),
        (32, Tile(32, 128, True)),
        (64, Tile(64, 128, False)),
        (256, Tile(128, 128, False, warps=8, programs=1)),
        (0, Tile(128, 128, False, warps=8, programs=1)),
    ),
    "wint8": (
        (8, Tile(8, 128, True)),
        (16, Tile(16, 128, False)),
        (64, Tile(64, 64, True, stages=3)),
        (256, Tile(128, 128, True, warps=8, stages=3, programs=1)),
        (0, Tile(128, 128, True, warps=8, stages=3, programs=1)),
    ),
    "wint4": (
        (8, Tile(8, 128, True, stages=5)),
        (16, Tile(16, 128, False, stages=5)),
        (64, Tile(64, 128, True, warps=8)),
        (256, Tile(128, 128, True, warps=8, stages=3, programs=1)),
        (0, Tile(128, 128, True, warps=8, stages=3, programs=1)),
    ),
}


def tiles_for(format_: Format, math: str) -> tuple[tuple[int, Tile], ...]:
    """Tiles by the most tokens that they serve, ascending."""
    return FLOAT32 if math == "fp32" else TILES[format_.kind]


def splits_of(tile: Tile, tiles: int, steps: int, arch: Arch) -> int:
    """Into how many parts K is split: what makes the fewest steps one after another, a program's fixed cost counted."""
    slots = SMS[arch.capability] * tile.programs

    def length(splits: int) -> int:
        return -(-tiles * splits // slots) * (-(-steps // splits) + FIXED_STEPS)

    return min(range(1, max(2, min(16, steps // 4) + 1)), key=length)


def multiply(node: GpuNode, x: str, w: str, y: str, count: str = "T", rows: str = "") -> tuple[Variant, ...]:
    """Variants that set y [count, N] to x [*, K] times w [N, K] transposed.

    x, w, y   names of operands as `node.at` takes them, w a weight's
    count     letter of the rows of y
    rows      operand that names the rows of x to take; "" for all in order
    """
    job = _Job.of(node, x, w, y, count, rows)
    before: list[Step] = []
    if job.format.kind == "fp8":
        before, job = job.quantize()
    plans = tiles_for(job.format, job.math)
    last = job.large()
    if last:
        bound = 0 if job.format.kind == "bf16" else DEQUANTIZE_TOKENS - 1
        plans = (*plans[:-1], (bound, plans[-1][1])) if bound else plans[:-1]
    steps = job.launches(plans)
    variants = [
        Variant((*before, step), f"{count} <= {most}" if most else "")
        for (most, _), step in zip(plans, steps, strict=True)
    ]
    return (*variants, *([Variant(tuple(last))] if last else []))


@dataclass(frozen=True)
class _Job:
    """One product: where its operands are, what types it takes."""

    node: GpuNode
    format: Format
    math: str
    x: Typed
    x_scales: Typed | None
    rows: Typed | None
    w: str
    y: Typed
    count: str
    n: int
    k: int

    @staticmethod
    def of(node: GpuNode, x: str, w: str, y: str, count: str, rows: str) -> _Job:
        format_, typed = node.format(w), node.at(x)
        shape = node.types[node.at(w).pointer.operand].shape
        n, k = format_.logical_shape([size for size in shape if isinstance(size, int)])
        rows_at = node.at(rows) if rows else None
        math = math_of(format_, typed.dtype, node.arch)
        return _Job(node, format_, math, typed, None, rows_at, w, node.at(y), count, n, k)

    def quantize(self) -> tuple[list[Step], _Job]:
        """The step that quantizes the activations, and the job on their codes."""
        step, made, scales = quantize(
            self.node, self.x, self.k, self.count, ue8m0=self.format.ue8m0, rows=self.rows, name=self.w
        )
        return [step], replace(self, x=codes(made, self.format, self.math), x_scales=scales, rows=None)

    def launches(self, plans: Sequence[tuple[int, Tile]]) -> list[Kernel]:
        """One launch for each (most tokens, tile). Parts of a split K share one scratch."""
        splits = [self._splits(most, tile) for most, tile in plans]
        cells, most_tiles = 0, 0
        for (most, tile), count in zip(plans, splits, strict=True):
            if count > 1:
                tiles = -(-self.n // tile.rows) * -(-most // tile.tokens)
                cells, most_tiles = max(cells, tiles * tile.tokens * tile.rows * count), max(most_tiles, tiles)
        parts = self.node.add_scratch(f"{self.w}.parts", "float32", (cells,)) if cells else None
        arrivals = self.node.add_zeroed(f"{self.w}.arrivals", "int32", (most_tiles,)) if cells else None
        return [self._launch(tile, count, parts, arrivals) for (_, tile), count in zip(plans, splits, strict=True)]

    def _splits(self, most: int, tile: Tile) -> int:
        if not 0 < most <= SPLIT_TOKENS:
            return 1
        steps = -(-self.k // (tile.block_k or block_k(self.format, self.math, self.k)))
        tiles = -(-self.n // tile.rows) * -(-most // tile.tokens)
        return tile.splits or splits_of(tile, tiles, steps, self.node.arch)

    def _launch(self, tile: Tile, splits: int, parts: Typed | None, arrivals: Typed | None) -> Kernel:
        arch = self.node.arch
        return self.node.triton(
            linear,
            (f"ceil_div({self.count}, {tile.tokens})*{-(-self.n // tile.rows)}", splits),
            {
                "x": self.x,
                "x_scales": self.x_scales,
                "rows": self.rows,
                "w": codes(self.node.at(self.w), self.format, self.math),
                "w_scales": self.node.maybe(f"{self.w}.scales"),
                "y": self.y,
                "parts": parts if splits > 1 else None,
                "arrivals": arrivals if splits > 1 else None,
                "count": self.count,
                "N": self.n,
                "K": self.k,
                "KIND": self.format.kind,
                "GROUP": self.format.group,
                "MATH": self.math,
                "SWAP": tile.swap,
                "BLOCK_K": tile.block_k or block_k(self.format, self.math, self.k),
                "BM": tile.tokens,
                "BN": tile.rows,
                "SPLITS": splits,
                "PREFETCH": tile.prefetch if arch.has_pdl else 0,
                "PDL": arch.has_pdl,
            },
            num_warps=tile.warps,
            num_stages=tile.stages,
            pdl=True,
        )

    def large(self) -> list[Step]:
        """Steps for any number of tokens through cuBLAS; none where it has no such product."""
        if self.math != "bf16" or self.format.kind == "fp8" or self.rows or self.y.dtype != "bfloat16":
            return []
        steps: list[Step] = []
        weight = self.node.at(self.w)
        if self.format.kind != "bf16":
            weight, step = self._dequantize()
            steps.append(step)
        a = Matrix(self.x.pointer, "bfloat16", self.k)
        b = Matrix(weight.pointer, "bfloat16", self.k, transposed=True)
        c = Matrix(self.y.pointer, "bfloat16", self.n)
        return [*steps, Gemm(a, b, c, m=self.count, n=self.n, k=self.k)]

    def _dequantize(self) -> tuple[Typed, Kernel]:
        values = self.node.add_scratch(f"{self.w}.values", "bfloat16", (self.n, self.k))
        row = self.k // 2 if self.format.kind == "wint4" else self.k
        step = self.node.triton(
            dequantize,
            (self.n, -(-row // DEQUANTIZE_BLOCK)),
            {
                "w": self.node.at(self.w),
                "w_scales": self.node.at(f"{self.w}.scales"),
                "values": values,
                "ROW": row,
                "KIND": self.format.kind,
                "GROUP": self.format.group,
                "BLOCK": DEQUANTIZE_BLOCK,
            },
            num_warps=8,
        )
        return values, step


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """The tile that suits the step's tokens."""
    return multiply(node, "x", "w", "y")
