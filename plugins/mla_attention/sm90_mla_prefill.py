"""How sm90_mla_prefill.cu is launched: its tensor maps and shared memory, and where it applies."""

from __future__ import annotations

import math

from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.runtime.steps import Kernel, TensorMap

GROUPS, KEYS, STAGES, GRANULE = 3, 80, 2, 16  # as in the source
ROWS = 64 * GROUPS  # queries of a tile
BARRIERS = 6 + 2 * GROUPS + 4 * STAGES
# To align; queries, and their rope part twice; keys and values; two pieces.
SHARED_BYTES = 1024 + 4 * 8192 * GROUPS + STAGES * 5 * 128 * KEYS + 2 * 32 + 8 * BARRIERS


def applies(node: GpuNode) -> bool:
    """Whether the kernel knows the node's widths and dtype, on Hopper."""
    widths = tuple(int(node.attributes[name]) for name in ("nope", "v", "rope"))
    return node.arch.name == "sm_90a" and widths == (128, 128, 64) and node.at("q").dtype == "bfloat16"


def launch(node: GpuNode, *, span: int, kv: Typed, k_rope: Typed, logs: Typed, ends: Typed) -> Kernel:
    """The step of a pass over `span` tokens. `ends` counts tiles of ROWS queries."""
    heads = int(node.attributes["heads"])

    def rows(at: Typed, count: int | str, row_bytes: int, chunks: int, box: tuple[int, int]) -> TensorMap:
        """Rows seen as chunks of 64 columns; a box takes `box` rows and chunks."""
        operand, dims = at.pointer.operand, (64, count, chunks)
        return TensorMap(operand, "bfloat16", dims, (row_bytes, 128), (64, *box), swizzle=128, l2_bytes=256)

    q, steps = node.at("q"), ("cos", "sin", "positions", "query_starts", "sequence_lengths")
    return node.cuda(
        __name__,
        "sm90_mla_prefill.cu",
        "sm90_mla_prefill",
        ("SMS",),
        128 * (1 + GROUPS),
        [
            rows(q, "T", 384 * heads, 3 * heads, (64, 2)),
            rows(kv, heads * span, 512, 4, (KEYS, 2)),
            rows(kv, heads * span, 512, 4, (GRANULE, 2)),
            rows(k_rope, span, 128, 1, (KEYS, 1)),
            q,
            *(node.at(name) for name in steps),
            ends,
            node.at("o"),
            logs,
            node.add_zeroed("next", "int32", (2,)),
            float(node.attributes["scale"]) * math.log2(math.e),
            f"I*{span}",
            "B",
        ],
        defines={"HEADS": heads, "SPAN": span, "SHARED_BYTES": SHARED_BYTES},
        shared_bytes=SHARED_BYTES,
        pdl=True,
    )
