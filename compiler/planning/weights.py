"""The weights an engine will store, from the model's numbers and the recipe alone: no graph, no checkpoint.

Names and shapes are those of the graphs after the passes, one entry for all layers that are alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from dsc.compiler.ir.format_choice import FormatChoice
from dsc.compiler.ir.splits import EXPERT_MAP
from dsc.compiler.ir.text import class_of_name
from dsc.compiler.ir.weight import DTYPE_BYTES
from dsc.compiler.packing import SCALES
from dsc.compiler.recipe import Recipe
from dsc.compiler.tensor_names import SCALE_SUFFIX, TensorNames
from dsc.plugins.formats import Format
from dsc.runtime.spec import ModelSpec, SourceFormat

SOURCE_BYTES = {"fp8": 1, "bf16": 2, "fp32": 4}
PACKED_BYTES = {"int32": 4, "int64": 8, SCALES[0]: 2}
EXACT = "float32"


class _ChoosesFormats(Protocol):
    """What of the pass quantize_weights is needed here."""

    def choice(self, weight_class: str, model: str = "main") -> FormatChoice | None: ...


@dataclass(frozen=True)
class PlannedWeight:
    """One weight, or one of every layer in `layers`.

    name    as the engine names it, `{}` for the layer's number
    layers  () for one outside the layers
    format  None: `dtype`, the recipe has no say
    why     the reason when the format is not the recipe's first choice
    """

    name: str
    weight_class: str
    model: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    format: Format | None
    why: str = ""
    dtype: str = EXACT

    @property
    def count(self) -> int:
        return max(len(self.layers), 1)

    @property
    def format_name(self) -> str:
        return str(self.format) if self.format else self.dtype

    @property
    def nbytes(self) -> int:
        """Stored bytes of all of them, data and scales."""
        return self.count * stored_bytes(self.shape, self.format)


def stored_bytes(shape: Sequence[int], format_: Format | None) -> int:
    """Bytes of a weight's stored parts; of four-byte elements where the recipe has no say."""
    if format_ is None:
        return math.prod(shape) * DTYPE_BYTES[EXACT]
    return sum(math.prod(part) * DTYPE_BYTES[dtype] for dtype, part in format_.parts(shape).values())


def planned_weights(spec: ModelSpec, recipe: Recipe) -> list[PlannedWeight]:
    """Every weight of the recipe's engine for a model; the MTP layer where the recipe enables it."""
    chooser = _Chooser(spec, recipe)
    embeddings = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    head = {} if spec.tie_word_embeddings else {"lm_head.weight": (spec.vocab_size, spec.hidden_size)}
    tables = {f"rope.{part}": (recipe.limits.context_tokens, spec.qk_rope_head_dim // 2) for part in ("cos", "sin")}
    found = list(chooser.all({**embeddings, "model.norm.weight": (spec.hidden_size,), **head, **tables}, "main", ()))
    for layers in layer_kinds(spec):
        found += chooser.all(_layer_weights(spec, recipe, layers[0]), "main", layers)
    if recipe.mtp.enabled:
        layer = spec.num_layers
        found += chooser.all(_layer_weights(spec, recipe, layer), "mtp", (layer,))
    if sharded(recipe) and recipe.parallel.expert > 1 and spec.num_experts:
        shape = (recipe.parallel.expert, spec.num_experts)
        found.append(PlannedWeight(EXPERT_MAP, "exact", "main", (), shape, None, dtype="int32"))
    return found


def sharded(recipe: Recipe) -> bool:
    """Whether a recipe cuts its weights over several ranks."""
    return recipe.parallel.num_ranks > 1 and any(entry.name == "shard" for entry in recipe.passes)


def layer_kinds(spec: ModelSpec) -> list[tuple[int, ...]]:
    """The main model's layers, those alike together: dense ones, then those with experts."""
    dense = tuple(layer for layer in range(spec.num_layers) if not spec.is_moe(layer))
    moe = tuple(layer for layer in range(spec.num_layers) if spec.is_moe(layer))
    return [layers for layers in (dense, moe) if layers]


def source_bytes(spec: ModelSpec) -> int:
    """Bytes of a checkpoint as released: linears as its format says, everything else in its float, the router's bias in
    float32; the MTP layer's copies of embeddings and head are stored too. Of packed weights scales have two bytes, and what
    is packed is what config.json says.
    """
    names = TensorNames(spec)
    names.floats("model.embed_tokens", spec.vocab_size, spec.hidden_size)
    names.floats("model.norm", spec.hidden_size)
    if not spec.tie_word_embeddings:
        names.floats("lm_head", spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers, spec.num_layers + spec.num_mtp_layers):
        names.mtp_layer(layer, "lm_head.weight")
    total = _bytes_of(names)
    for layers in layer_kinds(spec):
        # Lists of modules that are not packed may name layers by their numbers.
        alike = [layers] if spec.source.packing is None else [(layer,) for layer in layers]
        for some in alike:
            one = TensorNames(spec)
            one.decoder_layer(some[0])
            total += len(some) * _bytes_of(one)
    return total


def _bytes_of(names: TensorNames) -> int:
    floats = SOURCE_BYTES["fp32" if names.spec.source.kind == "fp32" else "bf16"]
    total = 0
    for name, expected in names.found.items():
        if expected.dtypes == ("float8_e4m3fn",):
            size = SOURCE_BYTES["fp8"]
        elif expected.dtypes[0] in PACKED_BYTES:
            size = PACKED_BYTES[expected.dtypes[0]]
        elif name.endswith((SCALE_SUFFIX, ".e_score_correction_bias")):
            size = SOURCE_BYTES["fp32"]
        else:
            size = floats
        total += size * math.prod(expected.shape)
    return total


def _layer_weights(spec: ModelSpec, recipe: Recipe, layer: int) -> dict[str, tuple[int, ...]]:
    """Weights of a layer as the graphs hold them: experts stacked, q (or q_a) and kv_a joined where fuse_qkv joins them."""
    logical = spec if spec.source.packing is None else replace(spec, source=SourceFormat("bf16"))
    names = TensorNames(logical)
    if layer == spec.num_layers:
        names.mtp_layer(layer, "lm_head.weight")
    else:
        names.decoder_layer(layer)
    found: dict[str, tuple[int, ...]] = {}
    for name, expected in names.found.items():
        if not expected.copy_of and not name.endswith(SCALE_SUFFIX):
            stacked = re.sub(r"\.experts\.\d+\.", ".experts.", name)
            found[stacked] = expected.shape if stacked == name else (spec.num_experts, *expected.shape)
    if any(entry.name == "fuse_qkv" for entry in recipe.passes):
        _join_qkv(spec, found, f"model.layers.{layer}.self_attn")
    return found


def _join_qkv(spec: ModelSpec, found: dict[str, tuple[int, ...]], prefix: str) -> None:
    """The rule of fuse_qkv: one weight, but where fp8 blocks of q end inside its rows, or one of the two alone is packed."""
    q, kv_a = (
        f"{prefix}.{'q_proj' if spec.q_lora_rank is None else 'q_a_proj'}.weight",
        f"{prefix}.kv_a_proj_with_mqa.weight",
    )
    if spec.source.kind == "fp8" and found[q][0] % spec.source.block[0]:
        return
    names = TensorNames(spec)
    if len({names.packs(tensor.removesuffix(".weight")) for tensor in (q, kv_a)}) > 1:
        return
    (q_rows, width), (kv_rows, _) = found.pop(q), found.pop(kv_a)
    found[f"{prefix}.qkv_proj.weight"] = (q_rows + kv_rows, width)


class _Chooser:
    """Formats by the recipe's passes set_dtype and quantize_weights, as those choose them."""

    def __init__(self, spec: ModelSpec, recipe: Recipe) -> None:
        names = [entry.name for entry in recipe.passes]
        by_name = {entry.name: entry.instance for entry in recipe.passes}
        quantizer = by_name.get("quantize_weights")
        self._quantizer = cast(_ChoosesFormats, quantizer) if quantizer is not None else None
        before = names[: names.index("quantize_weights")] if quantizer is not None else []
        activations = getattr(by_name["set_dtype"], "activations", "fp32") if "set_dtype" in before else "fp32"
        self._plain = Format(activations)
        self._ue8m0 = spec.source.scale_fmt == "ue8m0"

    def all(self, weights: dict[str, tuple[int, ...]], model: str, layers: tuple[int, ...]) -> Iterator[PlannedWeight]:
        for name, shape in weights.items():
            weight_class = class_of_name(name)
            general = re.sub(r"^model\.layers\.\d+\.", "model.layers.{}.", name)
            format_, why = self._format(weight_class, model, shape)
            yield PlannedWeight(general, weight_class, model, layers, shape, format_, why)

    def _format(self, weight_class: str, model: str, shape: tuple[int, ...]) -> tuple[Format | None, str]:
        if weight_class == "exact" or self._quantizer is None:
            return None, ""
        choice = self._quantizer.choice(weight_class, model)
        return choice.format_of(shape[-1], self._plain, self._ue8m0) if choice else (self._plain, "")
