"""Qkv on CPUs: one product, norms and rope on its slices, one write into the cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from dsc.plugins.cpu_linear import Product, bind_product, can_join
from dsc.plugins.cpu_node import CASTS, CpuNode, Run, StepMemo
from dsc.plugins.latent_cache import cache_rows
from dsc.plugins.norm import Norm
from dsc.plugins.rope import step_turns
from dsc.plugins.stored import given_codes


class Written(NamedTuple):
    """Where a step's tokens go: cache rows, and the rows of the step they come from (None: all, in order)."""

    slots: torch.Tensor
    rows: torch.Tensor | None


def bind(node: CpuNode) -> Run:
    """The projections as one product where their formats allow it."""
    a = node.attributes
    q_width, latent, rope, cache_dtype = int(a["q_width"]), int(a["latent"]), int(a["rope"]), str(a["cache_dtype"])
    products = _bind_products(node)
    q_norm = Norm(node.constants["q_norm"], float(a["epsilon"])) if "q_norm" in node.constants else None
    kv_norm = Norm(node.constants["kv_norm"], float(a["epsilon"]))
    cast = CASTS[node.types["x"].dtype]
    cos, sin = node.constants["cos"], node.constants["sin"]

    def run(step: StepMemo, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions, slots, cache, codes, scales = others[-5:]  # an absent q_norm comes before them
        parts = [product(x, given_codes(codes, scales)) for product in products]
        made = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        exact = made.float().numpy()  # of this call's own memory
        if q_norm is not None:
            q_norm.rows(exact[:, :q_width], exact[:, :q_width])
        wide = exact[:, q_width : q_width + latent]
        kv_norm.rows(wide, wide)
        keys = exact[:, q_width + latent :].view(np.complex64)
        np.multiply(keys, step.once("turns", lambda: step_turns(step, cos, sin, positions).numpy()), keys)
        rows = cache_rows(cache, cache_dtype, latent + rope)
        rounded = cast(torch.from_numpy(exact))
        q, latents, turned = rounded.split_with_sizes((q_width, latent, rope), -1)
        stored = rounded if rows.dtype is rounded.dtype else torch.from_numpy(exact)
        stored = stored.narrow(1, q_width, latent + rope).to(rows.dtype)
        written = step.once("cache slots", lambda: _written(slots))
        rows.index_copy_(0, written.slots, stored if written.rows is None else stored[written.rows])
        return q, latents, turned, cache

    return run


def _bind_products(node: CpuNode) -> list[Product]:
    dtype = getattr(torch, node.types["x"].dtype)
    names = tuple(name for name in ("w", "w_kv") if name in node.weights)
    if can_join([node.weights[name] for name in names]):
        return [bind_product(node, names, dtype)]
    return [bind_product(node, name, dtype) for name in names]


def _written(slots: torch.Tensor) -> Written:
    wide = slots.long()
    if not len(wide) or int(wide.min()) >= 0:
        return Written(wide, None)
    rows = (wide >= 0).nonzero().flatten()
    return Written(wide[rows], rows)
