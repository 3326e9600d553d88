"""`dsc plan`: what a recipe makes of a model, before anything is downloaded or built."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsc.compiler.fit import check_fit
from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.weight import DTYPE_BYTES
from dsc.compiler.planning.build_cost import LINEAR, BuildCost, build_cost
from dsc.compiler.planning.capacity import Fit, Stage, fit, make_stages
from dsc.compiler.planning.gpus import find_gpu, gpus_of
from dsc.compiler.planning.measured import load_table
from dsc.compiler.planning.rates import Prediction, predict
from dsc.compiler.planning.serving import SEQUENCE_TOKENS, serving_settings
from dsc.compiler.planning.sharding import allowed_meshes, check_parallel, unbuilt, uncut
from dsc.compiler.planning.source import Source, read_source
from dsc.compiler.planning.weights import PlannedWeight, planned_weights
from dsc.compiler.recipe import Recipe
from dsc.compiler.tensor_names import TensorNames
from dsc.runtime.bench_floor import RATES
from dsc.runtime.manifest import Serving
from dsc.runtime.spec import ModelSpec


@dataclass(frozen=True)
class ClassTotal:
    """Weights of one class in one format, over all ranks' shares counted once."""

    weight_class: str
    format: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What an engine will be.

    weights      totals by class and format, each weight once; ranks repeat what cannot be split
    token_bytes  cache bytes of one token by model, over all layers
    stages       one for each pipeline stage: what each of its ranks holds
    ways         meshes of the recipe's number of ranks, and those of fewer, that can hold the model
    fits         one a GPU; rates: predicted ones, of GPUs that it fits on
    serving      what the engine's manifest will hold (`dsc.compiler.planning.serving`)
    notes        what a user must hear
    """

    recipe: Recipe
    spec: ModelSpec
    source: Source
    weights: tuple[ClassTotal, ...]
    token_bytes: Mapping[str, int]
    mesh: Mesh
    stages: tuple[Stage, ...]
    ways: tuple[Mesh, ...]
    fits: tuple[Fit, ...]
    rates: tuple[Prediction, ...]
    serving: Serving | None
    build: BuildCost
    notes: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(total.bytes for total in self.weights)

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object; bytes are whole numbers."""
        source = {"bytes": self.source.bytes, "read_from": self.source.read_from}
        return {
            "recipe": self.recipe.name,
            "model": self.recipe.model,
            "target": self.recipe.target,
            "parallel": asdict(self.recipe.parallel),
            "source": source,
            "weights": [asdict(total) for total in self.weights],
            "weight_bytes": self.weight_bytes,
            "cache": {"dtype": self.recipe.kv_cache.dtype, "token_bytes": dict(self.token_bytes)},
            "stages": [
                {
                    "layers": list(stage.layers),
                    "rank_bytes": stage.weight_bytes,
                    "rank_bytes_by_class": dict(stage.bytes_by_class),
                    "token_bytes": stage.token_bytes,
                }
                for stage in self.stages
            ],
            "ways": [asdict(mesh) for mesh in self.ways],
            "build": {**asdict(self.build), "seconds": round(self.build.seconds, 1)},
            "gpus": [_fit_json(self.recipe, item) for item in self.fits],
            "serving": asdict(self.serving) if self.serving else None,
            "rates": [_rates_json(item) for item in self.rates],
            "notes": list(self.notes),
        }


def make_plan(
    recipe: Recipe,
    model: str | None = None,
    gpus: Sequence[str] = (),
    sequence_tokens: int | None = None,
) -> Plan:
    """Plan a recipe's engine.

    model            config.json, folder or name instead of the recipe's
    gpus             names of `dsc.compiler.planning.gpus`; none: all that the recipe's target runs on
    sequence_tokens  what a sequence holds on average, for suggested settings
    raises           DscError for a model that is not known, does not fit the recipe, or cannot be split as it says
    """
    named = [find_gpu(name) for name in gpus] or gpus_of(recipe.target)
    source = read_source(model or recipe.model, recipe)
    spec = source.spec
    check_fit(recipe, spec)
    weights = planned_weights(spec, recipe)
    mesh = check_parallel(spec, weights, recipe.parallel, recipe.where)
    stages = make_stages(spec, recipe, weights, mesh)
    tokens = min(sequence_tokens or SEQUENCE_TOKENS, recipe.limits.context_tokens)
    ways = [way for way in allowed_meshes(spec, weights, mesh.num_ranks) if way.num_ranks == mesh.num_ranks]
    fits = [fit(spec, recipe, stages, mesh, gpu, tokens) for gpu in named]
    return Plan(
        recipe=recipe,
        spec=spec,
        source=source,
        weights=_totals(weights),
        token_bytes=_token_bytes(spec, recipe),
        mesh=mesh,
        stages=tuple(stages),
        ways=tuple(ways),
        fits=tuple(fits),
        rates=tuple(_rates(spec, recipe, weights, mesh, item) for item in fits if item.serving),
        serving=serving_settings(spec, recipe),
        build=build_cost(spec, weights, source.bytes),
        notes=(
            *source.notes,
            *unbuilt(recipe.parallel),
            *uncut(recipe),
            *_format_notes(weights),
            *_rounded_again(spec, weights),
        ),
    )


def _totals(weights: Iterable[PlannedWeight]) -> tuple[ClassTotal, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for weight in weights:
        counts[weight.weight_class, weight.format_name] += weight.count
        sizes[weight.weight_class, weight.format_name] += weight.nbytes
    return tuple(ClassTotal(*key, counts[key], sizes[key]) for key in sorted(sizes))


def _token_bytes(spec: ModelSpec, recipe: Recipe) -> dict[str, int]:
    one = spec.cache_width * DTYPE_BYTES[recipe.kv_cache.dtype]
    return {"main": spec.num_layers * one, **({"mtp": one} if recipe.mtp.enabled else {})}


def _format_notes(weights: Iterable[PlannedWeight]) -> list[str]:
    """Weights whose format is not the recipe's first choice."""
    return [f"{w.name}: stored as {w.format_name}, {w.why}" for w in weights if w.why]


def _rounded_again(spec: ModelSpec, weights: Iterable[PlannedWeight]) -> list[str]:
    """Classes of symmetric 4-bit codes that wint4 could keep in other groups (dsc.compiler.keep_codes)."""
    packing, names = spec.source.packing, TensorNames(spec)
    if packing is None or packing.zeros or packing.bits != 4 or not packing.group:
        return []
    found: dict[tuple[str, str], None] = {}
    for weight in weights:
        format_, layer = weight.format, weight.layers[0] if weight.layers else 0
        if weight.weight_class not in LINEAR or format_ is None or format_.kind != "wint4":
            continue
        module = weight.name.format(layer).removesuffix(".weight").replace(".experts.", ".experts.0.")
        if packing.group % format_.group and names.packs(module):
            found[weight.weight_class, str(format_)] = None
    return [
        f"{weight_class}: symmetric 4-bit codes in groups of {packing.group} are rounded again for {format_}; "
        f"groups of {packing.group} keep them"
        for weight_class, format_ in found
    ]


def _rates(spec: ModelSpec, recipe: Recipe, weights: Sequence[PlannedWeight], mesh: Mesh, item: Fit) -> Prediction:
    """Rates with what the server starts with."""
    assert item.serving is not None, item
    rates = RATES.get(item.gpu.target)
    table = load_table(item.gpu.name, rates) if rates is not None and item.gpu.target == recipe.target else None
    return predict(
        spec,
        recipe,
        weights,
        mesh,
        table,
        item.gpu.title,
        context=item.sequence_tokens,
        batch_tokens=item.serving.batch_tokens,
        sequences=item.serving.sequences,
    )


def _rates_json(item: Prediction) -> dict[str, Any]:
    prefill = item.prefill
    return {
        "gpu": item.gpu,
        "measured": list(item.measured),
        "decode": [{**asdict(rate), "tokens_per_s": round(rate.tokens_per_s, 1)} for rate in item.decode],
        "prefill": {**asdict(prefill), "tokens_per_s": round(prefill.tokens_per_s, 1)} if prefill else None,
        "notes": list(item.notes),
        "why_none": item.why,
    }


def _fit_json(recipe: Recipe, item: Fit) -> dict[str, Any]:
    return {
        "gpu": item.gpu.name,
        "target": item.gpu.target,
        "fits": item.fits,
        "reasons": list(item.reasons),
        "memory_bytes": item.gpu.memory_bytes,
        "usable_bytes": item.usable_bytes,
        "rank_bytes": item.weight_bytes,
        "step_bytes": item.step_bytes,
        "cache_bytes": item.cache_bytes,
        "cache_tokens": item.cache_tokens,
        "sequences_at": {str(tokens): count for tokens, count in item.sequences_at.items()},
        "best": {**asdict(item.best), "sequence_tokens": item.sequence_tokens} if item.best else None,
        "serving": asdict(item.serving) if item.serving else None,
        "try": limits_to_try(recipe, item),
    }


def limits_to_try(recipe: Recipe, item: Fit) -> str | None:
    """What a recipe would say for an engine that serves better than its own on a GPU. None where its own does best."""
    if item.better is None:
        return None
    sequences = item.better.sequences
    text = (
        f"limits: {{batch_tokens: {item.better.batch_tokens}, sequences: {sequences}, "
        f"context_tokens: {recipe.limits.context_tokens}}}"
    )
    buckets = recipe.decode_buckets
    return text if not buckets or buckets[-1] == sequences else f"{text}, decode_buckets up to {sequences}"
