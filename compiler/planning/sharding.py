"""How weights are split over ranks, and which splits there can be: whole heads, whole experts, whole blocks and groups.

A split must leave what one rank stores a part of what a single rank would store: shards put together are the whole, bit
for bit. So no block of 128 rows and columns (FP8) and no group of columns (wint4) is ever cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsc.compiler.planning.weights import PlannedWeight, stored_bytes
from dsc.plugins.formats import Format
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import Parallel
from dsc.runtime.spec import ModelSpec

FP8_BLOCK = 128
MOST_RANKS = 64  # of a stage, among which allowed ways are looked for
SHOWN_WAYS = 12
# Ends of the names of weights that are split; the others lie on every rank.
BY_HEADS = (("q_b_proj", 0), ("q_proj", 0), ("kv_b_proj", 0), ("o_proj", 1))
BY_WIDTH = (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1))
BY_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Mesh:
    """Ranks of one pipeline stage: attention, dense MLPs, shared experts, embeddings and head over `tensor` of them;
    experts over `expert`, and each expert's width over the ranks left.
    """

    tensor: int
    expert: int

    @property
    def num_ranks(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def expert_width_ways(self) -> int:
        return self.num_ranks // self.expert


def shard_faults(spec: ModelSpec, weights: Sequence[PlannedWeight], mesh: Mesh) -> list[tuple[str, str]]:
    """Why a mesh cannot hold the weights: (what, why), [] where it can."""
    large, small = max(mesh.tensor, mesh.expert), min(mesh.tensor, mesh.expert)
    if large % small:
        return [("ranks", f"tensor {mesh.tensor} and expert {mesh.expert}: one must divide the other")]
    faults = []
    if spec.num_heads % mesh.tensor:
        faults.append(("heads", f"{spec.num_heads} = {_divided(spec.num_heads, mesh.tensor)}"))
    if spec.num_experts % mesh.expert:
        faults.append(("experts", f"{spec.num_experts} = {_divided(spec.num_experts, mesh.expert)}"))
    if faults:
        return faults
    return [fault for weight in weights for fault in _weight_faults(spec, weight, mesh)]


def split(weight: PlannedWeight, mesh: Mesh) -> tuple[int | None, int]:
    """The axis of a matrix that is split (0 rows, 1 columns; None: every rank has it) and over how many ranks."""
    name = weight.name.removesuffix(".weight").rpartition(".")[2]
    if weight.name in BY_VOCABULARY:
        return 0, mesh.tensor
    if weight.weight_class in ("attention", "kv_b"):
        return dict(BY_HEADS).get(name), mesh.tensor
    if weight.weight_class in ("dense_mlp", "shared_experts"):
        return dict(BY_WIDTH).get(name), mesh.tensor
    if weight.weight_class == "experts":
        return dict(BY_WIDTH).get(name), mesh.expert_width_ways
    return None, 1


def rank_bytes(spec: ModelSpec, weight: PlannedWeight, mesh: Mesh) -> int:
    """Bytes that one rank stores of a weight, of one layer. The mesh must be without faults."""
    return stored_bytes(_rank_shape(spec, weight, mesh), weight.format)


def check_parallel(spec: ModelSpec, weights: Sequence[PlannedWeight], parallel: Parallel, where: str) -> Mesh:
    """The mesh of a recipe's `parallel`. Raises DscError with every reason against it and the ways that are allowed."""
    mesh = Mesh(parallel.tensor, parallel.expert)
    faults = shard_faults(spec, weights, mesh)
    if parallel.pipeline > spec.num_layers:
        faults.append(("layers", f"{spec.num_layers} cannot be split over {parallel.pipeline} stages"))
    if faults:
        raise DscError(
            f"parallel {{tensor: {parallel.tensor}, expert: {parallel.expert}, pipeline: {parallel.pipeline}}} "
            "cannot split this model",
            where=where,
            details=faults,
            wanted="whole heads, experts, blocks and groups on every rank",
            try_=_allowed_text(allowed_meshes(spec, weights), mesh.num_ranks),
        )
    return mesh


def allowed_meshes(spec: ModelSpec, weights: Sequence[PlannedWeight], most_ranks: int = MOST_RANKS) -> list[Mesh]:
    """Every mesh of up to `most_ranks` ranks that splits the weights, fewest ranks first."""
    tensor = [n for n in range(1, most_ranks + 1) if spec.num_heads % n == 0]
    expert = [n for n in range(1, most_ranks + 1) if spec.num_experts % n == 0]
    meshes = sorted((Mesh(t, e) for t in tensor for e in expert), key=lambda m: (m.num_ranks, m.tensor, m.expert))
    return [mesh for mesh in meshes if not shard_faults(spec, weights, mesh)]


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """Decoder layers of each pipeline stage: as even as can be, the first stages take one more."""
    starts = [stage * (num_layers // stages) + min(stage, num_layers % stages) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _allowed_text(meshes: Sequence[Mesh], wanted_ranks: int) -> str:
    """Meshes of the wanted number of ranks; where there are none, of the numbers below and above it."""
    numbers = sorted({mesh.num_ranks for mesh in meshes})
    below, above = [n for n in numbers if n < wanted_ranks], [n for n in numbers if n > wanted_ranks]
    shown = [wanted_ranks] if wanted_ranks in numbers else [*below[-1:], *above[:1]]
    texts = [f"{{tensor: {m.tensor}, expert: {m.expert}}}" for m in meshes if m.num_ranks in shown]
    more = [f"{len(texts) - SHOWN_WAYS} more"] if len(texts) > SHOWN_WAYS else []
    return f"parallel: {', '.join([*texts[:SHOWN_WAYS], *more])}"


def _weight_faults(spec: ModelSpec, weight: PlannedWeight, mesh: Mesh) -> Iterator[tuple[str, str]]:
    axis, ways = split(weight, mesh)
    if weight.name in BY_VOCABULARY:
        return
    if _holds_queries(spec, weight):
        size, axis, ways = spec.num_heads * spec.qk_head_dim, 0, mesh.tensor
    elif axis is None or ways == 1:
        return
    else:
        size = weight.shape[axis - 2]
    grain, what = _grain(weight.format, axis)
    if ways > 1 and size % (ways * grain):
        side = ("rows", "columns")[axis]
        yield weight.name, f"{size} {side} = {_divided(size, ways)}" + (f", not in whole {what}" if what else "")


def _holds_queries(spec: ModelSpec, weight: PlannedWeight) -> bool:
    """Whether a weight joins the rows of all heads with kv_a's, which every rank has."""
    return weight.name.endswith(".qkv_proj.weight") and spec.q_lora_rank is None


def _grain(format_: Format | None, axis: int) -> tuple[int, str]:
    """Rows (axis 0) or columns (1) that a format keeps together."""
    if format_ is not None and format_.kind == "fp8":
        return FP8_BLOCK, f"blocks of {FP8_BLOCK}"
    if format_ is not None and format_.kind == "wint4" and axis == 1:
        return format_.group, f"groups of {format_.group}"
    return 1, ""


def _rank_shape(spec: ModelSpec, weight: PlannedWeight, mesh: Mesh) -> tuple[int, ...]:
    *lead, rows, columns = weight.shape if len(weight.shape) > 1 else (1, *weight.shape)
    axis, ways = split(weight, mesh)
    if _holds_queries(spec, weight):
        rows = (rows - spec.cache_width) // mesh.tensor + spec.cache_width  # queries by heads, kv_a whole
    elif axis == 0:
        rows = math.ceil(rows / ways)  # a vocabulary is padded
    elif axis == 1:
        columns //= ways
    if weight.weight_class == "experts":
        lead = [lead[0] // mesh.expert]
    return (*lead, rows, columns)


def _divided(size: int, ways: int) -> str:
    whole, rest = divmod(size, ways)
    return f"{ways} x {whole}" + (f" + {rest}" if rest else "")
