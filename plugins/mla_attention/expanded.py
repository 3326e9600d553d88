"""How expanded attention is launched: tiles by architecture, the passes over all contexts, scratch memory, arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import triton

from dsc.plugins.gpu_node import Arch, GpuNode, Typed
from dsc.plugins.mla_attention import sm90_mla_prefill
from dsc.plugins.mla_attention.scratch import SCRATCH_ROWS, UNIT, expanded_span, expanded_units
from dsc.plugins.mla_attention.triton_prefill import mla_contexts, mla_dequantize, mla_expand, mla_prefill
from dsc.runtime.steps import Kernel, Repeat, Step

DEQUANTIZE_ROWS = 16


@dataclass(frozen=True)
class Tiles:
    """rows, keys: of `mla_prefill`; units, columns: of `mla_expand`, tokens / UNIT and columns of the latent at a time.

    programs   of either on a multiprocessor
    """

    rows: int
    keys: int
    warps: int
    stages: int
    units: int
    columns: int
    expand_stages: int
    programs: int = 1


def tiles_for(arch: Arch) -> Tiles:
    """By architecture: what its registers and shared memory hold."""
    units = expanded_units(arch.capability)
    if arch.capability >= 100:
        return Tiles(128, 64, 8, 2, units, 64, 3)
    return (
        Tiles(128, 64, 8, 3, units, 64, 3) if arch.capability >= 90 else Tiles(64, 32, 4, 2, units, 32, 3, programs=2)
    )


@dataclass(frozen=True)
class Expanded:
    """The launches over one node's operands, for sequences of more than `longest` queries in the step.

    sm90   sm90_mla_prefill.cu attends, not mla_prefill
    span   tokens of a pass
    """

    node: GpuNode
    longest: int
    tiles: Tiles
    sm90: bool
    span: int
    ends: Typed
    kv: Typed
    k_rope: Typed
    logs: Typed

    @staticmethod
    def of(node: GpuNode, longest: int) -> Expanded:
        heads, nope, v, rope = (int(node.attributes[name]) for name in ("heads", "nope", "v", "rope"))
        tiles, sm90 = tiles_for(node.arch), sm90_mla_prefill.applies(node)
        if sm90:
            tiles = replace(tiles, rows=sm90_mla_prefill.ROWS)
        every = node.bounds["B"] * -(-node.bounds["P"] * int(node.attributes["block_tokens"]) // UNIT) * UNIT
        span = expanded_span(heads, every, tiles.units, SCRATCH_ROWS)
        return Expanded(
            node,
            longest,
            tiles,
            sm90,
            span,
            ends=node.add_scratch("ends", "int32", (2, "B")),
            kv=node.add_scratch("kv", "bfloat16", (heads, span, nope + v)),
            k_rope=node.add_scratch("k_rope", "bfloat16", (span, rope)),
            logs=node.add_scratch("logs", "float32", ("T", heads)),
        )

    def steps(self) -> tuple[Step, ...]:
        """Once where contexts end and kv_b in bfloat16; then a pass for every `span` tokens that there may be."""
        kv_b, before = self._kv_b()
        tokens = f"ceil_div(P*{int(self.node.attributes['block_tokens'])}, {UNIT})*{UNIT}"
        passes = f"ceil_div(min(B, T//{self.longest + 1})*{tokens}, {self.span})"
        return (*before, self._contexts(), Repeat(passes, (self._expand(kv_b), self._attend())))

    def _widths(self, *names: str) -> dict[str, int]:
        known = {"HEADS": "heads", "NOPE": "nope", "ROPE": "rope", "V": "v", "LATENT": "latent_dim"}
        return {name: int(self.node.attributes[known[name]]) for name in names}

    def _common(self) -> dict[str, object]:
        return {
            "sequences": "B",
            "SEQUENCES": max(16, triton.next_power_of_2(self.node.bounds["B"])),
            "PDL": self.node.arch.has_pdl,
        }

    def _kv_b(self) -> tuple[Typed, tuple[Step, ...]]:
        node, format_ = self.node, self.node.format("kv_b")
        if format_.kind == "bf16":
            return node.at("kv_b"), ()
        latent = int(node.attributes["latent_dim"])
        rows = int(node.attributes["heads"]) * (int(node.attributes["nope"]) + int(node.attributes["v"]))
        values = node.add_scratch("kv_b", "bfloat16", (rows, latent))
        step = node.triton(
            mla_dequantize,
            (rows // DEQUANTIZE_ROWS,),
            {
                "kv_b": node.at("kv_b", dtype="uint8" if format_.kind == "fp8" else ""),
                "kv_b_scales": node.maybe("kv_b.scales"),
                "values": values,
                **self._widths("LATENT"),
                "KIND": format_.kind,
                "GROUP": 128 if format_.kind == "fp8" else format_.group,
                "ROWS": DEQUANTIZE_ROWS,
                "PDL": node.arch.has_pdl,
            },
            pdl=True,
        )
        return values, (step,)

    def _contexts(self) -> Kernel:
        steps = {name: self.node.at(name) for name in ("query_starts", "sequence_lengths")}
        shape = {"ends": self.ends, "LONGEST": self.longest, "ROWS": self.tiles.rows}
        return self.node.triton(mla_contexts, (1,), {**steps, **shape, **self._common()}, pdl=True)

    def _expand(self, kv_b: Typed) -> Kernel:
        node, tiles = self.node, self.tiles
        return node.triton(
            mla_expand,
            (f"SMS*{tiles.programs}",),
            {
                "cache": node.at("cache", dtype="bfloat16"),
                "kv_b": kv_b,
                **{name: node.at(name) for name in ("block_table", "sequence_lengths")},
                "ends": self.ends,
                "kv": self.kv,
                "k_rope": self.k_rope,
                "first": f"I*{self.span}",
                "blocks_per_sequence": "P",
                **self._widths("HEADS", "NOPE", "V", "LATENT", "ROPE"),
                **self._common(),
                "BLOCK": int(node.attributes["block_tokens"]),
                "SPAN": self.span,
                "UNITS": tiles.units,
                "COLUMNS": min(tiles.columns, int(node.attributes["latent_dim"])),
            },
            num_warps=8,
            num_stages=tiles.expand_stages,
            pdl=True,
        )

    def _attend(self) -> Kernel:
        node, tiles = self.node, self.tiles
        if self.sm90:
            places = {"kv": self.kv, "k_rope": self.k_rope, "logs": self.logs, "ends": self.ends}
            return sm90_mla_prefill.launch(node, span=self.span, **places)
        steps = ("q", "cos", "sin", "positions", "query_starts", "sequence_lengths", "o")
        return node.triton(
            mla_prefill,
            (f"SMS*{tiles.programs}",),
            {
                **{name: node.at(name) for name in steps},
                "kv": self.kv,
                "k_rope": self.k_rope,
                "logs": self.logs,
                "ends": self.ends,
                "scale": float(node.attributes["scale"]) * math.log2(math.e),
                "first": f"I*{self.span}",
                **self._widths("HEADS", "NOPE", "ROPE", "V"),
                **self._common(),
                "SPAN": self.span,
                "ROWS": tiles.rows,
                "KEYS": tiles.keys,
                "STAGES": tiles.stages,
            },
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            pdl=True,
        )
