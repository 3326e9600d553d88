"""How weights are split over ranks, and which meshes there can be: by the rules of `dsc.compiler.ir.splits`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.splits import EXPERT_MAP, Split, divided, shape_of_rank, splits_of
from dsc.compiler.planning.weights import PlannedWeight, sharded, stored_bytes
from dsc.compiler.recipe import Recipe
from dsc.plugins.formats import Format
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import Parallel
from dsc.runtime.spec import ModelSpec

MOST_RANKS = 64  # of a stage, among which allowed ways are looked for
SHOWN_WAYS = 12


def shard_faults(spec: ModelSpec, weights: Sequence[PlannedWeight], mesh: Mesh) -> list[tuple[str, str]]:
    """Why a mesh cannot hold the weights: (what, why), [] where it can."""
    large, small = max(mesh.tensor, mesh.expert), min(mesh.tensor, mesh.expert)
    if large % small:
        return [("ranks", f"tensor {mesh.tensor} and expert {mesh.expert}: one must divide the other")]
    faults = []
    if spec.num_heads % mesh.tensor:
        faults.append(("heads", f"{spec.num_heads} = {divided(spec.num_heads, mesh.tensor)}"))
    if spec.num_experts % mesh.expert:
        faults.append(("experts", f"{spec.num_experts} = {divided(spec.num_experts, mesh.expert)}"))
    if faults:
        return faults
    return list(dict.fromkeys(fault for weight in weights for fault in _weight_faults(spec, weight, mesh)))


def split(spec: ModelSpec, weight: PlannedWeight, mesh: Mesh) -> tuple[Split, ...]:
    """How a weight lies over the ranks of a mesh; () where each has all of it."""
    return splits_of(spec, weight.name, weight.weight_class, mesh)


def rank_bytes(spec: ModelSpec, weight: PlannedWeight, mesh: Mesh) -> int:
    """Bytes that one rank has of a weight, of one layer. The mesh must be without faults."""
    return stored_bytes(shape_of_rank(weight.shape, split(spec, weight, mesh)), weight.format)


def unbuilt(parallel: Parallel) -> list[str]:
    """What of a recipe's ranks no engine is built for yet, [] where one is. Plans are made all the same."""
    found = ["engines of several pipeline stages are not built yet"] if parallel.pipeline > 1 else []
    if parallel.tensor % parallel.expert:
        found.append("engines whose expert ranks do not divide their tensor ranks are not built yet")
    return found


def uncut(recipe: Recipe) -> list[str]:
    """That a recipe of several ranks has no pass that cuts weights for them; [] where it has, or needs none."""
    ranks = recipe.parallel.num_ranks
    return [f"{ranks} ranks, and no pass cuts weights for them"] if ranks > 1 and not sharded(recipe) else []


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
            try_=_allowed_text(allowed_meshes(spec, weights), mesh.num_ranks) + _other_formats(spec, weights, mesh),
        )
    return mesh


def allowed_meshes(spec: ModelSpec, weights: Sequence[PlannedWeight], most_ranks: int = MOST_RANKS) -> list[Mesh]:
    """Every mesh of up to `most_ranks` ranks that splits the weights and is built for, fewest ranks first."""
    tensor = [n for n in range(1, most_ranks + 1) if spec.num_heads % n == 0]
    expert = [n for n in range(1, most_ranks + 1) if spec.num_experts % n == 0]
    built = (Mesh(t, e) for t in tensor for e in expert if not unbuilt(Parallel(t, e, 1)))
    meshes = sorted(built, key=lambda m: (m.num_ranks, m.tensor, m.expert))
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


def _other_formats(spec: ModelSpec, weights: Sequence[PlannedWeight], mesh: Mesh) -> str:
    """Classes of weights that keep a mesh from splitting the model by their format alone; "" where not all faults are so."""
    classes = sorted({weight.weight_class for weight in weights if any(_weight_faults(spec, weight, mesh))})
    loose = [replace(weight, format=Format("wint8")) for weight in weights]
    if not classes or shard_faults(spec, loose, mesh):
        return ""
    return f"; or for {', '.join(classes)} a format without groups and blocks: wint8, bf16"


def _weight_faults(spec: ModelSpec, weight: PlannedWeight, mesh: Mesh) -> Iterator[tuple[str, str]]:
    if weight.name == EXPERT_MAP:
        return  # each mesh has its own
    for item in split(spec, weight, mesh):
        if fault := item.fault(weight.shape, weight.format):
            yield weight.name, fault
