"""Qkv on GPUs: the projections as Linear multiplies, then one launch for norms, rope and the append to the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.plugins.linear.kernel import multiply
from dsc.plugins.triton_rope import rotate_rows
from dsc.runtime.errors import DscError
from dsc.runtime.expressions import parse_guard
from dsc.runtime.steps import Kernel, Step, Variant

COPY_BLOCK = 1024


@triton.jit
def qkv_rows(
    projected, projected_kv, q_norm, kv_norm, cos, sin, positions, slots, q, latent, k_rope, cache, epsilon,
    Q_WIDTH: tl.constexpr, PITCH: tl.constexpr, KV_PITCH: tl.constexpr, KV_FIRST: tl.constexpr, LATENT: tl.constexpr,
    ROPE: tl.constexpr, Q_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's row: program (t, 0) the latent and the key, into `latent`, `k_rope` and the cache; (t, 1) the queries.

    Rows of projected [T, PITCH] begin with q; those of projected_kv [T, KV_PITCH] hold the latent and then the key from
    column KV_FIRST on. q_norm None: q as it is.
    """
    t = tl.program_id(0)
    wide = t.to(tl.int64)
    if tl.program_id(1) == 0:
        columns, ropes = tl.arange(0, LATENT), tl.arange(0, ROPE)
        scale = tl.load(kv_norm + columns).to(tl.float32)
        if PDL:
            tl.extra.cuda.gdc_wait()
        values = tl.load(projected_kv + wide * KV_PITCH + KV_FIRST + columns).to(tl.float32)
        keys = tl.load(projected_kv + wide * KV_PITCH + KV_FIRST + LATENT + ropes[None, :]).to(tl.float32)
        slot = tl.load(slots + t)
        position = tl.load(positions + t + tl.arange(0, 1))
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        values = values * tl.math.rsqrt(tl.sum(values * values, 0) / LATENT + epsilon) * scale
        keys = rotate_rows(keys, cos, sin, position, position >= 0, ROPE)
        tl.store(latent + wide * LATENT + columns, values.to(latent.dtype.element_ty))
        tl.store(k_rope + wide * ROPE + ropes[None, :], keys.to(k_rope.dtype.element_ty))
        if slot >= 0:
            row = cache + slot.to(tl.int64) * (LATENT + ROPE)
            tl.store(row + columns, values.to(cache.dtype.element_ty))
            tl.store(row + LATENT + ropes[None, :], keys.to(cache.dtype.element_ty))
    else:
        columns = tl.arange(0, Q_BLOCK)
        if q_norm is not None:
            scale = tl.load(q_norm + columns, columns < Q_WIDTH, 0.0).to(tl.float32)
            if PDL:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            values = tl.load(projected + wide * PITCH + columns, columns < Q_WIDTH, 0.0).to(tl.float32)
            values = values * tl.math.rsqrt(tl.sum(values * values, 0) / Q_WIDTH + epsilon) * scale
            tl.store(q + wide * Q_WIDTH + columns, values.to(q.dtype.element_ty), columns < Q_WIDTH)
        else:
            if PDL:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            for c in range(0, Q_WIDTH, Q_BLOCK):
                at = c + columns
                values = tl.load(projected + wide * PITCH + at, at < Q_WIDTH, 0.0)
                tl.store(q + wide * Q_WIDTH + at, values, at < Q_WIDTH)


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


def _most(variant: Variant) -> int | None:
    """The bound of a guard `T <= n`; None where there is none."""
    comparisons = parse_guard(variant.guard).comparisons
    assert len(comparisons) <= 1, variant.guard
    return int(str(comparisons[0][2])) if comparisons else None


def _both(first: tuple[Variant, ...], second: tuple[Variant, ...]) -> list[Variant]:
    """Variants whose steps are those of both, in order; guards of both are upper bounds of T."""
    bounds = {_most(variant) for variant in (*first, *second)}
    ordered: list[int | None] = [*sorted(bound for bound in bounds if bound is not None), None]

    def steps(variants: tuple[Variant, ...], bound: int | None) -> tuple[Step, ...]:
        found = (v for v in variants if (most := _most(v)) is None or (bound is not None and bound <= most))
        return next(found).steps

    return [
        Variant((*steps(first, bound), *steps(second, bound)), "" if bound is None else f"T <= {bound}")
        for bound in ordered
    ]


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
        num_warps=4,
        pdl=True,
    )
