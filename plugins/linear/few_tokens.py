"""How few_tokens.cu is launched: its tiles, its shared memory, where it applies."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.plugins.formats import Format
from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.runtime.steps import Kernel

MOST_SMS = 160  # of any chip: scratch is made for so many


@dataclass(frozen=True)
class Few:
    """A launch for at most `tokens` (4, 8, 16, 32): `blocks` a multiprocessor of `warps`, each of `tiles` x 16 rows.

    depth  steps of 128 columns that are on their way to shared memory
    chunk  steps whose activations are staged between two barriers
    """

    tokens: int
    warps: int
    tiles: int
    depth: int
    chunk: int
    blocks: int = 1

    @property
    def rows(self) -> int:
        """Rows of the weight that a block takes at a time."""
        return 16 * self.tiles * self.warps

    def shared_bytes(self, format_: Format) -> int:
        """Dynamic shared memory of a block: the warps' rings, and two buffers of activations."""
        slot = self.tiles * (1024 + 16 * (8 if format_.group == 32 else 4))
        staged = 2 * self.tokens * (self.chunk * 128 + 64) + self.chunk * self.tokens * 4
        return self.warps * self.depth * slot + 2 * staged


def applies(format_: Format, activations: str, width: int) -> bool:
    """Whether the kernel knows such a product: 4-bit codes, bfloat16 activations, whole steps."""
    return format_.kind == "wint4" and activations == "bfloat16" and width % 128 == 0


def scratch_sizes(few: Few, rows: int) -> tuple[int, int]:
    """Elements of `parts` (float32) and of `arrivals` (int32) for a weight of so many rows."""
    return 2 * MOST_SMS * few.blocks * few.rows * few.tokens, -(-rows // few.rows)


def launch(
    node: GpuNode,
    module: str,
    few: Few,
    format_: Format,
    *,
    x: Typed,
    rows: Typed | None,
    w: Typed,
    scales: Typed | None,
    y: Typed,
    parts: Typed,
    arrivals: Typed,
    count: str,
    shape: tuple[int, int],
) -> Kernel:
    """The step; `module` is the kernel.py beside the source."""
    defines = {
        "GROUP": format_.group,
        "N": shape[0],
        "K": shape[1],
        "TOKENS": few.tokens,
        "WARPS": few.warps,
        "TILES": few.tiles,
        "DEPTH": few.depth,
        "CHUNK": few.chunk,
        "BLOCKS_PER_SM": few.blocks,
        "GATHER": int(rows is not None),
        "WIDE": int(y.dtype == "float32"),
        "PDL": int(node.arch.has_pdl),
        "SHARED_BYTES": few.shared_bytes(format_),
    }
    return node.cuda(
        module,
        "few_tokens.cu",
        "few_tokens",
        (f"min(SMS, {MOST_SMS})*{few.blocks}",),
        32 * few.warps,
        [x, rows, w, scales, y, parts, arrivals, count],
        defines=defines,
        shared_bytes=few.shared_bytes(format_),
        pdl=True,
    )
