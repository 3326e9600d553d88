"""Memory that GPU kernels keep beside the arena while an op of the prefill graph runs, by their own rules.

Counted are the two ops whose kernels keep most, Moe and MlaAttention, and the logits that ranks gather. What a product
keeps, its weight in bfloat16 at most, is less than attention keeps of R1's or V2-Lite's widths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsc.compiler.ir.weight import DTYPE_BYTES
from dsc.compiler.planning.ops import ABSENT, PROJECTIONS, PlannedOp
from dsc.compiler.recipe import Recipe
from dsc.plugins.formats import Format, parse_format
from dsc.plugins.mla_attention.scratch import (
    CHUNK,
    LONGEST,
    SPARE,
    UNIT,
    absorbed_tile,
    expanded_span,
    expanded_units,
)
from dsc.plugins.moe.scratch import DEQUANTIZE_PAIRS, SMALLEST_TILE, STREAMED_PAIRS, most_tokens_as_codes, step_tokens

BFLOAT16, FLOAT32, INT32 = (DTYPE_BYTES[name] for name in ("bfloat16", "float32", "int32"))
CODES = 128  # values of an activation that share a scale
ALIGNED = 1 << 13  # bytes at most between a node's scratch tensors


@dataclass(frozen=True)
class Most:
    """The largest step: letters of the prefill graph's bounds, R rows of logits."""

    T: int
    B: int
    P: int
    R: int


@dataclass(frozen=True)
class Scratch:
    """Of one rank's ops on a GPU.

    capability   of the target, 90 for sm_90a
    size         bytes of an activation
    groups       of ranks, over which experts are spread
    given        whether the norm before the experts makes their codes
    """

    ops: Sequence[PlannedOp]
    capability: int
    size: int
    block_tokens: int
    groups: int
    given: bool

    @staticmethod
    def of(recipe: Recipe, ops: Sequence[PlannedOp], size: int, groups: int) -> Scratch:
        """The recipe's target is a GPU."""
        capability = int(recipe.target.removeprefix("sm_").rstrip("a"))
        given = any("quantize" in op.formats for op in ops if op.name.endswith("post_attention_layernorm"))
        return Scratch(ops, capability, size, recipe.kv_cache.block_tokens, groups, given)

    def nbytes(self, most: Most) -> int:
        """The most that one op keeps in a step."""
        kept = {"Moe": self._moe, "MlaAttention": self._attention, "GatherLogits": self._gather}
        return max((kept[op.op](op, most) for op in self.ops if op.op in kept), default=0) + ALIGNED

    def _moe(self, op: PlannedOp, most: Most) -> int:
        """Rows of results; hidden rows of every variant; x in another order or as codes; stacks of experts in bfloat16."""
        wide, experts, width, chosen = (op.widths[name] for name in ("D", "E", "F", "K"))
        shared = op.widths.get("FS", 0)
        gate, down = (parse_format(op.formats[f"{name}_format"]) for name in ("gate", "down"))
        pairs, all_experts = chosen * most.T, experts * self.groups
        kept = (chosen + (shared > 0)) * most.T * wide * self.size
        kept += INT32 * (pairs + 4 * min(pairs, experts + pairs // SMALLEST_TILE))
        kept += self._hidden(down, pairs, width) + FLOAT32 * chosen * width
        if self.size == BFLOAT16:
            for streamed in STREAMED_PAIRS.get(gate.kind, ()):
                rows = chosen * step_tokens(streamed, all_experts, chosen)
                kept += self._hidden(gate, min(pairs, rows), width)
        kept += most.T * wide * BFLOAT16 if gate.kind == "wint4" and self.size == BFLOAT16 else 0
        kept += self._codes(most.T, wide) if gate.kind == "fp8" and not self.given else 0
        if shared:
            kept += self._shared(op, most, gate)
        if self._dequantizes(op, most):
            kept += 2 * experts * width * wide * BFLOAT16
            kinds = {parse_format(op.formats[f"shared_{name}_format"]).kind for name in PROJECTIONS}
            kept += 2 * shared * wide * BFLOAT16 if kinds <= DEQUANTIZE_PAIRS.keys() else 0
        return kept

    def _shared(self, op: PlannedOp, most: Most, gate: Format) -> int:
        """Of the shared expert, what the routed ones do not have: hidden rows, twice where it is streamed with them."""
        wide, shared = op.widths["D"], op.widths["FS"]
        first, down = (parse_format(op.formats[f"shared_{name}_format"]) for name in ("gate", "down"))
        kept = self._hidden(down, most.T, shared) + FLOAT32 * shared
        for streamed in STREAMED_PAIRS.get(gate.kind, ()) if self.size == BFLOAT16 else ():
            rows = step_tokens(streamed, op.widths["E"] * self.groups, op.widths["K"])
            kept += self._hidden(first, min(most.T, rows), shared)
        kept += self._codes(most.T, wide) if first.kind == "fp8" != gate.kind and not self.given else 0
        kept += most.T * wide * BFLOAT16 if first.kind == "wint4" != gate.kind and self.size == BFLOAT16 else 0
        return kept

    def _dequantizes(self, op: PlannedOp, most: Most) -> bool:
        if self.size != BFLOAT16:
            return False
        kinds = {parse_format(op.formats[f"{name}_format"]).kind for name in PROJECTIONS}
        wide, experts, width, chosen = (op.widths[name] for name in ("D", "E", "F", "K"))
        tokens = most_tokens_as_codes(kinds, experts * width * wide, experts * self.groups, chosen)
        return 0 < tokens < most.T

    def _hidden(self, format_: Format, rows: int, width: int) -> int:
        """Rows that enter a product: codes where its weight is fp8."""
        return self._codes(rows, width) if format_.kind == "fp8" else rows * width * self.size

    def _codes(self, rows: int, width: int) -> int:
        return rows * width + rows * math.ceil(width / CODES) * FLOAT32

    def _attention(self, op: PlannedOp, most: Most) -> int:
        """Absorbed queries of a chunk and parts of its results; keys and values of a pass, where contexts are expanded."""
        heads, latent, rope, nope, v = (op.widths[name] for name in ("heads", "latent_dim", "rope", "nope", "v"))
        exact = self.size == FLOAT32 or op.formats["cache_dtype"] == "float32"
        size = FLOAT32 if exact else BFLOAT16
        rows, programs = absorbed_tile(self.capability, "float32" if exact else "bfloat16")
        tokens = min(most.T, CHUNK)
        least = heads // rows * tokens if heads % rows == 0 else math.ceil(heads * tokens / rows) + most.B
        parts = least + SPARE * programs
        kept = tokens * (heads * (latent + rope) * size + 4 * INT32)
        kept += parts * rows * (latent * size + FLOAT32) + (parts + 1) * 8 * INT32
        if exact or op.formats["mode"] != "expanded" or nope != v or most.T <= LONGEST:
            return kept
        contexts = most.B * math.ceil(most.P * self.block_tokens / UNIT) * UNIT
        span = expanded_span(heads, contexts, expanded_units(self.capability))
        kept += span * (heads * (nope + v) + rope) * BFLOAT16 + most.T * heads * FLOAT32 + 2 * most.B * INT32
        stored_so = op.formats["kv_b_format"] in ("bf16", ABSENT)
        return kept + (0 if stored_so else heads * (nope + v) * latent * BFLOAT16)

    def _gather(self, op: PlannedOp, most: Most) -> int:
        return op.widths["ranks"] * most.R * op.widths["part"] * FLOAT32
