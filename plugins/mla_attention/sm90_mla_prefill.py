"""How sm90_mla_prefill.cu is launched: its tiles, registers and shared memory, its tensor maps, where it applies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.runtime.steps import Kernel, TensorMap

SERIAL, BURST, OVERLAP = 0, 1, 2
REGISTERS = {1: (56, 224), 2: (56, 224), 3: (56, 152)}  # of the producers and the others, by the number of others


@dataclass(frozen=True)
class Prefill:
    """A way to launch it, for tiles of 64 * groups queries and `keys` keys; see the source's defines.

    stages     tiles of keys and values in shared memory
    order      what a warpgroup has under way at once
    early      the first scores of a piece of work start before the one before it is stored
    turns      warpgroups start their products one after another
    dynamic    blocks take the next piece of work when they are ready for it
    """

    groups: Literal[1, 2, 3] = 2
    keys: Literal[64, 80, 96, 112, 128] = 128
    stages: int = 2
    order: int = OVERLAP
    early: bool = True
    turns: bool = False
    dynamic: bool = True

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return 64 * self.groups

    @property
    def granule(self) -> int:
        """Rows of a box of values: a unit of the context, or a part of it that divides the tile."""
        return math.gcd(64, self.keys)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: to align; queries, their rope part twice, keys, values, pieces, barriers."""
        barriers = 6 + 2 * self.groups + 4 * self.stages
        return 1024 + 4 * 8192 * self.groups + self.stages * 5 * 128 * self.keys + 2 * 32 + 8 * barriers


def applies(node: GpuNode) -> bool:
    """Whether the kernel knows the node's widths, on Hopper."""
    widths = tuple(int(node.attributes[name]) for name in ("nope", "v", "rope"))
    return node.arch.name == "sm_90a" and widths == (128, 128, 64) and node.at("q").dtype == "bfloat16"


def launch(node: GpuNode, prefill: Prefill, *, span: int, kv: Typed, k_rope: Typed, logs: Typed, ends: Typed) -> Kernel:
    """The step of a pass over `span` tokens. `ends` counts tiles of `prefill.rows` queries."""
    heads = int(node.attributes["heads"])
    producer, consumer = REGISTERS[prefill.groups]
    defines = {
        "HEADS": heads,
        "SPAN": span,
        "GROUPS": prefill.groups,
        "KEYS": prefill.keys,
        "STAGES": prefill.stages,
        "ORDER": prefill.order,
        "EARLY": int(prefill.early),
        "TURNS": int(prefill.turns),
        "DYNAMIC": int(prefill.dynamic),
        "PRODUCER_REGISTERS": producer,
        "CONSUMER_REGISTERS": consumer,
        "SHARED_BYTES": prefill.shared_bytes,
    }

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
        128 * (1 + prefill.groups),
        [
            rows(q, "T", 384 * heads, 3 * heads, (64, 2)),
            rows(kv, heads * span, 512, 4, (prefill.keys, 2)),
            rows(kv, heads * span, 512, 4, (prefill.granule, 2)),
            rows(k_rope, span, 128, 1, (prefill.keys, 1)),
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
        defines=defines,
        shared_bytes=prefill.shared_bytes,
        pdl=True,
    )
