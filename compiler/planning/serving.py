"""What an engine's server starts with on the GPU that the engine is meant for: kept in the manifest as `serving`."""

from __future__ import annotations

from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.planning.capacity import fit, make_stages
from dsc.compiler.planning.gpus import default_gpu, find_gpu
from dsc.compiler.planning.weights import planned_weights
from dsc.compiler.recipe import Recipe
from dsc.runtime.manifest import Serving
from dsc.runtime.spec import ModelSpec

SEQUENCE_TOKENS = 4096  # what a sequence holds on average where nobody says


def serving_settings(spec: ModelSpec, recipe: Recipe) -> Serving | None:
    """The best sequences, cache blocks and tokens of a step within the recipe's limits, by `fit`; the same on every machine.

    That is the limits' step, and the limits' sequences or as many as the cache holds: an engine takes the memory that was
    planned for its limits, so smaller settings leave no more room. `dsc plan` tells which other limits would serve better.

    The GPU is the recipe's `gpu`, else its target's first in `dsc.compiler.planning.gpus`. None for CPUs, and where the
    engine does not fit on that GPU.
    """
    gpu = find_gpu(recipe.gpu) if recipe.gpu else default_gpu(recipe.target)
    if gpu is None or recipe.target != gpu.target:
        return None
    mesh = Mesh(recipe.parallel.tensor, recipe.parallel.expert)
    stages = make_stages(spec, recipe, planned_weights(spec, recipe), mesh)
    found = fit(spec, recipe, stages, mesh, gpu, min(SEQUENCE_TOKENS, recipe.limits.context_tokens)).serving
    if found is None:
        return None
    return Serving(gpu.name, found.sequences, found.cache_blocks, found.batch_tokens)
