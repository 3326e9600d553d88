"""A recipe's graphs of a checkpoint: imported, copied for each phase, passed through the recipe's passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.importer.model import import_main, import_mtp
from dsc.compiler.ir.graph import Graph
from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.verify import verify
from dsc.compiler.phases import StepLimits, advance_graph, phase_graphs, sample_graph
from dsc.compiler.pipeline import PipelineReport, check_final, run_passes
from dsc.compiler.random_checkpoint import RandomCheckpoint
from dsc.compiler.recipe import Recipe


def make_graphs(
    recipe: Recipe, checkpoint: Checkpoint | RandomCheckpoint, dump: Path | None = None
) -> tuple[list[Graph], PipelineReport]:
    """The final graphs in the order main, mtp, sample and, for GPUs, advance; and what the passes did."""
    limits = step_limits(recipe)
    context = recipe.limits.context_tokens
    imported = [import_main(checkpoint.spec, checkpoint.source, context)]
    if recipe.mtp.enabled:
        imported.append(import_mtp(checkpoint.spec, checkpoint.source, context))
    for model in imported:
        model.info = replace(model.info, mesh=Mesh(recipe.parallel.tensor, recipe.parallel.expert))
    graphs = [graph for model in imported for graph in phase_graphs(model, limits)]
    report = run_passes(graphs, [entry.instance for entry in recipe.passes], recipe.allow, dump)
    after = [sample_graph(checkpoint.spec, limits)]
    if recipe.target != "cpu":
        after.append(advance_graph(checkpoint.spec, limits))
    for graph in after:
        verify(graph)
        report.nodes[graph.name] = [(str(node.name), f"dsc.{node.op}") for node in graph.nodes]
    graphs += after
    check_final(graphs)
    return graphs, report


def step_limits(recipe: Recipe) -> StepLimits:
    """The largest step of the recipe's engine.

    On a GPU a step's logits have their place from the start, so there are as many as sampling asks for; a CPU engine gives
    those of every token, for judging texts.
    """
    limits, drafts = recipe.limits, recipe.mtp.drafts
    return StepLimits(
        batch_tokens=limits.batch_tokens,
        sequences=limits.sequences,
        context_tokens=limits.context_tokens,
        drafts=drafts,
        logit_rows=limits.batch_tokens if recipe.target == "cpu" else limits.sequences * (1 + drafts),
        cache_dtype=recipe.kv_cache.dtype,
        block_tokens=recipe.kv_cache.block_tokens,
    )
