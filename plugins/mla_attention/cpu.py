"""MlaAttention on CPUs: gathered keys, and torch's fused attention over them.

Legend: G sequences of a group, Q queries of each, S keys of each, n = G*Q, H heads, N nope, R rope, V value, L latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from dsc.plugins.cpu_node import CASTS, CpuNode, Run, StepMemo
from dsc.plugins.latent_cache import cache_rows
from dsc.plugins.mla_attention.kv_b import Int8KvB, KvB, bind_kv_b
from dsc.plugins.mla_attention.ragged import GROUP_ELEMENTS, Group, Part, Plan, make_plan
from dsc.plugins.rope import rotate_by, step_turns

CACHED = 3 << 17  # elements of gathered keys that, made float32, stay in a core's second-level cache: 1.5 MB


@dataclass(frozen=True)
class Sizes:
    """The node's attributes that both modes need."""

    heads: int
    nope: int
    rope: int
    v: int
    latent: int
    scale: float


def bind(node: CpuNode) -> Run | None:
    """Attention in the node's mode; None (the reference) for caches that are neither float32 nor bfloat16."""
    a = node.attributes
    cache_dtype, block_tokens = str(a["cache_dtype"]), int(a["block_tokens"])
    if cache_dtype not in ("float32", "bfloat16"):
        return None
    heads, nope, rope, v, latent_dim = (int(a[name]) for name in ("heads", "nope", "rope", "v", "latent_dim"))
    sizes = Sizes(heads, nope, rope, v, latent_dim, float(a["scale"]))
    absorbed = {"absorbed": True, "expanded": False}[str(a["mode"])]
    attend = _absorbed if absorbed else _expanded
    key_width = latent_dim + rope
    row_elements = heads * (key_width if absorbed else nope + rope)
    kv_b = bind_kv_b(node, heads, nope, v)
    cos, sin = node.constants["cos"], node.constants["sin"]
    cast = CASTS[node.types["q"].dtype]

    def run(
        step: StepMemo,
        q: torch.Tensor,
        positions: torch.Tensor,
        query_starts: torch.Tensor,
        sequence_lengths: torch.Tensor,
        block_table: torch.Tensor,
        cache: torch.Tensor,
        latent: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        def plan_step() -> Plan:
            turns = step_turns(step, cos, sin, positions)
            ragged = (query_starts, sequence_lengths, block_table)
            return make_plan(*ragged, turns, block_tokens, row_elements, key_width, CACHED if absorbed else 0)

        plan = step.once(("mla_attention", absorbed), plan_step)
        if not plan.groups:
            return (q.new_zeros(len(q), heads * v),)
        return (cast(attend(step, sizes, kv_b, q, cache_rows(cache, cache_dtype, key_width), plan)),)

    return run


def _absorbed(
    step: StepMemo, sizes: Sizes, kv_b: KvB | Int8KvB, q: torch.Tensor, rows: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """[T, H*V] with the latents as keys and values of all heads.

    A query's heads are the rows of one attention problem, and the queries its batch: so the latents are read once for
    all heads, and the mask has a row per query. Values are whole cached rows, since the fused kernel wants equal
    widths; the rope part of the sum is dropped.
    """
    tokens = q.shape[0]
    q_THD = q.float().numpy().reshape(tokens, sizes.heads, sizes.nope + sizes.rope)
    made_THE = np.empty((tokens, sizes.heads, sizes.latent + sizes.rope), np.float32)
    made_THE[..., : sizes.latent] = kv_b.to_latents(step, q_THD[..., : sizes.nope]).float().numpy()
    turned = made_THE[..., sizes.latent :].view(np.complex64)
    np.multiply(q_THD[..., sizes.nope :].view(np.complex64), plan.turns, turned)
    q_THE = torch.from_numpy(made_THE)
    sums_dtype = kv_b.sums_dtype(tokens)
    sums_HTL = q_THE
    if tokens > 1:
        make = torch.empty if plan.whole else torch.zeros
        sums_HTL = make((sizes.heads, tokens, sizes.latent), dtype=sums_dtype)
    for group in plan.groups:
        found = rows[group.slots] if isinstance(group.slots, slice) else rows.index_select(0, group.slots)
        # The fused kernel is faster in float32, which wins while the converted keys stay in the processor's cache.
        dtype = torch.float32 if found.numel() <= CACHED or q.dtype is torch.float32 else rows.dtype
        keys_GSE = found.to(dtype).view(group.size, 1, group.keys, -1)
        for part in group.parts:
            q_GQHE = q_THE if plan.whole else q_THE[part.rows]
            q_GQHE = q_GQHE.to(dtype).view(group.size, part.queries, sizes.heads, -1)
            keys_GQSE = keys_GSE if part.keys == group.keys else keys_GSE[:, :, : part.keys]
            if part.queries > 1:
                keys_GQSE = keys_GQSE.expand(-1, part.queries, -1, -1)
            mask = part.mask(dtype)
            mask_GQ1S = None if mask is None else mask.unsqueeze(2)
            sums_GQHE = scaled_dot_product_attention(q_GQHE, keys_GQSE, keys_GQSE, mask_GQ1S, scale=sizes.scale)
            sums_HnL = sums_GQHE.narrow(-1, 0, sizes.latent).flatten(0, 1).transpose(0, 1)
            if tokens == 1:
                sums_HTL = sums_HnL.to(sums_dtype)
            elif part.real is None:
                sums_HTL[:, part.rows] = sums_HnL
            else:
                sums_HTL[:, part.real[1]] = sums_HnL[:, part.real[0]].to(sums_dtype)
    return kv_b.to_values(step, sums_HTL)


def _expanded(
    step: StepMemo, sizes: Sizes, kv_b: KvB | Int8KvB, q: torch.Tensor, rows: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """[T, H*V] with keys and values made of the latents, in float32, in which the fused kernel computes faster."""
    w = kv_b.whole()
    if plan.whole:
        (group,) = plan.groups
        return _expanded_group(sizes, w, q, _keys(rows, group), group)[0]
    o = q.new_zeros(len(q), sizes.heads * sizes.v)
    for group in plan.groups:
        outputs = _expanded_group(sizes, w, q, _keys(rows, group), group)
        for part, output in zip(group.parts, outputs, strict=True):
            if part.real is None:
                o[part.rows] = output.to(o.dtype)
            else:
                o[part.real[1]] = output[part.real[0]].to(o.dtype)
    return o


def _keys(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """The cached rows of a group, float32 [G, S, L+R]; memory of its own only where they are scattered or converted."""
    found = rows[group.slots] if isinstance(group.slots, slice) else rows.index_select(0, group.slots)
    return found.float().view(group.size, group.keys, -1)


def _expanded_group(
    sizes: Sizes, w: torch.Tensor, q: torch.Tensor, keys_GSE: torch.Tensor, group: Group
) -> list[torch.Tensor]:
    """Outputs [n, H*V] of the group's parts, with keys and values of as many heads at a time as memory allows."""
    width = sizes.nope + sizes.rope
    queries = [_rotated_queries(sizes, q, part, group.size) for part in group.parts]
    outputs: list[list[torch.Tensor]] = [[] for _ in group.parts]
    step = max(1, GROUP_ELEMENTS // (group.size * group.keys * (width + sizes.nope + sizes.v)))
    for first in range(0, sizes.heads, step):
        heads = slice(first, min(first + step, sizes.heads))
        k_GHSD, v_GHSD = _keys_and_values(sizes, w, keys_GSE, heads)
        for part, q_GHQD, done in zip(group.parts, queries, outputs, strict=True):
            mask = None if part.causal else part.mask(torch.float32)
            o_GHQD = scaled_dot_product_attention(
                q_GHQD[:, heads],
                k_GHSD[:, :, : part.keys],
                v_GHSD[:, :, : part.keys],
                None if mask is None else mask.unsqueeze(1),
                is_causal=part.causal,
                scale=sizes.scale,
            )
            done.append(o_GHQD[..., -sizes.v :])
    joined = [done[0] if len(done) == 1 else torch.cat(done, 1) for done in outputs]
    return [o_GHQV.transpose(1, 2).reshape(-1, sizes.heads * sizes.v) for o_GHQV in joined]


def _rotated_queries(sizes: Sizes, q: torch.Tensor, part: Part, size: int) -> torch.Tensor:
    """[G, H, Q, N+R]"""
    q_nHD = q[part.rows].float().view(-1, sizes.heads, sizes.nope + sizes.rope)
    q_nHD = torch.cat((q_nHD[..., : sizes.nope], rotate_by(q_nHD[..., sizes.nope :], part.turns)), -1)
    return q_nHD.view(size, part.queries, sizes.heads, -1).transpose(1, 2)


def _keys_and_values(
    sizes: Sizes, w: torch.Tensor, keys_GSE: torch.Tensor, heads: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [G, H, S, N+R] of some heads; a value's last V columns count.

    The fused kernel wants values as wide as keys: they are taken from their place behind k_nope, with its end as
    filling, which costs no copy.
    """
    rows = slice(heads.start * (sizes.nope + sizes.v), heads.stop * (sizes.nope + sizes.v))
    made_GSF = linear(keys_GSE[..., : sizes.latent], w[rows])
    made_GSHF = torch.unflatten(made_GSF, -1, (-1, sizes.nope + sizes.v))
    shared_GSHR = keys_GSE[:, :, None, sizes.latent :].expand(-1, -1, made_GSHF.shape[2], -1)
    k_GSHD = torch.cat((made_GSHF[..., : sizes.nope], shared_GSHR), -1)
    spare = sizes.v - sizes.rope
    v_GSHD = made_GSHF[..., spare:] if spare >= 0 else pad(made_GSHF, (-spare, 0))
    return k_GSHD.transpose(1, 2), v_GSHD.transpose(1, 2)
