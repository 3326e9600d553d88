"""How absorbed attention is launched: tiles by architecture, types and step, scratch memory, arguments.

Steps of more than CHUNK tokens run in chunks, one after another in the same scratch memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import triton

from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.plugins.mla_attention.scratch import CHUNK, SPARE, absorbed_tile
from dsc.plugins.mla_attention.triton_decode import (
    mla_attend,
    mla_queries,
    mla_queries_mixed,
    mla_values,
    mla_values_few,
    mla_values_mixed,
)
from dsc.runtime.steps import Kernel, Repeat, Scalar, Step, TensorMap

MIXED_PROGRAMS = 2  # on a multiprocessor, of the kernels that serve short queries beside long ones
RANGES = 128  # at most so many parts of one context


@dataclass(frozen=True)
class Tiles:
    """Rows of queries and keys of a tile of `mla_attend`, and what keeps a processor busy.

    cuda       sm90_mla_decode.cu: one persistent block a multiprocessor
    programs   pieces at a time on a multiprocessor
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 1
    cuda: bool = False


@dataclass(frozen=True)
class Queries:
    """Tile of `mla_queries`: tokens, columns of the latent."""

    tokens: int
    columns: int
    warps: int = 4


@dataclass(frozen=True)
class Values:
    """Tile of `mla_values`, or with no tokens of `mla_values_few`; see there."""

    tokens: int
    outputs: int
    merged: int
    columns: int = 0
    warps: int = 8
    stages: int = 3


@dataclass(frozen=True)
class Case:
    """Tiles for at most `tokens` and `sequences`; 0: any number."""

    tokens: int
    sequences: int
    queries: Queries
    values: Values

    @property
    def guard(self) -> str:
        limits = (("T", self.tokens), ("B", self.sequences))
        return " and ".join(f"{letter} <= {most}" for letter, most in limits if most)


FLOAT32 = (Case(0, 0, Queries(16, 32), Values(0, 32, 32)),)
ONE = Case(4, 16, Queries(16, 128), Values(0, 32, 16, warps=4))
# By the heads: the fewer there are, the more ranges a context is cut into, and the more there is to merge.
MANY_HEADS = (
    ONE,
    Case(16, 16, Queries(16, 128), Values(16, 64, 4, columns=128, warps=4)),
    Case(0, 0, Queries(64, 128), Values(64, 128, 1, columns=64, warps=4, stages=4)),
)
FEW_HEADS = (
    ONE,
    Case(16, 16, Queries(16, 128), Values(16, 32, 4, columns=256, warps=4)),
    Case(0, 0, Queries(64, 128), Values(32, 64, 2, columns=128, warps=4)),
)


def tiles_for(node: GpuNode, dtype: str) -> Tiles:
    """What attends, by architecture and types."""
    rows, programs = absorbed_tile(node.arch.capability, dtype)
    if dtype == "float32":
        return Tiles(rows, 16, 8, 1, programs)
    a = node.attributes
    if node.arch.capability == 90:
        shape = (a["latent_dim"], a["rope"], a["block_tokens"], a["cache_dtype"])
        cuda = node.arch.name == "sm_90a" and shape == (512, 64, 64, "bfloat16")
        whole = int(a["block_tokens"]) % 64 == 0  # a block number for each key takes registers
        return Tiles(rows, 64 if whole else 32, 8, 2, programs, cuda)
    return Tiles(rows, 32, 8 if node.arch.capability >= 100 else 4, 2, programs)


def compute_dtype(node: GpuNode) -> str:
    """What queries, keys and probabilities are in: float32 where the queries or the cache are."""
    exact = "float32" in (node.at("q").dtype, node.attributes["cache_dtype"])
    return "float32" if exact else "bfloat16"


@dataclass(frozen=True)
class Absorbed:
    """The three launches over one node's operands."""

    node: GpuNode
    tiles: Tiles
    dtype: str
    capacity: str
    queries: Typed
    plan: Typed
    places: Typed
    partial: Typed
    sums: Typed

    @staticmethod
    def of(node: GpuNode) -> Absorbed:
        dtype = compute_dtype(node)
        tiles = tiles_for(node, dtype)
        heads, latent, rope = (int(node.attributes[name]) for name in ("heads", "latent_dim", "rope"))
        tokens = f"min(T, {CHUNK})"
        whole = heads % tiles.rows == 0  # else every sequence may leave a tile half full
        least = f"{heads // tiles.rows}*{tokens}" if whole else f"ceil_div({heads}*{tokens}, {tiles.rows}) + B"
        capacity = f"{least} + {SPARE * tiles.programs}"
        return Absorbed(
            node,
            tiles,
            dtype,
            capacity,
            queries=node.add_scratch("queries", dtype, (tokens, heads, latent + rope)),
            plan=node.add_scratch("plan", "int32", (f"{capacity} + 1", 8)),
            places=node.add_scratch("places", "int32", (tokens, 4)),
            partial=node.add_scratch("partial", dtype, (capacity, tiles.rows, latent)),
            sums=node.add_scratch("sums", "float32", (capacity, tiles.rows)),
        )

    def cases(self, most: int = 0) -> tuple[Case, ...]:
        """Tiles by the step's size, the fewest tokens first; with `most` those of the last also for at most so many."""
        by_heads = MANY_HEADS if int(self.node.attributes["heads"]) >= 64 else FEW_HEADS
        cases: tuple[Case, ...] = FLOAT32 if self.math == "fp32" else by_heads
        return (*cases[:-1], replace(cases[-1], tokens=most), cases[-1]) if most else cases

    def steps(self, case: Case, longest: int = 0) -> tuple[Step, ...]:
        """The launches of a step, for sequences of at most `longest` queries in it (0: all)."""
        mixed = longest and case.values.tokens  # one token a program: those that have nothing to do are few
        values = self._values_mixed(case.values) if mixed else self._values(case.values)
        steps = (self._queries(case, longest), self._attend(), values)
        chunks = -(-self.node.bounds["T"] // CHUNK)
        return steps if chunks == 1 else (Repeat(f"ceil_div(T, {CHUNK})", steps),)

    @property
    def math(self) -> str:
        return "fp32" if self.dtype == "float32" or self.node.format("kv_b").kind == "fp32" else "bf16"

    def _kv_b(self) -> tuple[str, int]:
        format_ = self.node.format("kv_b")
        return format_.kind, 128 if format_.kind == "fp8" else format_.group

    def _chunk(self) -> dict[str, str]:
        """The chunk's tokens; the counter exists in steps of several chunks only."""
        if self.node.bounds["T"] <= CHUNK:
            return {"first": "0", "last": "T"}
        return {"first": f"I*{CHUNK}", "last": f"min(T, I*{CHUNK} + {CHUNK})"}

    def _tokens(self) -> str:
        chunk = self._chunk()
        return "T" if chunk["last"] == "T" else f"({chunk['last']} - {chunk['first']})"

    def _weight(self) -> dict[str, object]:
        kind, group = self._kv_b()
        weight = self.node.at("kv_b", dtype="uint8" if kind == "fp8" else "")
        scales = self.node.maybe("kv_b.scales")
        return {"kv_b": weight, "kv_b_scales": scales, "KIND": kind, "GROUP": group, "MATH": self.math}

    def _widths(self, *names: str) -> dict[str, int]:
        attributes = self.node.attributes
        known = {"HEADS": "heads", "NOPE": "nope", "ROPE": "rope", "V": "v", "LATENT": "latent_dim"}
        return {name: int(attributes[known[name]]) for name in names}

    def _queries(self, case: Case, longest: int) -> Kernel:
        node, tiles, tile = self.node, self.tiles, case.queries
        columns = min(tile.columns, int(node.attributes["latent_dim"]))
        parts = int(node.attributes["latent_dim"]) // columns * int(node.attributes["heads"])
        sequences = min(case.sequences or node.bounds["B"], node.bounds["B"])
        steps = ("q", "cos", "sin", "positions", "query_starts", "sequence_lengths")
        return node.triton(
            mla_queries_mixed if longest else mla_queries,
            (f"1 + SMS*{MIXED_PROGRAMS}" if longest else f"1 + {parts}*ceil_div({self._tokens()}, {tile.tokens})",),
            {
                **{name: node.at(name) for name in steps},
                **self._weight(),
                **self._widths("HEADS", "NOPE", "ROPE", "V", "LATENT"),
                **self._chunk(),
                "queries": self.queries,
                "plan": self.plan,
                "places": self.places,
                "sequences": "B",
                "capacity": self.capacity,
                "processors": f"SMS*{tiles.programs}",
                "ROWS": tiles.rows,
                "KEYS": tiles.keys,
                "SEQUENCES": max(16, triton.next_power_of_2(sequences)),
                "RANGES": RANGES,
                "SHORTEST": max(1, 128 // tiles.keys),
                "OVERHEAD": max(1, 192 // tiles.keys),
                "TOKENS": tile.tokens,
                "COLUMNS": columns,
                **({"LONGEST": longest} if longest else {}),
                "PDL": node.arch.has_pdl,
            },
            num_warps=tile.warps,
            pdl=True,
        )

    def _attend(self) -> Kernel:
        node, tiles = self.node, self.tiles
        scale = float(node.attributes["scale"]) * math.log2(math.e)
        if tiles.cuda:
            return self._attend_cuda(scale)
        return node.triton(
            mla_attend,
            (self.capacity,),
            {
                "queries": self.queries,
                "cache": node.at("cache", dtype=str(node.attributes["cache_dtype"])),
                "block_table": node.at("block_table"),
                "plan": self.plan,
                "partial": self.partial,
                "sums": self.sums,
                "scale": scale,
                "blocks_per_sequence": "P",
                **self._widths("HEADS", "LATENT", "ROPE"),
                "BLOCK": int(node.attributes["block_tokens"]),
                "ROWS": tiles.rows,
                "KEYS": tiles.keys,
                "STAGES": tiles.stages,
                "PDL": node.arch.has_pdl,
            },
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            pdl=True,
        )

    def _attend_cuda(self, scale: float) -> Kernel:
        """sm90_mla_decode.cu: rows of 576 seen as 9 chunks of 64, of which a box takes several for 64 rows."""
        heads = int(self.node.attributes["heads"])
        row_bytes = 2 * 576

        def rows(at: Typed, count: str, chunks: int) -> TensorMap:
            dims, strides, box = (64, count, 9), (row_bytes, 128), (64, 64, chunks)
            return TensorMap(at.pointer.operand, "bfloat16", dims, strides, box, swizzle=128, l2_bytes=256)

        return self.node.cuda(
            __name__,
            "sm90_mla_decode.cu",
            "sm90_mla_decode",
            ("SMS",),
            512,
            [
                rows(self.queries, f"{heads}*min(T, {CHUNK})", 9),
                rows(self.node.at("cache"), "64*N", 3),
                self.plan,
                self.node.at("block_table"),
                self.partial,
                self.sums,
                scale,
                Scalar("i32", "P"),
            ],
            defines={"HEADS": heads},
            shared_bytes=SHARED_BYTES,
            pdl=True,
        )

    def _values(self, tile: Values) -> Kernel:
        parts, heads = int(self.node.attributes["v"]) // self._outputs(tile), int(self.node.attributes["heads"])
        tiles = f"ceil_div({self._tokens()}, {tile.tokens})" if tile.tokens else self._tokens()
        function = mla_values if tile.tokens else mla_values_few
        return self.node.triton(
            function,
            (parts, heads, tiles),
            self._values_arguments(tile),
            num_warps=tile.warps,
            num_stages=tile.stages,
            pdl=True,
        )

    def _values_mixed(self, tile: Values) -> Kernel:
        more = {"plan": self.plan, "query_starts": self.node.at("query_starts"), "sequences": "B"}
        return self.node.triton(
            mla_values_mixed,
            (f"SMS*{MIXED_PROGRAMS}",),
            {**self._values_arguments(tile), **more},
            num_warps=tile.warps,
            num_stages=tile.stages,
            pdl=True,
        )

    def _outputs(self, tile: Values) -> int:
        return min(tile.outputs, int(self.node.attributes["v"]))

    def _values_arguments(self, tile: Values) -> dict[str, object]:
        columns = min(tile.columns, int(self.node.attributes["latent_dim"]))
        return {
            "partial": self.partial,
            "sums": self.sums,
            **self._weight(),
            **self._widths("HEADS", "NOPE", "V", "LATENT"),
            **self._chunk(),
            "places": self.places,
            "o": self.node.at("o"),
            "ROWS": self.tiles.rows,
            "RANGES": RANGES,
            **({"TOKENS": tile.tokens, "COLUMNS": columns} if tile.tokens else {}),
            "OUTPUTS": self._outputs(tile),
            "MERGED": tile.merged,
            "PDL": self.node.arch.has_pdl,
        }


SHARED_BYTES = 1024 + 3 * 73728 + 2 * 2 * 64 * 4 + 256  # of sm90_mla_decode.cu: to align, struct Shared
