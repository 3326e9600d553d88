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

    direct   every pair is a tile: no work list
    joint    the shared expert's tiles are in the same launches
    """

    pairs: float
    tile: int
    direct: bool
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


def few_steps(work: Work, case: Few, most: int) -> tuple[Kernel, Kernel]:
    """Gate and up, then down, for steps of at most `most` tokens."""
    joint = work.shared if joins(work, case) else None
    return _gate_up(work, case, most, joint), _down(work, case, most, joint)


def _hidden(work: Work, experts: Experts, most: int) -> Typed:
    """What enters down: float32 where it is quantized next."""
    dtype = "float32" if work.formats(experts)[0].kind == "fp8" else "bfloat16"
    rows = most * (work.node.width("K") if experts.routed else 1)
    name = f"few.{experts.gate}.{most}"
    return work.node.add_scratch(name, dtype, (f"min({experts.rows}, {rows})", experts.width))


def _gate_up(work: Work, case: Few, most: int, shared: Experts | None) -> Kernel:
    node, routed = work.node, work.routed
    arguments: list[object] = [
        node.at("x"),
        node.at("ids"),
        work.tiles,
        work.order,
        *_weight(node, "gate"),
        *_weight(node, "up"),
    ]
    arguments.append(_hidden(work, routed, most))
    if shared is not None:
        arguments += [*_weight(node, shared.gate), *_weight(node, shared.up), _hidden(work, shared, most)]
    else:
        arguments += [None] * 5
    grid = _grid(node, case, case.gate_up.row_warps * ROWS["gate_up"], routed.width, shared.width if shared else 0)
    return _launch(work, case, case.gate_up, "gate_up", grid, [*arguments, "T"], shared)


def _down(work: Work, case: Few, most: int, shared: Experts | None) -> Kernel:
    node, routed = work.node, work.routed
    arguments: list[object] = [_hidden(work, routed, most), node.at("ids"), work.tiles, work.order, node.at("weights")]
    arguments += [*_weight(node, "down"), work.out]
    if shared is not None:
        arguments += [_hidden(work, shared, most), *_weight(node, shared.down)]
    else:
        arguments += [None] * 3
    width = node.width("D")
    grid = _grid(node, case, case.down.row_warps * ROWS["down"], width, width if shared else 0)
    return _launch(work, case, case.down, "down", grid, [*arguments, "T"], shared)


def _weight(node: GpuNode, name: str) -> tuple[Typed, Typed | None]:
    return node.at(name), node.maybe(f"{name}.scales")


def _grid(node: GpuNode, case: Few, rows: int, routed: int, shared: int) -> str:
    tiles = f"{node.width('K')}*T" if case.direct else num_tiles(node, case.tile)
    of_shared = f" + ceil_div(T, {case.tile})*{shared // rows}" if shared else ""
    return f"({tiles})*{routed // rows}{of_shared}"


def _launch(
    work: Work, case: Few, stream: Stream, stage: str, grid: str, arguments: list[object], shared: Experts | None
) -> Kernel:
    node = work.node
    sets = [work.routed, *([shared] if shared else [])]
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
        "DIRECT": int(case.direct),
        "PDL": int(node.arch.has_pdl),
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
    """Shared memory as few_tokens.cu lays it out: rings, activations twice, their scales, the weights' scales."""
    warps = stream.row_warps * stream.k_warps
    size = warps * depth * 4 * PIECES[kind] * 512
    size += 2 * stream.k_warps * tile * (stream.chunk * 256 + 64)
    if kind == "fp8":
        size += 2 * stream.k_warps * stream.chunk * tile * 4 + 2 * blocks * 4
    if kind == "wint4":
        size += 32 * stream.row_warps * blocks * 2  # 16 rows of two matrices, or 32 of one
    return max(size, (stream.k_warps - 1) * stream.row_warps * tile * 128)
