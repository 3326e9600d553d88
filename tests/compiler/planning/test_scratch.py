"""A planned step holds what kernels keep beside the arena: held against programs lowered for GPUs, at released widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import TINY_R1

from dsc.compiler.codegen import CubinCompiler
from dsc.compiler.graphs import make_graphs
from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.lower import lower
from dsc.compiler.lower_gpu import lower_gpu
from dsc.compiler.model_shapes import first_layers, read_shape
from dsc.compiler.planning.capacity import prefill_ops, step_memory
from dsc.compiler.planning.scratch import Most, Scratch
from dsc.compiler.random_checkpoint import RandomCheckpoint
from dsc.compiler.recipe import Recipe, load_recipe, parse_recipe
from dsc.plugins.gpu_node import Arch
from dsc.plugins.moe import scratch

R1, V2_LITE = "r1-wint4", "v2-lite-wint4"
INTEGERS = "default: {format: wint4, groups: [128, 64, 32]}"
Edit = tuple[str, str]


class Uncompiled(CubinCompiler):
    """Lays out launches without a cubin behind them."""

    def build(self, advance: Callable[[int], None] = lambda _: None) -> None:
        pass


def given(name: str, ranks: int, expert: int, target: str, edits: tuple[Edit, ...]) -> Recipe:
    recipe = load_recipe(name)
    if edits:
        text = Path(recipe.where).read_text()
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new)
        recipe = parse_recipe(text, recipe.where, name)
    recipe = recipe.override(target, ranks)
    return replace(recipe, parallel=replace(recipe.parallel, expert=expert))


def arenas(recipe: Recipe, model: str) -> tuple[int, int]:
    """What is planned, and the largest arena of the engine's programs; of few layers, as those behind are like them."""
    whole, folder = read_shape(model)
    spec = first_layers(whole, whole.num_dense_layers + 1)
    if recipe.mtp.enabled:
        spec = replace(spec, num_mtp_layers=1)
    programs = [lower(graph, "") for graph in make_graphs(recipe, RandomCheckpoint(folder, spec))[0]]
    lowered = lower_gpu(programs, Uncompiled(Arch(recipe.target)))
    mesh, limits = Mesh(recipe.parallel.tensor, recipe.parallel.expert), recipe.limits
    told = step_memory(spec, recipe, mesh, limits.batch_tokens, limits.sequences)
    return told.arena_bytes, max(program.arena_bytes for program in lowered)


# Recipe, ranks, groups of them for experts, target, what of the recipe is changed.
CASES = [
    (R1, 8, 8, "sm_90a", ()),  # two stacks of bfloat16 for many tokens
    (R1, 8, 2, "sm_90a", ()),
    (R1, 8, 8, "sm_80", (("batch_tokens: 8192", "batch_tokens: 4096"),)),  # fewer tokens than have them
    (R1, 4, 4, "sm_90a", ()),  # the stacks are too large
    (R1, 8, 8, "sm_90a", (("default: {format: fp8, block: [128, 128]}", INTEGERS), ("  - quantize_norms\n", ""))),
    ("r1-fp8", 8, 8, "sm_90a", (("  - quantize_norms\n", ""),)),
    ("r1-fp8", 8, 8, "sm_90a", ()),
    ("r1-wint8", 8, 8, "sm_90a", ()),
    (V2_LITE, 1, 1, "sm_90a", ()),
    (V2_LITE, 1, 1, "sm_80", ()),
    (V2_LITE, 1, 1, "sm_90a", (("prefill: expanded", "prefill: absorbed"), (INTEGERS, "default: {format: fp8}"))),
    (V2_LITE, 1, 1, "sm_90a", ((INTEGERS, "default: {format: wint8}"),)),
    (V2_LITE, 1, 1, "sm_90a", ((INTEGERS, "default: {format: bf16}"),)),
    ("tiny-r1-wint4", 1, 1, "sm_90a", ()),
    ("tiny-r1-fp8", 1, 1, "sm_90a", ()),
    ("tiny-r1-fp32", 1, 1, "sm_90a", ()),
    ("tiny-r1-fp32", 1, 1, "sm_80", ()),
]


@pytest.mark.parametrize(("name", "ranks", "expert", "target", "edits"), CASES)
def test_a_planned_step_holds_a_lowered_program(
    name: str, ranks: int, expert: int, target: str, edits: tuple[Edit, ...]
) -> None:
    recipe = given(name, ranks, expert, target, edits)
    told, needed = arenas(recipe, str(TINY_R1) if name.startswith("tiny") else recipe.model)
    assert needed <= told <= 1.02 * needed + (1 << 16)


def test_stacks_of_experts_in_bfloat16_are_counted() -> None:
    """R1's of a rank of eight, gate or down and up: 1.9 GB from 144 pairs an expert on."""
    recipe = load_recipe(R1)
    spec, _ = read_shape(recipe.model)
    kept = Scratch.of(recipe, prefill_ops(spec, recipe, Mesh(8, 8)), size=2, groups=8)
    fewer, more = (kept.nbytes(Most(T=tokens, B=256, P=512, R=512)) for tokens in (4607, 4608))
    assert scratch.most_tokens_as_codes({"wint4"}, 32 * 2048 * 7168, 256, 8) == 4607
    assert 2 * 2 * 32 * 2048 * 7168 <= more - fewer < 2 * 2 * 32 * 2048 * 7168 + (1 << 20)
