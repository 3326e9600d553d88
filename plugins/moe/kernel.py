"""Moe on GPUs: sort pairs by expert, gate and up with SwiGLU, down with the routing weight, an ordered sum.

While tokens are few, weights set the pace and one_token.cu and few_tokens.cu stream them; any number of tokens, format or
width goes through the Triton kernels. Every result is written once and added in a fixed order: the same sums in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsc.plugins.formats import Format
from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.plugins.moe.few_tokens import Few, Stream, few_steps, joins, streams
from dsc.plugins.moe.gpu_work import Experts, Work, num_tiles
from dsc.plugins.moe.one_token import one_token_steps
from dsc.plugins.moe.scratch import DEQUANTIZE_PAIRS, STREAMED_PAIRS, most_tokens_as_codes
from dsc.plugins.moe.triton_experts import moe_down, moe_gate_up
from dsc.plugins.triton_weights import block_k, codes, math_of
from dsc.runtime.steps import Kernel, Step, Variant

# By the kind of weight, after one token; a row of bfloat16 is long, so that four warps fill a thread block's ring. More
# tokens, of fp8 already a few, are faster through Triton (benchmarks/NOTES.md, "moe").
_EIGHT, _FOUR = Stream(8, 1, 1), Stream(4, 1, 1)
_LONG, _LEAN = Stream(8, 1, 2), Stream(4, 1, 1, 3)
_CASES = {
    "wint4": ((16, True, _LONG, _LONG), (16, False, _LONG, _LONG), (32, False, _LEAN, _LEAN)),
    "wint8": ((16, True, _EIGHT, _EIGHT), (16, False, _EIGHT, _EIGHT)),
    "fp8": ((16, True, _EIGHT, _EIGHT),),
    "bf16": ((16, True, _FOUR, _FOUR), (16, False, _FOUR, _FOUR)),
}
FEW: dict[str, tuple[Few, ...]] = {
    kind: tuple(Few(pairs, *case) for pairs, case in zip(STREAMED_PAIRS[kind], cases, strict=True))
    for kind, cases in _CASES.items()
}


@dataclass(frozen=True)
class Tile:
    """A Triton program: `tokens` x `rows`; `swap`: rows are the first side of the dot; `block_k` columns a step, of weights
    that have no groups.
    """

    tokens: int
    rows: int
    swap: bool
    warps: int
    stages: int
    block_k: int = 0


_SIZES = (16, 64, 128)  # of Triton's tiles
_SMALL, _MIDDLE = Tile(16, 128, True, 4, 4), Tile(64, 128, True, 8, 3)
# By the kind of weight and what multiplies it.
TILES: dict[str, tuple[Tile, ...]] = {
    "fp32": (Tile(16, 128, False, 8, 2),),
    "fp8": (_SMALL, Tile(64, 128, False, 8, 3)),
    "fp8 as bf16": (_SMALL, _MIDDLE),
    "wint4:32": (_SMALL, _MIDDLE),
    "wint4:64": (_SMALL, _MIDDLE),
    "wint4:128": (_SMALL, _MIDDLE, Tile(128, 128, True, 8, 3)),
    "bf16": (_SMALL, _MIDDLE, Tile(128, 128, True, 8, 4, 64)),
}
# Without wgmma (before and after Hopper) fewer rows, so that the sums stay in registers.
TILES_ELSEWHERE = {**TILES, "wint4:128": (_SMALL, _MIDDLE, Tile(128, 64, True, 8, 3))}


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """Variants by the step's tokens: the more pairs an expert has, the larger are the tiles."""
    work = Work.of(node)
    made, served = [], 0
    one = one_token_steps(work)
    if one is not None:
        made, served = [Variant((*one, work.sum()), "T <= 1")], 1
    for case in FEW[node.format("gate").kind] if streams(work, work.routed) else ():
        most = work.tokens(case.pairs)
        if most > served:
            made.append(Variant(_few(work, case, most), f"T <= {most}"))
            served = most
    for size in _SIZES[:-1]:
        most = work.tokens(size / 2)
        if most > served:
            made.append(Variant(_many(work, size, most), f"T <= {most}"))
    most = _most_codes(work)
    if most and work.node.bounds.get("T", 0) > most:
        return (*made, Variant(_many(work, _SIZES[-1], most), f"T <= {most}"), Variant(_dequantized(work)))
    return (*made, Variant(_many(work, _SIZES[-1], 0)))


def _most_codes(work: Work) -> int:
    """The most tokens whose products decode the routed experts' integer codes themselves; 0: any number."""
    if work.node.at("x").dtype != "bfloat16":
        return 0
    kinds = {format_.kind for format_ in work.formats(work.routed)}
    values = work.node.width("E") * work.routed.width * work.node.width("D")
    return most_tokens_as_codes(kinds, values, work.num_experts, work.node.width("K"), DEQUANTIZE_PAIRS)


def _dequantized(work: Work) -> tuple[Step, ...]:
    """The shared expert, then the routed ones, each weight in bfloat16 before its product; down lies where gate was."""
    steps: list[Step] = [work.plan(_SIZES[-1])]
    for experts in (work.shared, work.routed):
        if experts is None:
            continue
        if any(format_.kind not in DEQUANTIZE_PAIRS for format_ in work.formats(experts)):
            beside = _Set.of(work, experts, _SIZES[-1])
            steps += [*beside.before(), *beside.products()]
            continue
        first, second = (work.values(experts, name) for name in ("gate", "up"))
        made = {experts.gate: first, experts.up: second, experts.down: first}
        gate_up, down = _Set.of(work, experts, _SIZES[-1], made).products()
        before = [work.dequantize(experts, name, made[name]) for name in (experts.gate, experts.up)]
        steps += [*before, gate_up, work.dequantize(experts, experts.down, first), down]
    return (*steps, work.sum())


def _few(work: Work, case: Few, most: int) -> tuple[Step, ...]:
    """Streamed weights; a shared expert that cannot come along goes through Triton beside them."""
    beside = None if joins(work, case) else _beside(work, most)
    quantized, gate_up, down = few_steps(work, case, most, late=beside is not None)
    return _in_order(work, case.tile, beside, quantized, gate_up, down)


def _beside(work: Work, most: int) -> _Set | None:
    """The shared expert, if there is one, in tiles for steps of at most so many tokens (0: any number)."""
    if work.shared is None:
        return None
    return _Set.of(work, work.shared, next((size for size in _SIZES if 0 < most <= size), _SIZES[-1]))


def _many(work: Work, size: int, most: int) -> tuple[Step, ...]:
    """Triton for all experts, in tiles of at most `size` tokens."""
    beside = _beside(work, most)
    routed = _Set.of(work, work.routed, size)
    gate_up, down = routed.products(late=beside is not None)
    return _in_order(work, routed.tile.tokens, beside, routed.before(), gate_up, down)


def _in_order(
    work: Work, tile: int, beside: _Set | None, before: tuple[Kernel, ...], gate_up: Kernel, down: Kernel
) -> tuple[Step, ...]:
    """All steps. The few programs of a shared expert run beside those of the routed ones: each of its two products is
    launched ahead of theirs, which waits for it only at its end.
    """
    before = tuple(dict.fromkeys([*(beside.before() if beside else ()), *before]))
    plan = work.plan(tile, late=bool(before))
    if beside is None:
        return (*before, plan, gate_up, down, work.sum())
    shared_gate_up, shared_down = beside.products()
    return (*before, plan, shared_gate_up, gate_up, shared_down, down, work.sum())


@dataclass(frozen=True)
class _Set:
    """A set of experts on its way through the Triton kernels.

    formats   of gate and up, and of down, as the kernels read them
    values    weights that were dequantized, by name
    """

    work: Work
    experts: Experts
    formats: tuple[Format, Format]
    math: tuple[str, str]
    tile: Tile
    values: Mapping[str, Typed]

    @staticmethod
    def of(work: Work, experts: Experts, size: int, values: Mapping[str, Typed] | None = None) -> _Set:
        dtype, arch = work.node.at("x").dtype, work.node.arch
        formats = (Format("bf16"), Format("bf16")) if values else work.formats(experts)
        gate, down = (math_of(each, dtype, arch) for each in formats)
        format_ = formats[0]
        decoded = {"wint4": str(format_), "fp8": "fp8 as bf16"}
        kind = decoded.get(format_.kind, gate) if gate == "bf16" else gate
        rows = 128 if formats[1].kind == "fp8" else 0  # a group of down's codes is one program's
        tiles = (TILES if arch.name == "sm_90a" else TILES_ELSEWHERE)[kind]
        tile = max((t for t in tiles if t.tokens <= size and t.rows >= rows), key=lambda t: t.tokens)
        return _Set(work, experts, formats, (gate, down), tile, values or {})

    def before(self) -> tuple[Kernel, ...]:
        """What makes x ready."""
        return self._x()[0]

    def products(self, late: bool = False) -> tuple[Kernel, Kernel]:
        """Gate and up, then down. late: the steps before each make nothing that it reads."""
        _, x, x_scales = self._x()
        h, h_scales = self._hidden()
        gate_up = self._gate_up(x, x_scales, h, h_scales, late)
        return gate_up, self._down(codes(h, self.formats[1], self.math[1]), h_scales, late)

    def _x(self) -> tuple[tuple[Kernel, ...], Typed, Typed | None]:
        """Steps, what enters gate and up, and its scales."""
        gate = self.formats[0]
        if gate.kind == "fp8":
            steps, x, x_scales = self.work.quantized(self.experts)
            return steps, codes(x, gate, self.math[0]), x_scales
        if self._planes[0]:
            step, x = self.work.planes()
            return (step,), x, None
        return (), self.work.node.at("x"), None

    @property
    def _planes(self) -> tuple[bool, bool]:
        """Whether what enters gate and up, and down, has its even columns first."""
        gate, down = self.formats
        return gate.kind == "wint4" and self.math[0] == "bf16", down.kind == "wint4" and self.math[1] == "bf16"

    def _hidden(self) -> tuple[Typed, Typed | None]:
        """What enters down: e4m3 codes and their scales if down is fp8."""
        node, name, rows, width = self.work.node, self.experts.gate, self.experts.rows, self.experts.width
        if self.formats[1].kind != "fp8":
            return node.add_scratch(f"{name}.h", node.at("x").dtype, (rows, width)), None
        h = node.add_scratch(f"{name}.h", "float8_e4m3fn", (rows, width))
        scales = node.add_scratch(f"{name}.h.scales", "float32", (-(-width // 128), rows))
        return h if node.arch.has_fp8 else Typed(h.pointer, "uint8"), scales

    def _common(self, format_: Format, columns: int, math: str, late: bool) -> dict[str, object]:
        node = self.work.node
        routed = self.experts.routed
        free = self.tile.block_k and format_.kind in ("bf16", "wint8")
        return {
            "tiles": self.work.tiles if routed else None,
            "order": self.work.order if routed else None,
            "num_tokens": "T",
            "num_rows": self.experts.rows,
            "D": node.width("D"),
            "F": self.experts.width,
            "KIND": format_.kind,
            "GROUP": format_.group,
            "MATH": math,
            "SWAP": self.tile.swap,
            "BLOCK_K": self.tile.block_k if free else block_k(format_, math, columns),
            "BM": self.tile.tokens,
            "BN": self.tile.rows,
            "H_PLANES": self._planes[1],
            "PDL": node.arch.has_pdl,
            "LATE": late,
        }

    def _weight(self, name: str, math: str) -> dict[str, object]:
        node = self.work.node
        if name in self.values:
            return {name: self.values[name], f"{name}_scales": None}
        return {name: codes(node.at(name), node.format(name), math), f"{name}_scales": node.maybe(f"{name}.scales")}

    def _grid(self, rows: int) -> tuple[str]:
        tiles = (
            num_tiles(self.work.node, self.tile.tokens) if self.experts.routed else f"ceil_div(T, {self.tile.tokens})"
        )
        return (f"({tiles})*{-(-rows // self.tile.rows)}",)

    def _gate_up(self, x: Typed, x_scales: Typed | None, h: Typed, h_scales: Typed | None, late: bool) -> Kernel:
        node, experts, math = self.work.node, self.experts, self.math[0]
        weights = self._weight(experts.gate, math) | self._weight(experts.up, math)
        arguments = {name.removeprefix("shared_"): value for name, value in weights.items()}
        arguments |= {"x": x, "x_scales": x_scales, "h": h, "h_scales": h_scales, "TOP_K": node.width("K")}
        arguments |= {"UE8M0": self.formats[1].ue8m0, "X_PLANES": self._planes[0]}
        arguments |= self._common(self.formats[0], node.width("D"), math, late)
        return self._launch(moe_gate_up, experts.width, arguments)

    def _down(self, h: Typed, h_scales: Typed | None, late: bool) -> Kernel:
        node, experts, math = self.work.node, self.experts, self.math[1]
        weights = self._weight(experts.down, math)
        arguments = {name.removeprefix("shared_"): value for name, value in weights.items()}
        arguments |= {"h": h, "h_scales": h_scales, "weights": node.at("weights"), "out": self.work.rows_of(experts)}
        arguments |= self._common(self.formats[1], experts.width, math, late)
        return self._launch(moe_down, node.width("D"), arguments)

    def _launch(self, function: object, rows: int, arguments: dict[str, object]) -> Kernel:
        tile = self.tile
        grid = self._grid(rows)
        return self.work.node.triton(function, grid, arguments, num_warps=tile.warps, num_stages=tile.stages, pdl=True)
