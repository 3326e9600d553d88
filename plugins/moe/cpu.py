"""Moe on CPUs: two products for each expert, gate and up being one, on its tokens side by side.

Legend: T tokens, K experts per token, P their pairs, E experts, D hidden, F intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from dsc.plugins.cpu_linear import MANY, Product, can_join, join_rows, make_product
from dsc.plugins.cpu_node import CASTS, CpuNode, Run, StepMemo
from dsc.plugins.stored import StoredWeight
from dsc.plugins.swiglu.cpu import swiglu


def bind(node: CpuNode) -> Run:
    """Weights are packed expert by expert, once for all graphs."""
    dtype, cast = getattr(torch, node.types["x"].dtype), CASTS[node.types["x"].dtype]
    experts = Experts(*_bind_mlps(node, ("gate", "up", "down"), dtype))
    shared: Callable[[torch.Tensor], torch.Tensor] | None = None
    if "shared_gate" in node.weights:
        shared = Experts(*_bind_mlps(node, ("shared_gate", "shared_up", "shared_down"), dtype)).first

    def run(step: StepMemo, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = experts(x, ids, weights)
        if shared is not None:
            y += shared(x)
        return (cast(y),)

    return run


class Experts:
    """MLPs of one shape, chosen per token. `gate_up` and `down` hold one product for each."""

    def __init__(self, gate_up: list[Product], down: list[Product]) -> None:
        self._gate_up, self._down = gate_up, down
        self._edges = torch.arange(len(down) + 1, dtype=torch.int32)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [T, D]: the weighted sum of each token's experts; an id of -1 adds nothing."""
        tokens, chosen = ids.shape
        if tokens * chosen >= len(self._down):
            return self._by_expert(x, ids, weights)
        experts = ids.flatten().tolist()
        # Padding is rare where tokens are few; sorting deals with it.
        return self._by_expert(x, ids, weights) if -1 in experts else self._by_token(x, experts, weights)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """The first MLP alone, [T, D]."""
        return self._down[0](swiglu(self._gate_up[0](x)))

    def _by_token(self, x: torch.Tensor, experts: list[int], weights: torch.Tensor) -> torch.Tensor:
        """Pair by pair, without sorting and gathering: while few tokens share an expert, it has little to gain."""
        tokens, chosen = weights.shape
        if not experts:
            return x.new_zeros(x.shape, dtype=torch.float32)
        rows = [row for row in self._gate_up[0].prepare(x).chunk(tokens) for _ in range(chosen)]
        hidden_PF = swiglu(_apply(self._gate_up, experts, rows))
        parts = self._down[0].prepare(hidden_PF).split_with_sizes([1] * len(experts))
        out_PD = _apply(self._down, experts, parts).float()
        return torch.bmm(weights.unsqueeze(1), out_PD.view(tokens, chosen, x.shape[1])).squeeze(1)

    def _by_expert(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Pairs sorted by expert, so that those of one are rows that follow each other; ids of -1 come first, and go."""
        y = x.new_zeros(x.shape, dtype=torch.float32)
        sorted_P, order_P = ids.flatten().sort(stable=True)
        starts = torch.searchsorted(sorted_P, self._edges).tolist()
        hit = [expert for expert, (start, end) in enumerate(pairwise(starts)) if end > start]
        if not hit:
            return y
        sizes = [starts[expert + 1] - starts[expert] for expert in hit]
        order_P = order_P[starts[0] :]
        tokens_P = order_P // ids.shape[1]
        weights_P1 = weights.flatten().index_select(0, order_P).unsqueeze(1)
        prepared = self._gate_up[0].prepare(x)
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
