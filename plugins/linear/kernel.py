"""Linear on GPUs: a kernel by the weight's format and the number of tokens.

A few tokens read every weight once, so memory sets the pace: K is split until all multiprocessors work, and the parts are
added in a fixed order (the same sums in every run). `linear` is the Triton kernel that serves every format, dtype and
width; wide 4-bit weights stream through `few_tokens.cu`, integer codes of whole steps of 128 columns on Hopper through
`sm90_many_tokens.cu`; many tokens go to cuBLAS, integer codes after their dequantization, on Hopper also codes of fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from dsc.plugins.formats import Format
from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.plugins.linear import cublas, few_tokens, sm90_many_tokens
from dsc.plugins.linear.few_tokens import Few
from dsc.plugins.linear.sm90_many_tokens import Many
from dsc.plugins.triton_activations import quantize
from dsc.plugins.triton_dequantize import dequantize
from dsc.plugins.triton_weights import block_k, codes, math_of, product
from dsc.runtime.steps import SCALED_ROWS, Gemm, Kernel, Matrix, Step, Variant

SMS = {80: 108, 90: 132, 100: 148}  # of the usual chip of an architecture: how often K is split aims at these
SPLIT_TOKENS = 256  # more of them fill the chip without splits
CLUSTERS = (1, 2, 4, 8)
FIXED_STEPS = 6  # what a program costs before and after its loop, in steps of the loop
# From so many tokens on, integer codes become bfloat16 once and cuBLAS multiplies; of small weights (values) sooner.
DEQUANTIZE_TOKENS, DEQUANTIZE_TOKENS_SMALL, SMALL_VALUES = 1024, 257, 1 << 25
DEQUANTIZE_TOKENS_ODD = 65  # of 4-bit weights that sm90_many_tokens.cu does not know, on Hopper
GEMM8_TOKENS, GEMM8_TOKENS_SMALL = 65, 257  # from so many on, fp8 goes to cuBLASLt
GATHER_ROWS = 65  # from so many on, rows are gathered for cuBLAS


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


@dataclass(frozen=True)
class Tile:
    """How a kernel goes about it. `tokens` x `rows` of the result a program; `swap`: rows are the first side of the dot.

    programs   that fit on a multiprocessor at a time: K is split to fill them
    splits     of K; 0: chosen from the weight's size
    """

    tokens: int
    rows: int
    swap: bool
    warps: int = 4
    stages: int = 4
    programs: int = 2
    block_k: int = 0
    splits: int = 0


@dataclass(frozen=True)
class Gemm16:
    """cuBLAS in bfloat16, after integer codes were dequantized."""


@dataclass(frozen=True)
class Gemm8:
    """cuBLASLt on e4m3 codes with scales of groups and blocks, of whole fours of tokens; `padded`: of any number, which
    writes up to three rows behind the last.
    """

    padded: bool = False


Way = Tile | Few | Many | Gemm16 | Gemm8
Plan = tuple[int, Way]  # the most tokens that a way serves (0: any number), ascending

FLOAT32: tuple[Plan, ...] = ((16, Tile(16, 64, False, stages=2)), (0, Tile(64, 64, False, warps=8, stages=2)))
# For bfloat16 activations, by the weight's kind: what serves every format and width.
TILES: dict[str, tuple[Plan, ...]] = {
    "bf16": ((16, Tile(16, 64, True, stages=5, block_k=128)), (0, Tile(64, 128, True, block_k=64))),
    "fp8": (
        (16, Tile(16, 64, True, stages=6, programs=4)),
        (32, Tile(32, 128, True)),
        (64, Tile(64, 64, True, programs=3)),
        (256, Tile(128, 64, False)),
        (0, Tile(128, 128, False, warps=8, programs=1)),
    ),
    "wint8": (
        (8, Tile(8, 128, True)),
        (16, Tile(16, 128, False)),
        (64, Tile(64, 64, True, stages=3)),
        (256, Tile(128, 128, False, warps=8, stages=3, programs=1)),
        (0, Tile(128, 128, False, warps=8, stages=3, programs=1)),
    ),
    "wint4": (
        (8, Tile(8, 64, True, stages=6, programs=4)),
        (16, Tile(16, 64, False, stages=5)),
        (64, Tile(64, 64, False, stages=3)),
        (256, Tile(128, 64, True, warps=8, stages=3, programs=1)),
        (0, Tile(128, 64, True, warps=8, stages=3, programs=1)),
    ),
}
# Without wgmma (before and after Hopper) tiles are smaller, so that their sums stay in registers.
TILES_MMA: dict[str, tuple[Plan, ...]] = {
    **TILES,
    "fp8": ((16, Tile(16, 128, True)), (0, Tile(64, 128, False, warps=8, stages=3))),
    "wint4": (
        (8, Tile(8, 64, True)),
        (16, Tile(16, 64, False)),
        (0, Tile(64, 128, False, warps=8, stages=3)),
    ),
}
# What beats the tiles above, by benchmarks/gpu_linear.py on an H200 (benchmarks/NOTES.md, "linear").
FEW_WIDTH = 4096  # narrower weights are read as fast by Triton
FEW = (Few(4, 8, 1, 6, 4, 2), Few(8, 8, 1, 6, 4, 2))
MANY_FROM = 17
MANY: dict[str, tuple[tuple[int, Many], ...]] = {
    "wint8": ((64, Many(64, 2, 4, 3)), (128, Many(128, 1, 5, 3)), *((t, Many(256, 1, 4, 2)) for t in (256, 512, 0))),
    "wint4": ((64, Many(64, 2, 6, 4)), (128, Many(128, 1, 6, 3)), *((t, Many(256, 1, 4, 2)) for t in (256, 512, 0))),
}


def multiply(node: GpuNode, x: str, w: str, y: str, count: str = "T", rows: str = "") -> tuple[Variant, ...]:
    """Variants that set y [count, N] to x [*, K] times w [N, K] transposed.

    x, w, y   names of operands as `node.at` takes them, w a weight's
    count     letter of the rows of y
    rows      operand that names the rows of x to take; "" for all in order
    """
    job = _Job.of(node, x, w, y, count, rows)
    plans = _needed(job.plans(), node.bounds.get(count, 0))
    parts, arrivals = job.scratch(plans)
    before: dict[_Before, tuple[tuple[Step, ...], _Job]] = {}
    variants = []
    for most, way in plans:
        steps: list[Step] = []
        at, make_ready = job, job.before(way)
        if make_ready is not None:
            if make_ready not in before:
                before[make_ready] = make_ready(job)
            made, at = before[make_ready]
            steps += made
        if isinstance(way, Tile):
            steps.append(at.tile(way, at.splits(most, way), parts, arrivals))
        elif isinstance(way, Few):
            steps.append(at.few(way, parts, arrivals))
        elif isinstance(way, Many):
            steps.append(at.many(way, most))
        elif isinstance(way, Gemm16):
            steps += at.gemm()
        else:
            steps.append(at.gemm8(way))
        variants.append(Variant(tuple(steps), _guard(count, most, way)))
    return tuple(variants)


def _guard(count: str, most: int, way: Way) -> str:
    if most:
        return f"{count} <= {most}"
    return f"{count} == {count}//{SCALED_ROWS}*{SCALED_ROWS}" if way == Gemm8() else ""


def _needed(plans: Sequence[Plan], bound: int) -> list[Plan]:
    """The plans that steps of at most `bound` tokens (0: unknown) come to, the last one for any number."""
    needed = []
    for most, way in plans:
        last = (most == 0 and way != Gemm8()) or 0 < bound <= most
        needed.append((0 if last else most, way))
        if last:
            break
    return needed


def _upto(plans: Sequence[Plan], most: int) -> list[Plan]:
    """The plans for at most so many tokens."""
    fewer = [plan for plan in plans if 0 < plan[0] < most]
    way = next(way for bound, way in plans if bound == 0 or bound >= most)
    return [*fewer, (most, way)]


def splits_of(slots: int, tiles: int, steps: int, choices: Sequence[int]) -> int:
    """Into how many parts K is split: what makes the fewest steps one after another, a program's fixed cost counted."""

    def length(splits: int) -> int:
        return -(-tiles * splits // slots) * (-(-steps // splits) + FIXED_STEPS)

    return min(choices, key=length)


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

    def plans(self) -> list[Plan]:
        """What serves which number of tokens; the last one any number."""
        kind, plans = self.format.kind, list[Plan]()
        if self.math == "fp32":
            return [*FLOAT32]
        if few_tokens.applies(self.format, self.x.dtype, self.k) and self.k >= FEW_WIDTH:
            plans += [(few.tokens, few) for few in FEW]
        tiles = (TILES if self.node.arch.name == "sm_90a" else TILES_MMA)[kind]
        many = sm90_many_tokens.applies(self.format, self.x.dtype, (self.n, self.k), self.node.arch)
        if many:
            tiles = (*(plan for plan in tiles if 0 < plan[0] < MANY_FROM), *MANY[kind])
        plans += [plan for plan in tiles if plan[0] == 0 or not plans or plan[0] > plans[-1][0]]
        if kind == "bf16":
            return [*(plans[:-1] if self.rows is None else _upto(plans, GATHER_ROWS - 1)), (0, Gemm16())]
        if self.rows is not None or self.y.dtype != "bfloat16":
            return plans
        if kind == "fp8":
            return self._with_gemm8(plans)
        return [*_upto(plans, self._dequantize_from(many) - 1), (0, Gemm16())]

    def _with_gemm8(self, plans: list[Plan]) -> list[Plan]:
        if not cublas.takes_codes(self.format, self.x.dtype, (self.n, self.k), self.node.arch):
            return plans
        begin = GEMM8_TOKENS_SMALL if self.n * self.k < SMALL_VALUES else GEMM8_TOKENS
        few = _upto(plans, begin - 1)
        bound = self.node.bounds.get(self.count, 0)
        if bound and bound % SCALED_ROWS == 0:  # then there is room behind any number of rows
            return [*few, (0, Gemm8()), (0, Gemm8(padded=True))]
        return [*few, (0, Gemm8()), *(plan for plan in plans if not 0 < plan[0] < begin)]

    def _dequantize_from(self, many: bool) -> int:
        if self.format.kind == "wint4" and self.node.arch.name == "sm_90a" and not many:
            return DEQUANTIZE_TOKENS_ODD
        return DEQUANTIZE_TOKENS_SMALL if self.n * self.k < SMALL_VALUES else DEQUANTIZE_TOKENS

    def before(self, way: Way) -> _Before | None:
        """The method that makes x what a way multiplies by."""
        if isinstance(way, Many):
            return _Job.permute
        if isinstance(way, Gemm8) and way.padded:
            return _Job.quantize_padded
        if isinstance(way, Tile | Gemm8) and self.format.kind == "fp8":
            return _Job.quantize
        return _Job.gather if isinstance(way, Gemm16) and self.rows is not None else None

    def quantize(self, multiple: int = 1) -> tuple[tuple[Step, ...], _Job]:
        """Steps that quantize the activations, unless their norm did, and the job on their codes; rows of scales of a multiple
        of tokens.
        """
        steps, made, scales = quantize(
            self.node,
            self.x,
            self.k,
            self.count,
            ue8m0=self.format.ue8m0,
            rows=self.rows,
            name=self.w,
            multiple=multiple,
        )
        return steps, replace(self, x=codes(made, self.format, self.math), x_scales=scales, rows=None)

    def quantize_padded(self) -> tuple[tuple[Step, ...], _Job]:
        """As `quantize`, with rows of scales as cuBLASLt takes them."""
        return self.quantize(SCALED_ROWS)

    def permute(self) -> tuple[tuple[Step, ...], _Job]:
        """The step that permutes the activations' columns, and the job on them."""
        step, x = sm90_many_tokens.permute(self.node, self.format, self.x, self.rows, self.count, self.k, self.w)
        return (step,), replace(self, x=x, rows=None)

    def gather(self) -> tuple[tuple[Step, ...], _Job]:
        """The step that copies the rows of x that count, and the job on them."""
        assert self.rows is not None, self.w
        step, x = cublas.gather(self.node, self.x, self.rows, self.count, self.k, self.w)
        return (step,), replace(self, x=x, rows=None)

    def splits(self, most: int, tile: Tile) -> int:
        """Into how many parts a tile's launch for at most so many tokens splits K."""
        if tile.splits or not 0 < (most := most or self.node.bounds.get(self.count, 0)) <= SPLIT_TOKENS:
            return tile.splits or 1
        steps = -(-self.k // (tile.block_k or block_k(self.format, self.math, self.k)))
        slots = SMS[self.node.arch.capability] * tile.programs
        return splits_of(slots, self._tiles(most, tile), steps, range(1, max(2, min(16, steps // 4) + 1)))

    def _tiles(self, most: int, way: Tile | Many) -> int:
        return -(-self.n // way.rows) * -(-most // way.tokens)

    def scratch(self, plans: Sequence[Plan]) -> tuple[Typed | None, Typed | None]:
        """Memory for parts of sums, and counters of those that are there: every variant's in the same place."""
        cells, counters = 0, 0
        for most, way in plans:
            if isinstance(way, Few):
                more, tiles = few_tokens.scratch_sizes(way, self.n)
                cells, counters = max(cells, more), max(counters, tiles)
            elif isinstance(way, Tile) and (splits := self.splits(most, way)) > 1:
                tiles = self._tiles(most or self.node.bounds[self.count], way)
                cells, counters = max(cells, tiles * way.tokens * way.rows * splits), max(counters, tiles)
        if not cells:
            return None, None
        parts = self.node.add_scratch(f"{self.w}.parts", "float32", (cells,))
        return parts, self.node.add_zeroed(f"{self.w}.arrivals", "int32", (counters,))

    def few(self, few: Few, parts: Typed | None, arrivals: Typed | None) -> Kernel:
        """The launch for at most `few.tokens`."""
        assert parts is not None, self.w
        assert arrivals is not None, self.w
        return few_tokens.launch(
            self.node,
            __name__,
            few,
            self.format,
            x=self.x,
            rows=self.rows,
            w=self.node.at(self.w),
            scales=self.node.maybe(f"{self.w}.scales"),
            y=self.y,
            parts=parts,
            arrivals=arrivals,
            count=self.count,
            shape=(self.n, self.k),
        )

    def many(self, many: Many, most: int) -> Kernel:
        """The launch on permuted activations, for at most so many tokens."""
        if not many.splits:
            tiles = self._tiles(most or self.node.bounds.get(self.count, 0) or SPLIT_TOKENS, many)
            many = replace(many, splits=splits_of(SMS[90], tiles, self.k // 128, CLUSTERS))
        return sm90_many_tokens.launch(
            self.node,
            __name__,
            many,
            self.format,
            x=self.x,
            w=self.node.at(self.w),
            scales=self.node.maybe(f"{self.w}.scales"),
            y=self.y,
            count=self.count,
            shape=(self.n, self.k),
        )

    def tile(self, tile: Tile, splits: int, parts: Typed | None, arrivals: Typed | None) -> Kernel:
        """The launch of the Triton kernel with such a tile."""
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
                "PDL": arch.has_pdl,
            },
            num_warps=tile.warps,
            num_stages=tile.stages,
            pdl=True,
        )

    def gemm(self) -> list[Step]:
        """Steps for any number of tokens through cuBLAS."""
        steps: list[Step] = []
        weight = self.node.at(self.w)
        if self.format.kind != "bf16":
            weight = self.node.add_scratch(f"{self.w}.values", "bfloat16", (self.n, self.k))
            steps.append(dequantize(self.node, self.w, self.n, self.k, weight))
        a = Matrix(self.x.pointer, "bfloat16", self.k)
        b = Matrix(weight.pointer, "bfloat16", self.k, transposed=True)
        c = Matrix(self.y.pointer, self.y.dtype, self.n)
        return [*steps, Gemm(a, b, c, m=self.count, n=self.n, k=self.k)]

    def gemm8(self, way: Gemm8) -> Gemm:
        """The step on codes of x and their scales."""
        assert self.x_scales is not None, self.w
        a = Matrix(self.x.pointer, "float8_e4m3fn", self.k)
        b = Matrix(self.node.at(self.w).pointer, "float8_e4m3fn", self.k, transposed=True)
        c = Matrix(self.y.pointer, self.y.dtype, self.n)
        scales = self.x_scales.pointer, self.node.at(f"{self.w}.scales").pointer
        rows = f"ceil_div({self.count},{SCALED_ROWS})*{SCALED_ROWS}" if way.padded else self.count
        return Gemm(a, b, c, m=rows, n=self.n, k=self.k, a_scales=scales[0], b_scales=scales[1])


_Before = Callable[[_Job], tuple[tuple[Step, ...], _Job]]


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """The tile that suits the step's tokens."""
    return multiply(node, "x", "w", "y")
