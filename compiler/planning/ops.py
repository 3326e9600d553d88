"""The plugin ops that one rank of an engine runs, from the model's numbers and the recipe alone.

Names, widths, formats and counts are those of the nodes in the graphs after the passes, where the recipe inserts every op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.splits import HEAD, shape_of_rank
from dsc.compiler.planning.sharding import split
from dsc.compiler.planning.weights import PlannedWeight, layer_kinds
from dsc.compiler.recipe import Recipe
from dsc.runtime.spec import ModelSpec

# Passes without which a graph is not made of these ops.
NEEDED = (
    "insert_embedding", "fuse_lm_head", "fuse_add_rms_norm", "fuse_qkv", "insert_mla_attention", "fuse_moe",
    "fuse_swiglu", "insert_rms_norm", "insert_linear",
)  # fmt: skip
PROJECTIONS = ("gate", "up", "down")
ABSENT = "fp32"  # what nodes say of a weight that they do not have


@dataclass(frozen=True)
class PlannedOp:
    """A node, or `count` nodes that are alike.

    name     `layers.*` for a layer's number
    widths   what does not change with the step, by the letters of the op's schema
    formats  attributes that are text: formats of weights, mode, dtypes
    """

    name: str
    op: str
    count: int
    widths: Mapping[str, int]
    formats: Mapping[str, str]


def missing_passes(recipe: Recipe) -> list[str]:
    """Passes whose ops `planned_ops` takes for granted and that a recipe does not have."""
    names = {entry.name for entry in recipe.passes}
    return [name for name in NEEDED if name not in names]


def planned_ops(
    spec: ModelSpec, recipe: Recipe, weights: Sequence[PlannedWeight], mesh: Mesh, phase: str
) -> list[PlannedOp]:
    """Ops of the main model on one rank of a mesh, all pipeline stages together. `phase` is prefill or decode."""
    return list(_Ops(spec, recipe, weights, mesh, phase).all())


class _Ops:
    def __init__(
        self, spec: ModelSpec, recipe: Recipe, weights: Sequence[PlannedWeight], mesh: Mesh, phase: str
    ) -> None:
        self.spec, self.mesh = spec, mesh
        self.weights = {weight.name: weight for weight in weights if weight.model == "main"}
        options = next(entry.instance for entry in recipe.passes if entry.name == "insert_mla_attention")
        self.mode = str(getattr(options, phase))
        self.cache_dtype = recipe.kv_cache.dtype
        set_dtype = next((entry.instance for entry in recipe.passes if entry.name == "set_dtype"), None)
        self.dtype = {"bf16": "bfloat16"}.get(getattr(set_dtype, "activations", "fp32"), "float32")
        self.norms_quantize = any(entry.name == "quantize_norms" for entry in recipe.passes)

    def all(self) -> Iterator[PlannedOp]:
        spec = self.spec
        table = {"dtype": self.dtype, "table_format": self._format("model.embed_tokens.weight")}
        hidden = {"D": spec.hidden_size}
        yield PlannedOp("embed_tokens", "Embedding", 1, {**hidden, "V": spec.vocab_size}, table)
        attention = list(self._attention())
        formats = _codes_for(attention) if self.norms_quantize else {}
        yield PlannedOp("layers.*.input_layernorm", "RmsNorm", 1, hidden, formats)
        if spec.num_layers > 1:
            yield PlannedOp("layers.*.input_layernorm", "AddRmsNorm", spec.num_layers - 1, hidden, formats)
        yield from attention
        mlps = [
            list(self._experts(len(layers)) if spec.is_moe(layers[0]) else self._dense(len(layers)))
            for layers in layer_kinds(spec)
        ]
        for formats, count in self._norms_before(mlps):
            yield PlannedOp("layers.*.post_attention_layernorm", "AddRmsNorm", count, hidden, formats)
        for ops in mlps:
            yield from ops
        yield from self._all_reduce("mlp", spec.num_layers)
        yield PlannedOp("norm", "AddRmsNorm", 1, hidden, {})
        yield from self._head()

    def _head(self) -> Iterator[PlannedOp]:
        spec, mesh = self.spec, self.mesh
        weight = self.weights["model.embed_tokens.weight" if spec.tie_word_embeddings else HEAD]
        rows = shape_of_rank(weight.shape, split(spec, weight, mesh))[0]
        widths = {"D": spec.hidden_size, "V": rows}
        yield PlannedOp("lm_head", "LmHead", 1, widths, {"w_format": self._format(weight.name)})
        if mesh.tensor > 1 and not spec.tie_word_embeddings:
            widths = {"part": rows, "ranks": mesh.num_ranks, "vocabulary": spec.vocab_size}
            yield PlannedOp("lm_head.gather", "GatherLogits", 1, widths, {})

    def _all_reduce(self, of: str, count: int) -> Iterator[PlannedOp]:
        """The sum over ranks behind what has its columns split. Other meshes are not built, so have no op for it."""
        if self.mesh.num_ranks == self.mesh.tensor > 1:
            widths = {"D": self.spec.hidden_size, "ranks": self.mesh.num_ranks}
            yield PlannedOp(f"layers.*.{of}.all_reduce", "AllReduce", count, widths, {})

    def _norms_before(self, mlps: Sequence[Sequence[PlannedOp]]) -> Iterator[tuple[dict[str, str], int]]:
        """Formats of the norms, and of how many layers they are: one entry where all quantize alike."""
        found: list[tuple[dict[str, str], int]] = []
        for ops in mlps:
            formats, count = _codes_for(ops) if self.norms_quantize else {}, ops[0].count
            if found and found[-1][0] == formats:
                count += found.pop()[1]
            found.append((formats, count))
        yield from found

    def _attention(self) -> Iterator[PlannedOp]:
        spec, count, prefix = self.spec, self.spec.num_layers, "model.layers.{}.self_attn"
        heads = spec.num_heads // self.mesh.tensor
        queries = heads * spec.qk_head_dim
        joint = f"{prefix}.qkv_proj.weight" in self.weights
        first = "qkv_proj" if joint else "q_proj" if spec.q_lora_rank is None else "q_a_proj"
        widths = {
            "D": spec.hidden_size,
            "heads": heads,
            "joint": int(joint),
            "latent": spec.kv_lora_rank,
            "nope": spec.qk_nope_head_dim,
            "q_lora": spec.q_lora_rank or 0,
            "q_width": spec.q_lora_rank or queries,
            "rope": spec.qk_rope_head_dim,
        }
        formats = {
            "cache_dtype": self.cache_dtype,
            "w_format": self._format(f"{prefix}.{first}.weight"),
            "w_kv_format": ABSENT if joint else self._format(f"{prefix}.kv_a_proj_with_mqa.weight"),
        }
        yield PlannedOp("layers.*.self_attn.qkv", "Qkv", count, widths, formats)
        if spec.q_lora_rank is not None:
            yield self._linear("self_attn.q_b_proj", count, spec.q_lora_rank, queries)
        widths = {
            "heads": heads,
            "latent_dim": spec.kv_lora_rank,
            "nope": spec.qk_nope_head_dim,
            "rope": spec.qk_rope_head_dim,
            "v": spec.v_head_dim,
        }
        formats = {
            "cache_dtype": self.cache_dtype,
            "kv_b_format": self._format(f"{prefix}.kv_b_proj.weight"),
            "mode": self.mode,
        }
        yield PlannedOp("layers.*.self_attn.attention", "MlaAttention", count, widths, formats)
        yield self._linear("self_attn.o_proj", count, heads * spec.v_head_dim, spec.hidden_size)
        yield from self._all_reduce("self_attn", count)

    def _dense(self, count: int) -> Iterator[PlannedOp]:
        hidden, width = self.spec.hidden_size, self.spec.intermediate_size // self.mesh.tensor
        yield self._linear("mlp.gate_proj", count, hidden, width)
        yield self._linear("mlp.up_proj", count, hidden, width)
        yield PlannedOp("layers.*.mlp.swiglu", "Swiglu", count, {"F": width}, {})
        yield self._linear("mlp.down_proj", count, width, hidden)

    def _experts(self, count: int) -> Iterator[PlannedOp]:
        spec, mesh = self.spec, self.mesh
        router = {
            "D": spec.hidden_size,
            "E": spec.num_experts,
            "groups": spec.num_groups,
            "normalize": int(spec.norm_topk_prob),
            "top_k": spec.experts_per_token,
            "topk_groups": spec.topk_groups,
        }
        kinds = {"group_score": spec.group_score if spec.num_groups > 1 else "none", "scoring": spec.scoring}
        yield PlannedOp("layers.*.mlp.router", "Router", count, router, kinds)
        widths = {
            "D": spec.hidden_size,
            "E": spec.num_experts // mesh.expert,
            "F": spec.moe_intermediate_size // mesh.expert_width_ways,
            "K": spec.experts_per_token,
        }
        if mesh.expert > 1:
            widths["expert_groups"] = mesh.expert
        if spec.num_shared_experts:
            widths["FS"] = spec.shared_intermediate_size // mesh.tensor
        formats = {}
        for name in PROJECTIONS:
            formats[f"{name}_format"] = self._format(f"model.layers.{{}}.mlp.experts.{name}_proj.weight")
            shared = f"model.layers.{{}}.mlp.shared_experts.{name}_proj.weight"
            formats[f"shared_{name}_format"] = self._format(shared) if spec.num_shared_experts else ABSENT
        yield PlannedOp("layers.*.mlp.moe", "Moe", count, widths, dict(sorted(formats.items())))

    def _linear(self, name: str, count: int, inner: int, outer: int) -> PlannedOp:
        format_ = self._format(f"model.layers.{{}}.{name}.weight")
        return PlannedOp(f"layers.*.{name}", "Linear", count, {"I": inner, "O": outer}, {"w_format": format_})

    def _format(self, weight: str) -> str:
        return self.weights[weight].format_name if self.weights[weight].format else ABSENT


def _codes_for(readers: Sequence[PlannedOp]) -> dict[str, str]:
    """What a norm says of the codes that it makes, by the first op after it that has weights."""
    reader = next(op for op in readers if op.op in ("Linear", "Qkv", "Moe"))
    names = ("w", "w_kv", "gate", "up", "shared_gate", "shared_up")
    found = [reader.formats.get(f"{name}_format", ABSENT) for name in names]
    return next(({"quantize": format_} for format_ in found if format_.startswith("fp8")), {})
