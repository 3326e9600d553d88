"""How sm90_stream_k.cu is launched: its tiles, its shared memory, its scratch, where it applies."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dsc.plugins.formats import Format
from dsc.plugins.gpu_node import Arch, GpuNode, Typed
from dsc.runtime.steps import Kernel, TensorMap

MOST_SMS = 160  # of any chip: scratch is made for so many
GATHER_BLOCK = 2048


@triton.jit
def gather_rows(x, rows, y, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y[t] = x[rows[t]], a part of a row a program."""
    t = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows + t).to(tl.int64)
    tl.store(y + t.to(tl.int64) * K + at, tl.load(x + row * K + at, at < K), at < K)


@dataclass(frozen=True)
class StreamK:
    """A launch in tiles of `tokens` (64, 128, 256) by `blocks` (1, 2) times 128 rows; 64 tokens take 2 blocks, 256 take 1.

    stages    steps of 128 bytes of every row that are on their way to shared memory
    cluster   thread blocks (1, 2) that share the tokens they fetch
    """

    tokens: int
    blocks: int
    stages: int
    cluster: int = 1

    @property
    def rows(self) -> int:
        """Rows of the weight in a tile."""
        return 128 * self.blocks

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring and its barriers."""
        return self.stages * ((self.tokens + self.rows) * 128 + 16)


def applies(format_: Format, activations: str, shape: tuple[int, int], arch: Arch) -> bool:
    """Whether the kernel knows such a product: fp8 or bfloat16, whole steps and stores of 16 bytes, on Hopper."""
    whole = shape[0] % 8 == 0 and shape[1] % 128 == 0
    return arch.name == "sm_90a" and format_.kind in ("fp8", "bf16") and activations == "bfloat16" and whole


def scratch_sizes(way: StreamK) -> tuple[int, int]:
    """Floats for the sums of parts of tiles, and counters."""
    return MOST_SMS * way.tokens * way.rows, MOST_SMS


def gather(node: GpuNode, x: Typed, rows: Typed, count: str, width: int, name: str) -> tuple[Kernel, Typed]:
    """The step that copies `count` rows of bfloat16 x, and where they are then."""
    gathered = node.add_scratch(f"{name}.gathered", "bfloat16", (count, width))
    step = node.triton(
        gather_rows,
        (count, -(-width // GATHER_BLOCK)),
        {"x": x, "rows": rows, "y": gathered, "K": width, "BLOCK": GATHER_BLOCK, "PDL": node.arch.has_pdl},
        pdl=True,
    )
    return step, gathered


def launch(
    node: GpuNode,
    module: str,
    way: StreamK,
    format_: Format,
    *,
    x: Typed,
    x_scales: Typed | None,
    w: Typed,
    scales: Typed | None,
    y: Typed,
    parts: Typed,
    arrivals: Typed,
    count: str,
    shape: tuple[int, int],
) -> Kernel:
    """The step on x [count, K], e4m3 codes with scales [K/128, count] or bfloat16; `module` is the kernel.py beside the source."""
    fp8 = format_.kind == "fp8"
    defines = {
        "FP8": int(fp8),
        "N": shape[0],
        "K": shape[1],
        "TOKENS": way.tokens,
        "BLOCKS": way.blocks,
        "STAGES": way.stages,
        "CLUSTER": way.cluster,
        "WIDE": int(y.dtype == "float32"),
        "PDL": int(node.arch.has_pdl),
        "SHARED_BYTES": way.shared_bytes,
    }
    dtype, columns = ("float8_e4m3fn", 128) if fp8 else ("bfloat16", 64)

    def rows_of(matrix: Typed, count: int | str, box: int) -> TensorMap:
        at, pitch = matrix.pointer, shape[1] * 128 // columns
        return TensorMap(
            at.operand, dtype, (shape[1], count), (pitch,), (columns, box), at.offset, swizzle=128, l2_bytes=256
        )

    return node.cuda(
        module,
        "sm90_stream_k.cu",
        "sm90_stream_k",
        (f"min(SMS, {MOST_SMS})//{way.cluster}*{way.cluster}",),
        384,
        [
            rows_of(x, count, way.tokens // way.cluster),
            rows_of(w, shape[0], way.rows),
            x_scales,
            scales,
            y,
            parts,
            arrivals,
            count,
        ],
        defines=defines,
        shared_bytes=way.shared_bytes,
        cluster=(way.cluster, 1, 1),
        pdl=True,
    )
