"""Multi-head latent attention in standard ops (DeepSeek-V2, section 2.1), one sequence, no cache."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from dsc.compiler.importer.builder import Builder


@dataclass(frozen=True)
class RopeTables:
    """What rotates a tensor: cos and sin [context, rope / 2], and the row of the table for each token [1, T] int64."""

    cos: gs.Constant
    sin: gs.Constant
    rows: gs.Variable

    def rotate(self, build: Builder, name: str, x: gs.Variable) -> gs.Variable:
        """Rotate interleaved pairs of the last axis of x [1, heads, T, rope]."""
        return build.op("RotaryEmbedding", name, [x, self.cos, self.sin, self.rows], x.shape, interleaved=1)


def attention(build: Builder, layer: int, x: gs.Variable, rope: RopeTables) -> gs.Variable:
    """x [T, D] -> o_proj(attention(queries, keys, values)) [T, D]."""
    spec, node, tensor = build.spec, f"layers.{layer}.self_attn", f"model.layers.{layer}.self_attn"
    query = queries(build, node, tensor, x, rope)
    key, value = keys_and_values(build, node, tensor, x, rope)
    heads = build.op(
        "Attention",
        f"{node}.attention",
        [query, key, value],
        (1, spec.num_heads, "T", spec.v_head_dim),
        is_causal=1,
        scale=spec.softmax_scale,
    )
    width = spec.num_heads * spec.v_head_dim
    rows = build.op("Transpose", f"{node}.rows", [heads], (1, "T", spec.num_heads, spec.v_head_dim), perm=[0, 2, 1, 3])
    flat = build.reshape(f"{node}.flat", rows, ("T", width))
    o_proj = build.weight(f"{tensor}.o_proj.weight", (spec.hidden_size, width), "attention")
    return build.linear(f"{node}.o_proj", flat, o_proj)


def queries(build: Builder, node: str, tensor: str, x: gs.Variable, rope: RopeTables) -> gs.Variable:
    """x -> q [1, H, T, nope + rope], through q_a, its norm and q_b, or through one q_proj where q_lora_rank is null."""
    spec = build.spec
    width = spec.num_heads * spec.qk_head_dim
    if spec.q_lora_rank is None:
        q = build.linear(
            f"{node}.q_proj", x, build.weight(f"{tensor}.q_proj.weight", (width, spec.hidden_size), "attention")
        )
    else:
        q_a = build.weight(f"{tensor}.q_a_proj.weight", (spec.q_lora_rank, spec.hidden_size), "attention")
        q_b = build.weight(f"{tensor}.q_b_proj.weight", (width, spec.q_lora_rank), "attention")
        latent = build.linear(f"{node}.q_a_proj", x, q_a)
        normed = build.norm(f"{node}.q_a_layernorm", latent, f"{tensor}.q_a_layernorm.weight", spec.latent_norm_eps)
        q = build.linear(f"{node}.q_b_proj", normed, q_b)
    heads = split_heads(build, f"{node}.q", q, spec.qk_head_dim)
    nope, turned = build.split(f"{node}.q_split", heads, 3, nope=spec.qk_nope_head_dim, rope=spec.qk_rope_head_dim)
    rotated = rope.rotate(build, f"{node}.q_rope", turned)
    return build.op("Concat", f"{node}.query", [nope, rotated], heads.shape, axis=3)


def keys_and_values(
    build: Builder, node: str, tensor: str, x: gs.Variable, rope: RopeTables
) -> tuple[gs.Variable, gs.Variable]:
    """x -> k [1, H, T, nope + rope] and v [1, H, T, v]. The rotated part has no norm and is one for all heads."""
    spec = build.spec
    latent_width, rope_width, heads = spec.kv_lora_rank, spec.qk_rope_head_dim, spec.num_heads
    expanded_width = spec.qk_nope_head_dim + spec.v_head_dim
    kv_a = build.weight(f"{tensor}.kv_a_proj_with_mqa.weight", (spec.cache_width, spec.hidden_size), "attention")
    kv_b = build.weight(f"{tensor}.kv_b_proj.weight", (heads * expanded_width, latent_width), "kv_b")

    joint = build.linear(f"{node}.kv_a_proj_with_mqa", x, kv_a)
    latent, k_pe = build.split(f"{node}.kv_split", joint, 1, latent=latent_width, rope=rope_width)
    normed = build.norm(f"{node}.kv_a_layernorm", latent, f"{tensor}.kv_a_layernorm.weight", spec.latent_norm_eps)
    one_head = build.reshape(f"{node}.k_pe", k_pe, (1, 1, "T", rope_width))
    rotated = rope.rotate(build, f"{node}.k_rope", one_head)

    expanded = split_heads(build, f"{node}.kv", build.linear(f"{node}.kv_b_proj", normed, kv_b), expanded_width)
    k_nope, value = build.split(f"{node}.kv_b_split", expanded, 3, nope=spec.qk_nope_head_dim, v=spec.v_head_dim)
    shared = build.op("Expand", f"{node}.k_shared", [rotated, build.ints(1, heads, 1, 1)], (1, heads, "T", rope_width))
    key = build.op("Concat", f"{node}.key", [k_nope, shared], (1, heads, "T", spec.qk_head_dim), axis=3)
    return key, value


def split_heads(build: Builder, name: str, x: gs.Variable, width: int) -> gs.Variable:
    """[T, H * width] -> [1, H, T, width]."""
    heads = build.spec.num_heads
    viewed = build.reshape(f"{name}_view", x, (1, "T", heads, width))
    return build.op("Transpose", f"{name}_heads", [viewed], (1, heads, "T", width), perm=[0, 2, 1, 3])
