"""Moe on CPUs: two products for each expert, gate and up being one, on its tokens side by side.

Legend: T tokens, K experts per token, P their pairs, E experts, D hidden, F intermediate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from dsc.plugins.cpu_linear import MANY, Product, can_join, join_rows, make_product
from dsc.plugins.cpu_node import CASTS, CpuNode, Run, StepMemo
from dsc.plugins.stored import Quantized, StoredWeight, given_codes
from dsc.plugins.swiglu.cpu import swiglu


def bind(node: CpuNode) -> Run:
    """Weights are packed expert by expert, once for all graphs. A shared expert as wide as the others is one of them,
    chosen by every token with weight 1.
    """
    dtype, cast = getattr(torch, node.types["x"].dtype), CASTS[node.types["x"].dtype]
    routed = _bind_mlps(node, ("gate", "up", "down"), dtype)
    if "shared_gate" not in node.weights:
        experts = Experts(*routed)
        return lambda step, x, ids, weights, *codes: (cast(experts(x, ids, weights, given_codes(*codes))),)
    shared = _bind_mlps(node, ("shared_gate", "shared_up", "shared_down"), dtype)
    if _alike(node):
        together = Experts(routed[0] + shared[0], routed[1] + shared[1], last_for_all=True)
        return lambda step, x, ids, weights, *codes: (cast(together(x, ids, weights, given_codes(*codes))),)
    experts, beside = Experts(*routed), Experts(*shared)

    def run(
        step: StepMemo, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *codes: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        quantized = given_codes(*codes)
        return (cast(experts(x, ids, weights, quantized).add_(beside.first(x, quantized))),)

    return run


def _alike(node: CpuNode) -> bool:
    """Whether the shared expert is as wide as the others, and its weights of their formats."""
    pairs = [(node.weights[name], node.weights[f"shared_{name}"]) for name in ("gate", "up", "down")]
    return all(one.format == two.format and one.shape[-2:] == two.shape for one, two in pairs)


class Experts:
    """MLPs of one shape, chosen per token. `gate_up` and `down` hold one product for each.

    last_for_all  every token also gets the last one, with weight 1
    """

    def __init__(self, gate_up: list[Product], down: list[Product], last_for_all: bool = False) -> None:
        self._gate_up, self._down = gate_up, down
        self._last_for_all = last_for_all
        self._edges = np.arange(len(down) + 1)

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, quantized: Quantized | None = None
    ) -> torch.Tensor:
        """float32 [T, D]: the weighted sum of each token's experts; an id of -1 adds nothing."""
        prepared = self._gate_up[0].prepare(x, quantized)
        tokens, chosen = ids.shape
        ids_TK, weights_TK = ids.numpy(), weights.numpy()
        if self._last_for_all:
            ids_TK = np.concatenate((ids_TK, np.full((tokens, 1), len(self._down) - 1, np.int32)), 1)
            weights_TK = np.concatenate((weights_TK, np.ones((tokens, 1), np.float32)), 1)
        if tokens * chosen >= len(self._down):
            return self._by_expert(prepared, ids_TK, weights_TK)
        experts = ids_TK.ravel().tolist()
        # Sorting deals with padding and with pairs of other ranks.
        few = -1 not in experts and experts
        return self._by_token(prepared, experts, weights_TK) if few else self._by_expert(prepared, ids_TK, weights_TK)

    def first(self, x: torch.Tensor, quantized: Quantized | None = None) -> torch.Tensor:
        """The first MLP alone, [T, D]."""
        return self._down[0](swiglu(self._gate_up[0](x, quantized)))

    def _by_token(self, prepared: torch.Tensor, experts: list[int], weights_TK: NDArray[np.float32]) -> torch.Tensor:
        """Pair by pair, without sorting and gathering: while few tokens share an expert, it has little to gain."""
        tokens, chosen = weights_TK.shape
        rows = (
            [prepared] * chosen
            if tokens == 1
            else [row for row in prepared.unsqueeze(1).unbind(0) for _ in range(chosen)]
        )
        hidden_PF = swiglu(_apply(self._gate_up, experts, rows))
        out_PD = _apply(self._down, experts, self._down[0].prepare(hidden_PF).unsqueeze(1).unbind(0)).float().numpy()
        return torch.from_numpy(np.matmul(weights_TK[:, None], out_PD.reshape(tokens, chosen, -1))[:, 0])

    def _by_expert(
        self, prepared: torch.Tensor, ids_TK: NDArray[np.int32], weights_TK: NDArray[np.float32]
    ) -> torch.Tensor:
        """Pairs sorted by expert, so that those of one are rows that follow each other; ids of -1 come first, and go."""
        y = prepared.new_zeros(prepared.shape, dtype=torch.float32)
        ids_P = ids_TK.ravel()
        order_P = ids_P.argsort(kind="stable")
        starts = ids_P[order_P].searchsorted(self._edges).tolist()
        hit = [expert for expert, (start, end) in enumerate(pairwise(starts)) if end > start]
        if not hit:
            return y
        sizes = [starts[expert + 1] - starts[expert] for expert in hit]
        order_P = order_P[starts[0] :]
        tokens_P = torch.from_numpy(order_P // ids_TK.shape[1])
        weights_P1 = torch.from_numpy(weights_TK.ravel()[order_P]).unsqueeze(1)
        if len(order_P) >= MANY * len(hit):
            parts = zip(hit, tokens_P.split_with_sizes(sizes), weights_P1.split_with_sizes(sizes), strict=True)
            return self._add_wide(y, prepared.float(), parts)
        hidden_PF = swiglu(_apply(self._gate_up, hit, prepared.index_select(0, tokens_P).split_with_sizes(sizes)))
        out_PD = _apply(self._down, hit, self._down[0].prepare(hidden_PF).split_with_sizes(sizes)).float()
        return y.index_add_(0, tokens_P, out_PD.mul_(weights_P1))

    def _add_wide(
        self, y: torch.Tensor, prepared: torch.Tensor, parts: Iterable[tuple[int, torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Expert by expert in float32, so that no intermediate outgrows the cache. Parts: expert, tokens, weights."""
        for expert, tokens_P, weights_P1 in parts:
            gate_up, down = self._gate_up[expert], self._down[expert]
            hidden_PF = swiglu(gate_up.multiply_wide(prepared.index_select(0, tokens_P)))
            out_PD = down.multiply_wide(down.prepare(hidden_PF).float())
            y.index_add_(0, tokens_P, out_PD.mul_(weights_P1))
        return y


def _apply(products: list[Product], chosen: list[int], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each part through its product, one after the other."""
    return torch.cat([products[i].multiply(part) for i, part in zip(chosen, parts, strict=True)])


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

    def multiply_wide(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.multiply_wide(part.prepare(x)) for part in self.parts], -1)


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
