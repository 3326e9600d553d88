"""What fits: weights of each rank, memory of a step, tokens of cache on a GPU, and the settings that use it best.

Memory of a step is worked out from widths: the most that one op of the prefill graph needs at once, and beside it the most
that one op's kernels keep (dsc.compiler.planning.scratch). What CUDA, its graphs and its libraries take besides comes out of
the share of memory that is left alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.splits import EXPERT_MAP, HEAD, splits_of
from dsc.compiler.ir.weight import DTYPE_BYTES
from dsc.compiler.planning.gpus import Gpu
from dsc.compiler.planning.ops import PlannedOp, missing_passes, planned_ops
from dsc.compiler.planning.scratch import CODES, Most, Scratch
from dsc.compiler.planning.sharding import rank_bytes, stage_layers
from dsc.compiler.planning.weights import PlannedWeight, planned_weights
from dsc.compiler.recipe import Recipe
from dsc.runtime.manifest import Limits
from dsc.runtime.spec import ModelSpec

MEMORY_SHARE = 0.9  # of a GPU's memory that weights, step and cache may fill
STEP_SHARE = 0.1  # of what the weights leave, that a suggested step may fill
CONTEXTS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
STEPS = (16384, 8192, 4096, 2048, 1024, 512, 256)  # tokens of a step that are suggested
SEQUENCES = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1)
LOGIT_BYTES = DTYPE_BYTES["float32"]


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its decoder layers (the MTP layer is the one behind the last), bytes of each of its ranks by
    weight class, and cache bytes a token.
    """

    layers: tuple[int, ...]
    bytes_by_class: Mapping[str, int]
    token_bytes: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.bytes_by_class.values())


def make_stages(spec: ModelSpec, recipe: Recipe, weights: Sequence[PlannedWeight], mesh: Mesh) -> list[Stage]:
    """The stages of a recipe's engine. Embeddings lie on the first, norm and head and MTP layer on the last, which needs the
    embeddings too where it has an MTP layer.
    """
    ranges = [set(layers) for layers in stage_layers(spec.num_layers, recipe.parallel.pipeline)]
    if recipe.mtp.enabled:
        ranges[-1].add(spec.num_layers)
    token_bytes = spec.cache_width * DTYPE_BYTES[recipe.kv_cache.dtype]
    stages = []
    for number, layers in enumerate(ranges):
        by_class: dict[str, int] = defaultdict(int)
        for weight in weights:
            held = len(layers.intersection(weight.layers)) if weight.layers else _holds(spec, recipe, weight, number)
            if held:
                by_class[weight.weight_class] += held * rank_bytes(spec, weight, mesh)
        stages.append(Stage(tuple(sorted(layers)), dict(sorted(by_class.items())), len(layers) * token_bytes))
    return stages


def _holds(spec: ModelSpec, recipe: Recipe, weight: PlannedWeight, stage: int) -> bool:
    """Whether a stage holds a weight from outside the layers; tables of layers are on all of them."""
    first, last = stage == 0, stage == recipe.parallel.pipeline - 1
    if weight.name == "model.embed_tokens.weight":
        return first or (last and (recipe.mtp.enabled or spec.tie_word_embeddings))
    return last or weight.name.startswith("rope.") or weight.name == EXPERT_MAP


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step on one rank: `arena_bytes` of intermediates, `io_bytes` of inputs and outputs, kept twice."""

    arena_bytes: int
    io_bytes: int

    @property
    def total(self) -> int:
        return self.arena_bytes + 2 * self.io_bytes


def prefill_ops(spec: ModelSpec, recipe: Recipe, mesh: Mesh) -> list[PlannedOp]:
    """Ops of a rank's prefill graph; [] where the recipe does not insert them all."""
    if missing_passes(recipe):
        return []
    return planned_ops(spec, recipe, planned_weights(spec, recipe), mesh, "prefill")


def step_memory(
    spec: ModelSpec,
    recipe: Recipe,
    mesh: Mesh,
    batch_tokens: int,
    sequences: int,
    ops: Sequence[PlannedOp] | None = None,
) -> StepMemory:
    """Memory of the largest step: `batch_tokens` tokens, logits of every row that is sampled.

    ops  what `prefill_ops` gives, where it was worked out before
    """
    if ops is None:
        ops = prefill_ops(spec, recipe, mesh)
    size = _activation_bytes(recipe)
    rows = min(batch_tokens, sequences * (1 + recipe.mtp.drafts)) if recipe.target != "cpu" else batch_tokens
    splits = () if spec.tie_word_embeddings else splits_of(spec, HEAD, "lm_head", mesh)
    logits = sum(split.part(spec.vocab_size) for split in splits) * rows * LOGIT_BYTES  # of one rank, to be gathered
    io = rows * spec.vocab_size * LOGIT_BYTES + batch_tokens * spec.hidden_size * size
    codes = any("quantize" in op.formats for op in ops if op.op == "AddRmsNorm")
    arena = max(_token_bytes(spec, mesh, size, codes) * batch_tokens, logits)
    if recipe.target == "cpu":
        return StepMemory(arena, io)
    most = Most(batch_tokens, sequences, -(-recipe.limits.context_tokens // recipe.kv_cache.block_tokens), rows)
    return StepMemory(arena + Scratch.of(recipe, ops, size, mesh.expert).nbytes(most), io)


def _token_bytes(spec: ModelSpec, mesh: Mesh, size: int, codes: bool) -> int:
    """Bytes a token that are needed at once, by the op that needs most; the residual stream is among them.

    size   of an activation
    codes  whether norms give what fp8 weights are multiplied by, too
    """
    hidden, heads = spec.hidden_size, spec.num_heads // mesh.tensor
    queries, values = heads * spec.qk_head_dim, heads * spec.v_head_dim
    cached, lora = spec.cache_width, spec.q_lora_rank or 0
    # By whether the norm's result is among them: where it is, so are its codes and their scales.
    normed, others = [4 * hidden], []  # AddRmsNorm: two in, two out
    normed.append((lora or queries) + cached + 2 * hidden)
    others += [lora + queries + cached + hidden, queries + values + cached + hidden]
    if spec.num_dense_layers:
        dense = spec.intermediate_size // mesh.tensor
        normed.append(2 * dense + 2 * hidden)
        others.append(3 * dense + hidden)
    if spec.num_experts:
        normed.append(3 * hidden + spec.experts_per_token * (4 + 4) // size)
    beside = hidden + 4 * -(-hidden // CODES) if codes else 0
    return max(max(normed) * size + beside, max(others) * size)


def _activation_bytes(recipe: Recipe) -> int:
    activations = [getattr(e.instance, "activations", "fp32") for e in recipe.passes if e.name == "set_dtype"]
    return DTYPE_BYTES["bfloat16"] if activations == ["bf16"] else DTYPE_BYTES["float32"]


@dataclass(frozen=True)
class Settings:
    """What to serve with: the largest step, sequences at once, cache blocks."""

    batch_tokens: int
    sequences: int
    cache_blocks: int

    @property
    def rank(self) -> tuple[int, int]:
        """The higher, the better: the most sequences; of steps that allow as many, the largest, as each reads all weights."""
        return self.sequences, self.batch_tokens


@dataclass(frozen=True)
class Fit:
    """An engine on one kind of GPU.

    reasons         why it does not fit, () where it does: one sequence of the full context has room beside a step
    cache_tokens    tokens that fit at the recipe's limits; 0 where nothing is left
    sequences_at    sequences of so many tokens that fit at once
    best            limits and cache blocks that a recipe would best have, for sequences that hold `sequence_tokens` on
                    average; None where it does not fit
    serving         the best that an engine with the recipe's own limits can be served with; None where it does not fit
    """

    gpu: Gpu
    usable_bytes: int
    weight_bytes: int
    step_bytes: int
    cache_bytes: int
    cache_tokens: int
    sequences_at: Mapping[int, int]
    best: Settings | None
    serving: Settings | None
    sequence_tokens: int
    reasons: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def better(self) -> Settings | None:
        """`best` where it is more than `serving`: it takes an engine with these limits."""
        if self.best is None or self.serving is None or self.best.rank <= self.serving.rank:
            return None
        return self.best


def fit(spec: ModelSpec, recipe: Recipe, stages: Sequence[Stage], mesh: Mesh, gpu: Gpu, sequence_tokens: int) -> Fit:
    """Whether an engine fits on GPUs of one kind, one rank on each; the fullest stage decides.

    sequence_tokens  what a sequence holds on average, for the suggested settings
    """
    limits = recipe.limits
    usable = int(gpu.memory_bytes * MEMORY_SHARE)
    weights = max(stage.weight_bytes for stage in stages)

    ops = prefill_ops(spec, recipe, mesh)
    step = step_memory(spec, recipe, mesh, limits.batch_tokens, limits.sequences, ops).total

    def tokens(num_bytes: int) -> int:
        block = recipe.kv_cache.block_tokens
        return max(num_bytes, 0) // (block * max(stage.token_bytes for stage in stages)) * block

    left = max(usable - weights - step, 0)
    held = tokens(left)
    reasons = _reasons(recipe, gpu, usable - weights, held)
    best = serving = None
    if not reasons:

        def held_with(batch_tokens: int, sequences: int) -> int:
            needed = step_memory(spec, recipe, mesh, batch_tokens, sequences, ops).total
            return tokens(usable - weights - needed) if needed <= (usable - weights) * STEP_SHARE else 0

        best = _best(recipe, STEPS, SEQUENCES, held_with, sequence_tokens)
        serving = _best(recipe, *_within(limits), lambda batch_tokens, sequences: held, sequence_tokens)
    contexts = sorted({limits.context_tokens, *(n for n in CONTEXTS if n <= limits.context_tokens)})
    return Fit(
        gpu=gpu,
        usable_bytes=usable,
        weight_bytes=weights,
        step_bytes=step,
        cache_bytes=left,
        cache_tokens=held,
        sequences_at={n: held // n for n in contexts},
        best=best,
        serving=serving,
        sequence_tokens=sequence_tokens,
        reasons=reasons,
    )


def _reasons(recipe: Recipe, gpu: Gpu, left: int, held: int) -> tuple[str, ...]:
    if recipe.target not in ("cpu", gpu.target):
        return (f"an engine for {recipe.target} does not run on it: --target {gpu.target}",)
    if left < 0:
        return (f"weights are {-left:,} bytes too large",)
    if held < recipe.limits.context_tokens:
        return (f"a step and the cache of one sequence need more: {held:,} tokens have room",)
    return ()


def _within(limits: Limits) -> tuple[list[int], range]:
    """Steps and sequences that an engine with these limits can be served with."""
    return [limits.batch_tokens, *(n for n in STEPS if n < limits.batch_tokens)], range(limits.sequences, 0, -1)


def _best(
    recipe: Recipe,
    steps: Iterable[int],
    sequences: Sequence[int],
    held: Callable[[int, int], int],
    sequence_tokens: int,
) -> Settings | None:
    """The settings of the highest rank.

    sequences  to choose from, the most first
    held       tokens of cache beside a step of so many tokens of so many sequences

    Within an engine's limits the largest step always wins, and sequences are the limit's or as many as the cache has room
    for: the runtime takes the arena that was planned for the limits, so a smaller step or fewer sequences leave no more room.
    """
    found = []
    for batch_tokens in steps:
        for count in (n for n in sequences if n <= batch_tokens):
            room = held(batch_tokens, count)
            if room >= max(count * sequence_tokens, recipe.limits.context_tokens):
                found.append(Settings(batch_tokens, count, room // recipe.kv_cache.block_tokens))
                break
    return max(found, key=lambda settings: settings.rank, default=None)
