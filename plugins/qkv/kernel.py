"""Qkv on GPUs: the projections as Linear multiplies, then one launch for norms, rope and the append to the cache."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.plugins.linear.kernel import multiply
from dsc.plugins.triton_rope import rotate_rows
from dsc.runtime.errors import DscError
from dsc.runtime.steps import Kernel, Variant

COPY_BLOCK = 1024
NO_BOUND = 1 << 62


@triton.jit
def _key_row(
    t, projected, kv_norm, cos, sin, positions, slots, latent, k_rope, cache, epsilon, PITCH: tl.constexpr,
    FIRST: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Latent and key of token t, to their outputs and to the cache."""
    columns, ropes = tl.arange(0, LATENT), tl.arange(0, ROPE)[None, :]
    scale = tl.load(kv_norm + columns).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    wide = t.to(tl.int64)
    values = tl.load(projected + wide * PITCH + FIRST + columns).to(tl.float32)
    keys = tl.load(projected + wide * PITCH + FIRST + LATENT + ropes).to(tl.float32)
    slot = tl.load(slots + t)
    position = tl.load(positions + t + tl.arange(0, 1))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    values = values * tl.math.rsqrt(tl.sum(values * values, 0) / LATENT + epsilon) * scale
    keys = rotate_rows(keys, cos, sin, position, position >= 0, ROPE)
    tl.store(latent + wide * LATENT + columns, values.to(latent.dtype.element_ty))
    tl.store(k_rope + wide * ROPE + ropes, keys.to(k_rope.dtype.element_ty))
    if slot >= 0:
        row = cache + slot.to(tl.int64) * (LATENT + ROPE)
        tl.store(row + columns, values.to(cache.dtype.element_ty))
        tl.store(row + LATENT + ropes, keys.to(cache.dtype.element_ty))


@triton.jit
def _query_row(
    t, projected, q_norm, q, epsilon, WIDTH: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """q of token t, normed, or copied where there is no q_norm."""
    columns = tl.arange(0, BLOCK)
    wide = t.to(tl.int64)
    if q_norm is None:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        for first in range(0, WIDTH, BLOCK):
            inside = first + columns < WIDTH
            copied = tl.load(projected + wide * PITCH + first + columns, inside, 0.0)
            tl.store(q + wide * WIDTH + first + columns, copied, inside)
    else:
        inside = columns < WIDTH
        scale = tl.load(q_norm + columns, inside, 0.0).to(tl.float32)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        values = tl.load(projected + wide * PITCH + columns, inside, 0.0).to(tl.float32)
        values = values * tl.math.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon) * scale
        tl.store(q + wide * WIDTH + columns, values.to(q.dtype.element_ty), inside)


@triton.jit
def qkv_rows(
    projected, projected_kv, q_norm, kv_norm, cos, sin, positions, slots, q, latent, k_rope, cache, epsilon,
    Q_WIDTH: tl.constexpr, PITCH: tl.constexpr, KV_PITCH: tl.constexpr, KV_FIRST: tl.constexpr, LATENT: tl.constexpr,
    ROPE: tl.constexpr, Q_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finish a token's row: program (t, 0) the latent and the key, (t, 1) the queries.

    Rows of projected [T, PITCH] begin with q; those of projected_kv [T, KV_PITCH] hold the latent and then the key from
    column KV_FIRST on.
    """
    if tl.program_id(1) == 0:
        _key_row(
            tl.program_id(0), projected_kv, kv_norm, cos, sin, positions, slots, latent, k_rope, cache, epsilon, KV_PITCH,
            KV_FIRST, LATENT, ROPE, PDL,
        )  # fmt: skip
    else:
        _query_row(tl.program_id(0), projected, q_norm, q, epsilon, Q_WIDTH, PITCH, Q_BLOCK, PDL)


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """The projections' variants, each with the launch that finishes the rows."""
    q_width, latent, rope = (int(node.attributes[name]) for name in ("q_width", "latent", "rope"))
    for name, value in (("latent", latent), ("rope", rope)):
        if value & (value - 1):
            raise DscError(f"{node.name}: {name} {value} has no kernel", wanted="a power of two")
    dtype = node.at("x").dtype
    if node.attributes["joint"]:
        pitch = q_width + latent + rope
        projected = node.add_scratch("projected", dtype, ("T", pitch))
        last = _rows(node, projected, pitch, projected, pitch)
        return tuple(Variant((*v.steps, last), v.guard) for v in multiply(node, "x", "w", _name(projected)))
    kv = node.add_scratch("projected_kv", dtype, ("T", latent + rope))
    raw = not node.attributes["q_lora"]  # then the projection is the output
    q = node.at("q") if raw else node.add_scratch("projected", dtype, ("T", q_width))
    last = _rows(node, None if raw else q, q_width, kv, latent + rope)
    first, second = multiply(node, "x", "w", _name(q)), multiply(node, "x", "w_kv", _name(kv))
    return tuple(Variant((*v.steps, last), v.guard) for v in _both(first, second))


def _name(typed: Typed) -> str:
    return typed.pointer.operand


def _both(first: tuple[Variant, ...], second: tuple[Variant, ...]) -> list[Variant]:
    """Variants whose steps are those of both, in order. A guard of either is an upper bound of T, or says something else."""
    made: dict[frozenset[str], Variant] = {}
    for few, more, one in _served(first):
        for fewest, most, other in _served(second):
            bound = min(more, most)
            parts = [f"T <= {bound}"] if bound < NO_BOUND else []
            parts += dict.fromkeys(v.guard for v in (one, other) if v.guard and _bound(v) is None)
            if max(few, fewest) < bound and not any(before <= set(parts) for before in made):
                made[frozenset(parts)] = Variant((*one.steps, *other.steps), " and ".join(parts))
    return list(made.values())


def _served(variants: tuple[Variant, ...]) -> Iterator[tuple[int, int, Variant]]:
    """Every variant, with the tokens that it serves more than and at most."""
    few = 0
    for variant in variants:
        bound = _bound(variant)
        yield few, NO_BOUND if bound is None else bound, variant
        few = few if bound is None else bound


def _bound(variant: Variant) -> int | None:
    """n of a guard `T <= n`; None of others."""
    left, _, right = variant.guard.partition(" <= ")
    return int(right) if left == "T" else None


def _rows(node: GpuNode, projected: Typed | None, pitch: int, kv: Typed, kv_pitch: int) -> Kernel:
    """The launch of `qkv_rows`; projected None: q is written already."""
    attributes = node.attributes
    q_width, normed = int(attributes["q_width"]), node.has("q_norm")
    return node.triton(
        qkv_rows,
        ("T", 1 if projected is None else 2),
        {
            "projected": projected or kv,
            "projected_kv": kv,
            "q_norm": node.maybe("q_norm"),
            **{
                name: node.at(name) for name in ("kv_norm", "cos", "sin", "positions", "slots", "q", "latent", "k_rope")
            },
            "cache": node.at("cache", dtype=str(attributes["cache_dtype"])),
            "epsilon": float(attributes["epsilon"]),
            "Q_WIDTH": q_width,
            "PITCH": pitch,
            "KV_PITCH": kv_pitch,
            "KV_FIRST": q_width if kv is projected else 0,
            "LATENT": int(attributes["latent"]),
            "ROPE": int(attributes["rope"]),
            "Q_BLOCK": triton.next_power_of_2(q_width) if normed else COPY_BLOCK,
            "PDL": node.arch.has_pdl,
        },
        num_warps=8,
        pdl=True,
    )
