"""Steps of few_tokens.cu: which weights it takes, its memory, its launches."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.plugins.moe.gpu_work import Experts, Work, num_tiles
from dsc.runtime.steps import Kernel

KINDS = {"bf16": 0, "wint8": 1, "wint4": 2, "fp8": 3}
PIECES = {"bf16": 4, "wint8": 2, "wint4": 1, "fp8": 2}  # of 16 bytes that a lane reads of 128 columns of a row
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # of a multiprocessor, for its blocks together
DEEPEST = 8
ROWS = {"gate_up": 16, "down": 32}  # of a weight, of a warp


@dataclass(frozen=True)
class Stream:
    """How one of the two kernels goes about it: warps over rows and over columns, blocks of 128 activations between
    barriers, thread blocks on a multiprocessor.
    """

    row_warps: int
    k_warps: int
    chunk: int
    blocks: int = 2


@dataclass(frozen=True)
class Few:
    """A variant: for at most `pairs` (token, expert) pairs an expert, in tiles of `tile` tokens.

    joint    the shared expert's tiles are in the same launches
    """

    pairs: float
    tile: int
    joint: bool
    gate_up: Stream
    down: Stream


def streams(work: Work, experts: Experts) -> bool:
    """Whether few_tokens.cu takes these weights."""
    node, (gate, down) = work.node, work.formats(experts)
    fits = experts.width % 128 == 0 and node.width("D") % 256 == 0 and node.at("x").dtype == "bfloat16"
    known = gate == down and gate.kind in KINDS and gate.group in (0, 128)
    return fits and known and (gate.kind != "fp8" or node.arch.has_fp8)


def joins(work: Work, case: Few) -> bool:
    """Whether the shared expert's tiles come along in the routed experts' launches."""
    if work.shared is None or not case.joint or not streams(work, work.shared):
        return False
    kind = work.formats(work.shared)[0].kind
    pairs = ((case.gate_up, work.node.width("D")), (case.down, work.shared.width))
    return all(_rings(work, case, stream, kind, width) for stream, width in pairs)


def few_steps(work: Work, case: Few, most: int, late: bool) -> tuple[tuple[Kernel, ...], Kernel, Kernel]:
    """What quantizes x, gate and up, then down, for steps of at most `most` tokens.

    late   the steps before gate and up and before down make nothing that these read
    """
    sets = [work.routed, *([work.shared] if work.shared and joins(work, case) else [])]
    quantized = tuple(dict.fromkeys(step for e in sets if _as_codes(work, e) for step in work.quantized(e)[0]))
    return quantized, _gate_up(work, case, most, sets, late), _down(work, case, most, sets, late)


def _as_codes(work: Work, experts: Experts) -> bool:
    """Whether activations are quantized by their own step, and hidden values by gate and up."""
    return work.formats(experts)[0].kind == "fp8"


def _hidden(work: Work, experts: Experts, most: int) -> tuple[Typed, Typed | None]:
    """What enters down: codes and their scales, or bfloat16."""
    node, name = work.node, f"few.{experts.gate}.{most}"
    rows = f"min({experts.rows}, {most * (node.width('K') if experts.routed else 1)})"
    if _as_codes(work, experts):
        scales = node.add_scratch(f"{name}.scales", "float32", (experts.width // 128, rows))
        return node.add_scratch(name, "float8_e4m3fn", (rows, experts.width)), scales
    return node.add_scratch(name, "bfloat16", (rows, experts.width)), None


def _gate_up(work: Work, case: Few, most: int, sets: list[Experts], late: bool) -> Kernel:
    node = work.node
    arguments: list[object] = []
    for experts in sets:
        x = work.quantized(experts)[1:] if _as_codes(work, experts) else (node.at("x"), None)
        arguments += [*x, *([work.tiles, work.order] if experts.routed else [])]
        arguments += [*_weight(node, experts.gate), *_weight(node, experts.up), *_hidden(work, experts, most)]
    arguments += [None] * (8 * (2 - len(sets)))
    grid = _grid(node, case, case.gate_up.row_warps * ROWS["gate_up"], [experts.width for experts in sets])
    return _launch(work, case, case.gate_up, "gate_up", grid, [*arguments, "T"], sets, late)


def _down(work: Work, case: Few, most: int, sets: list[Experts], late: bool) -> Kernel:
    node = work.node
    arguments: list[object] = []
    for experts in sets:
        arguments += _hidden(work, experts, most)
        more = [work.tiles, work.order, node.at("weights")] if experts.routed else []
        arguments += [*more, *_weight(node, experts.down), *([work.out] if experts.routed else [])]
    arguments += [None] * (4 * (2 - len(sets)))
    grid = _grid(node, case, case.down.row_warps * ROWS["down"], [node.width("D")] * len(sets))
    return _launch(work, case, case.down, "down", grid, [*arguments, "T"], sets, late)


def _weight(node: GpuNode, name: str) -> tuple[Typed, Typed | None]:
    return node.at(name), node.maybe(f"{name}.scales")


def _grid(node: GpuNode, case: Few, rows: int, widths: list[int]) -> str:
    """Blocks of `rows` rows for every tile of the routed experts, then of the shared one if it is there."""
    tiles = num_tiles(node, case.tile)
    of_shared = "".join(f" + ceil_div(T, {case.tile})*{width // rows}" for width in widths[1:])
    return f"({tiles})*{widths[0] // rows}{of_shared}"


def _launch(
    work: Work,
    case: Few,
    stream: Stream,
    stage: str,
    grid: str,
    arguments: list[object],
    sets: list[Experts],
    late: bool,
) -> Kernel:
    node, shared = work.node, sets[1] if len(sets) > 1 else None
    assert shared is None or not late, node.name
    formats = [work.formats(experts)[0] for experts in sets]
    widths = [node.width("D") if stage == "gate_up" else experts.width for experts in sets]
    rings = [_rings(work, case, stream, f.kind, w)[-1] for f, w in zip(formats, widths, strict=True)]
    defines = {
        "EXPERT_KIND": KINDS[formats[0].kind],
        "EXPERT_UE8M0": int(formats[0].ue8m0),
        "EXPERT_DEPTH": rings[0][0],
        "SHARED_KIND": KINDS[formats[1].kind] if shared else -1,
        "SHARED_UE8M0": int(formats[1].ue8m0) if shared else 0,
        "SHARED_DEPTH": rings[1][0] if shared else 0,
        "D": node.width("D"),
        "F": work.routed.width,
        "SHARED_F": shared.width if shared else 0,
        "TOP_K": node.width("K"),
        "TILE": case.tile,
        "ROW_WARPS": stream.row_warps,
        "K_WARPS": stream.k_warps,
        "CHUNK": stream.chunk,
        "PDL": int(node.arch.has_pdl),
        "LATE": int(late),
        "BLOCKS_PER_SM": stream.blocks,
    }
    return node.cuda(
        __name__,
        "few_tokens.cu",
        f"moe_few_{stage}",
        (grid,),
        32 * stream.row_warps * stream.k_warps,
        arguments,
        defines=defines,
        shared_bytes=max(size for _, size in rings),
        pdl=True,
    )


def _rings(work: Work, case: Few, stream: Stream, kind: str, width: int) -> list[tuple[int, int]]:
    """Depths of the ring that fit into a thread block's share of the shared memory, and what is taken of it."""
    budget = SHARED_BYTES[work.node.arch.capability] // stream.blocks - 1024 - 8 * case.tile
    sizes = [(depth, _bytes(stream, depth, case.tile, kind, width // 128)) for depth in range(2, DEEPEST + 1)]
    return [(depth, size) for depth, size in sizes if size <= budget]


def _bytes(stream: Stream, depth: int, tile: int, kind: str, blocks: int) -> int:
    """Shared memory as few_tokens.cu lays it out: rings, activations, their scales, the weights' scales."""
    warps = stream.row_warps * stream.k_warps
    size = warps * depth * 4 * PIECES[kind] * 512
    size += 2 * stream.k_warps * tile * (stream.chunk * 256 + 64)
    if kind == "fp8":
        size += 2 * stream.k_warps * stream.chunk * tile * 4 + 2 * blocks * 4
    if kind == "wint4":
        size += 32 * stream.row_warps * blocks * 2  # 16 rows of two matrices, or 32 of one
    return max(size, (stream.k_warps - 1) * stream.row_warps * tile * 128)
