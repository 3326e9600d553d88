"""How sm90_many_tokens.cu is launched: the order in which it wants columns, its tiles, its shared memory, where it applies."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dsc.plugins.formats import Format
from dsc.plugins.gpu_node import Arch, GpuNode, Typed
from dsc.runtime.steps import Kernel, TensorMap

KINDS = {"wint8": 1, "wint4": 2}
PERMUTE_BLOCK = 2048


@triton.jit
def permute_columns(x, rows, y, K: tl.constexpr, NIBBLES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y[t] = x[t or rows[t]], the columns of every 128 in the order in which lanes hold weights.

    Place p is the (p % 16)-th column of the (p // 16)-th product: of its first or second half, of lane p % 8 // 2.
    """
    t = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    product, lane, first = at % 128 // 16, at % 8 // 2, at % 16 // 8
    if NIBBLES:  # nibbles n and n + 4 of a lane's word are a pair
        column = 32 * lane + 8 * (product // 2) + 2 * (product % 2) + first + 4 * (at % 2)
    else:
        column = 64 * (product // 4) + 16 * lane + 4 * (product % 4) + 2 * first + at % 2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = t if rows is None else tl.load(rows + t)
    values = tl.load(x + row.to(tl.int64) * K + at // 128 * 128 + column, at < K)
    tl.store(y + t.to(tl.int64) * K + at, values, at < K)


@dataclass(frozen=True)
class Many:
    """A launch in tiles of `tokens` (64, 128, 256) by `tiles` x 128 rows, whose columns `splits` (1, 2, 4, 8; 0:
    by the weight's size) blocks share.

    depth, stages   steps of 128 columns of weights and of activations that are on their way to shared memory
    """

    tokens: int
    tiles: int
    depth: int
    stages: int
    splits: int = 0

    @property
    def rows(self) -> int:
        """Rows of the weight that a block takes."""
        return 128 * self.tiles

    def shared_bytes(self, format_: Format) -> int:
        """Dynamic shared memory of a block: the rings or, later, the sums; and barriers."""
        pieces, scales = (2, 0) if format_.kind == "wint8" else (1, 8 if format_.group == 32 else 4)
        slot = self.tiles * (1024 * pieces + 16 * scales)
        rings = self.stages * self.tokens * 256 + 8 * self.depth * slot
        return max(rings, self.tokens * (self.rows + 4) * 4) + self.stages * 16


def applies(format_: Format, activations: str, shape: tuple[int, int], arch: Arch) -> bool:
    """Whether the kernel knows such a product: integer codes, bfloat16 activations, whole steps, on Hopper."""
    whole = shape[0] % 4 == 0 and shape[1] % 128 == 0
    return arch.name == "sm_90a" and format_.kind in KINDS and activations == "bfloat16" and whole


def permute(
    node: GpuNode, format_: Format, x: Typed, rows: Typed | None, count: str, width: int, name: str
) -> tuple[Kernel, Typed]:
    """The step that puts `count` rows of x in order, and where they are then."""
    permuted = node.add_scratch(f"{name}.permuted", "bfloat16", (count, width))
    step = node.triton(
        permute_columns,
        (count, -(-width // PERMUTE_BLOCK)),
        {
            "x": x,
            "rows": rows,
            "y": permuted,
            "K": width,
            "NIBBLES": format_.kind == "wint4",
            "BLOCK": PERMUTE_BLOCK,
            "PDL": node.arch.has_pdl,
        },
        num_warps=8,
        pdl=True,
    )
    return step, permuted


def launch(
    node: GpuNode,
    module: str,
    many: Many,
    format_: Format,
    *,
    x: Typed,
    w: Typed,
    scales: Typed | None,
    y: Typed,
    count: str,
    shape: tuple[int, int],
) -> Kernel:
    """The step on permuted activations; `module` is the kernel.py beside the source."""
    defines = {
        "KIND": KINDS[format_.kind],
        "GROUP": format_.group,
        "N": shape[0],
        "K": shape[1],
        "TOKENS": many.tokens,
        "TILES": many.tiles,
        "DEPTH": many.depth,
        "STAGES": many.stages,
        "SPLITS": many.splits,
        "WIDE": int(y.dtype == "float32"),
        "PDL": int(node.arch.has_pdl),
        "SHARED_BYTES": many.shared_bytes(format_),
    }
    columns = TensorMap(
        x.pointer.operand, "bfloat16", (shape[1], count), (2 * shape[1],), (64, many.tokens), swizzle=128
    )
    return node.cuda(
        module,
        "sm90_many_tokens.cu",
        "sm90_many_tokens",
        (many.splits, f"ceil_div({count}, {many.tokens})", -(-shape[0] // many.rows)),
        384,
        [columns, w, scales, y, count],
        defines=defines,
        shared_bytes=many.shared_bytes(format_),
        cluster=(many.splits, 1, 1),
        pdl=True,
    )
