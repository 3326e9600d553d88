"""Moe on GPUs: sort pairs by expert, gate and up with SwiGLU, down with the routing weight, an ordered sum.

While tokens are few, weights set the pace and few_tokens.cu streams them; any number of tokens, format or width goes through
the Triton kernels. Every result is written once and added in a fixed order: the same sums in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.plugins.moe.few_tokens import Few, Stream, few_steps, joins, streams
from dsc.plugins.moe.gpu_work import Experts, Work, num_tiles
from dsc.plugins.moe.triton_experts import moe_down, moe_gate_up
from dsc.plugins.triton_activations import quantize
from dsc.plugins.triton_weights import block_k, codes, math_of
from dsc.runtime.steps import Kernel, Step, Variant

# By the kind of weight; a row of bfloat16 is long, so that four warps fill a thread block's ring.
_EIGHT, _FOUR = Stream(8, 1, 1), Stream(4, 1, 1)
FEW: dict[str, tuple[Few, ...]] = {
    kind: (
        Few(0, 8, True, True, stream, stream),
        Few(0.5, 16, False, True, stream, stream),
        Few(8, 16, False, False, stream, stream),
    )
    for kind, stream in (("wint4", _EIGHT), ("wint8", _EIGHT), ("fp8", _EIGHT), ("bf16", _FOUR))
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
    "fp8": (_SMALL, Tile(64, 128, False, 8, 3), Tile(128, 128, False, 8, 3)),
    "fp8 as bf16": (_SMALL, _MIDDLE),
    "wint4:32": (_SMALL, _MIDDLE),
    "wint4:64": (_SMALL, _MIDDLE),
    "wint4:128": (_SMALL, _MIDDLE, Tile(128, 64, True, 8, 3)),
    "bf16": (_SMALL, _MIDDLE, Tile(128, 128, True, 8, 4, 64)),
}


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """Variants by the step's tokens: the more pairs an expert has, the larger are the tiles."""
    work = Work.of(node)
    made, served = [], 0
    for case in FEW[node.format("gate").kind] if streams(work, work.routed) else ():
        served = work.tokens(case.pairs)
        made.append(Variant(_few(work, case, served), f"T <= {served}"))
    for size in _SIZES[:-1]:
        most = work.tokens(size / 2)
        if most > served:
            made.append(Variant(_many(work, size), f"T <= {most}"))
    return (*made, Variant(_many(work, _SIZES[-1])))


def _few(work: Work, case: Few, most: int) -> tuple[Step, ...]:
    """Streamed weights; a shared expert that cannot come along goes through Triton."""
    plan = [] if case.direct else [work.plan(case.tile)]
    gate_up, down = few_steps(work, case, most)
    if work.shared is None or joins(work, case):
        return (*plan, gate_up, down, work.sum())
    shared = _Set.of(work, work.shared, 16 if most <= 16 else 64 if most <= 64 else 128)
    return (*shared.steps(), *plan, gate_up, down, work.sum())


def _many(work: Work, size: int) -> tuple[Step, ...]:
    """Triton for all experts, in tiles of at most `size` tokens."""
    routed = _Set.of(work, work.routed, size)
    shared = _Set.of(work, work.shared, size).steps() if work.shared else ()
    return (*shared, work.plan(routed.tile.tokens), *routed.steps(), work.sum())


@dataclass(frozen=True)
class _Set:
    """A set of experts on its way through the Triton kernels."""

    work: Work
    experts: Experts
    math: tuple[str, str]
    tile: Tile

    @staticmethod
    def of(work: Work, experts: Experts, size: int) -> _Set:
        dtype, arch = work.node.at("x").dtype, work.node.arch
        gate, down = (math_of(each, dtype, arch) for each in work.formats(experts))
        format_ = work.formats(experts)[0]
        decoded = {"wint4": str(format_), "fp8": "fp8 as bf16"}
        kind = decoded.get(format_.kind, gate) if gate == "bf16" else gate
        rows = 128 if work.formats(experts)[1].kind == "fp8" else 0  # a group of down's codes is one program's
        tile = max((t for t in TILES[kind] if t.tokens <= size and t.rows >= rows), key=lambda t: t.tokens)
        return _Set(work, experts, (gate, down), tile)

    def steps(self) -> tuple[Step, ...]:
        """What comes before gate and up, those, and down."""
        node = self.work.node
        x, x_scales, before = node.at("x"), None, []
        gate, down = self.work.formats(self.experts)
        if gate.kind == "fp8":
            name = f"{self.experts.gate}.x"
            step, x, x_scales = quantize(node, x, node.width("D"), "T", ue8m0=gate.ue8m0, name=name)
            before, x = [step], codes(x, gate, self.math[0])
        h, h_scales = self._hidden()
        return (*before, self._gate_up(x, x_scales, h, h_scales), self._down(codes(h, down, self.math[1]), h_scales))

    def _hidden(self) -> tuple[Typed, Typed | None]:
        """What enters down: e4m3 codes and their scales if down is fp8."""
        node, name, rows, width = self.work.node, self.experts.gate, self.experts.rows, self.experts.width
        if self.work.formats(self.experts)[1].kind != "fp8":
            return node.add_scratch(f"{name}.h", node.at("x").dtype, (rows, width)), None
        h = node.add_scratch(f"{name}.h", "float8_e4m3fn", (rows, width))
        scales = node.add_scratch(f"{name}.h.scales", "float32", (-(-width // 128), rows))
        return h if node.arch.has_fp8 else Typed(h.pointer, "uint8"), scales

    def _common(self, name: str, columns: int, math: str) -> dict[str, object]:
        node, format_ = self.work.node, self.work.node.format(name)
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
            "PDL": node.arch.has_pdl,
        }

    def _weight(self, name: str, math: str) -> dict[str, object]:
        node = self.work.node
        return {name: codes(node.at(name), node.format(name), math), f"{name}_scales": node.maybe(f"{name}.scales")}

    def _grid(self, rows: int) -> tuple[str]:
        tiles = (
            num_tiles(self.work.node, self.tile.tokens) if self.experts.routed else f"ceil_div(T, {self.tile.tokens})"
        )
        return (f"({tiles})*{-(-rows // self.tile.rows)}",)

    def _gate_up(self, x: Typed, x_scales: Typed | None, h: Typed, h_scales: Typed | None) -> Kernel:
        node, experts, math = self.work.node, self.experts, self.math[0]
        weights = self._weight(experts.gate, math) | self._weight(experts.up, math)
        arguments = {name.removeprefix("shared_"): value for name, value in weights.items()}
        arguments |= {"x": x, "x_scales": x_scales, "h": h, "h_scales": h_scales, "TOP_K": node.width("K")}
        arguments["UE8M0"] = node.format(experts.down).ue8m0
        arguments |= self._common(experts.gate, node.width("D"), math)
        return self._launch(moe_gate_up, experts.width, arguments)

    def _down(self, h: Typed, h_scales: Typed | None) -> Kernel:
        node, experts, math = self.work.node, self.experts, self.math[1]
        weights = self._weight(experts.down, math)
        arguments = {name.removeprefix("shared_"): value for name, value in weights.items()}
        arguments |= {"h": h, "h_scales": h_scales, "weights": node.at("weights"), "out": self.work.rows_of(experts)}
        return self._launch(moe_down, node.width("D"), arguments | self._common(experts.down, experts.width, math))

    def _launch(self, function: object, rows: int, arguments: dict[str, object]) -> Kernel:
        tile = self.tile
        grid = self._grid(rows)
        return self.work.node.triton(function, grid, arguments, num_warps=tile.warps, num_stages=tile.stages, pdl=True)
