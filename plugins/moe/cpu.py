"""Moe on CPUs: tokens sorted by expert, two products for each expert that has any.

Legend: T tokens, K experts per token, P their pairs, E experts, D hidden, F intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from dsc.plugins.cpu_linear import Product, can_join, join_rows, make_product
from dsc.plugins.cpu_node import CpuNode, Run, StepMemo
from dsc.plugins.stored import StoredWeight
from dsc.plugins.swiglu.cpu import swiglu


def bind(node: CpuNode) -> Run:
    """Gate and up of an expert are one product, packed once for all graphs."""
    dtype = getattr(torch, node.types["x"].dtype)
    gate_up, down = _bind_mlps(node, ("gate", "up", "down"), dtype)
    edges = torch.arange(len(down) + 1, dtype=torch.int32)
    shared: tuple[Product, Product] | None = None
    if "shared_gate" in node.weights:
        (shared_gate_up,), (shared_down,) = _bind_mlps(node, ("shared_gate", "shared_up", "shared_down"), dtype)
        shared = shared_gate_up, shared_down

    def run(step: StepMemo, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = _one_token(x, ids, weights) if len(x) == 1 else _many_tokens(x, ids, weights)
        if shared is not None:
            y += shared[1](swiglu(shared[0](x)))
        return (y.to(dtype),)

    def _one_token(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [1, D] without sorting or gathering."""
        (experts,) = ids.tolist()
        if not experts or experts[0] < 0:
            return x.new_zeros(x.shape, dtype=torch.float32)
        prepared = gate_up[0].prepare(x)
        hidden_KF = swiglu(torch.cat([gate_up[expert].multiply(prepared) for expert in experts]))
        rows = down[0].prepare(hidden_KF).chunk(len(experts))
        out_KD = torch.cat([down[expert].multiply(row) for expert, row in zip(experts, rows, strict=True)])
        return torch.mm(weights, out_KD.float())

    def _many_tokens(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [T, D]. Pairs of an expert are rows that follow each other; those with id -1 come first and drop out."""
        y = x.new_zeros(x.shape, dtype=torch.float32)
        sorted_P, order_P = ids.flatten().sort(stable=True)
        starts = torch.searchsorted(sorted_P, edges).tolist()
        hit = [(expert, end - start) for expert, (start, end) in enumerate(pairwise(starts)) if end > start]
        if not hit:
            return y
        order_P = order_P[starts[0] :]
        sizes = [size for _, size in hit]
        tokens_P = order_P // ids.shape[1]
        rows = gate_up[0].prepare(x).index_select(0, tokens_P).split_with_sizes(sizes)
        hidden = torch.cat([gate_up[expert].multiply(part) for (expert, _), part in zip(hit, rows, strict=True)])
        rows = down[0].prepare(swiglu(hidden)).split_with_sizes(sizes)
        out_PD = torch.cat([down[expert].multiply(part) for (expert, _), part in zip(hit, rows, strict=True)]).float()
        weights_P = weights.flatten().index_select(0, order_P)
        return y.index_add_(0, tokens_P, out_PD.mul_(weights_P.unsqueeze(1)))

    return run


def _bind_mlps(node: CpuNode, names: tuple[str, str, str], dtype: torch.dtype) -> tuple[list[Product], list[Product]]:
    """Per expert the product with gate and up, and the one with down.

    Between fp8 products values stay float32: a rounding to bfloat16 first would tip others of the coarse fp8 roundings.
    """
    if all(node.weights[name].format.kind == "fp8" for name in names):
        dtype = torch.float32
    gate, up, down = names
    return node.pack((gate, up), pack_experts, dtype), node.pack(down, pack_experts, dtype)


@dataclass(frozen=True, eq=False)
class Beside(Product):
    """Products of one input whose weights cannot be one: their outputs side by side."""

    parts: tuple[Product, ...]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def pack_experts(*arguments: StoredWeight | torch.dtype) -> list[Product]:
    """For `CpuNode.pack`: weights [E, N, K] or [N, K], then the activations' dtype -> per expert the product with the
    rows of all of them.
    """
    *stored, dtype = arguments
    assert isinstance(dtype, torch.dtype), dtype
    weights = [w for w in stored if isinstance(w, StoredWeight)]
    if len(weights[0].shape) == 2:
        return [_beside(weights, dtype)]
    return [_beside([w[expert] for w in weights], dtype) for expert in range(weights[0].shape[0])]


def _beside(weights: list[StoredWeight], dtype: torch.dtype) -> Product:
    if can_join(weights):
        return make_product(join_rows(weights), dtype)
    return Beside(tuple(make_product(w, dtype) for w in weights))
