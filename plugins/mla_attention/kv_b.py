"""kv_b on CPUs: W_UK and W_UV of each head, which absorbed attention moves to the query and to the sum.

Legend: n queries, H heads, N nope, V value, L latent. benchmarks/NOTES.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear

from dsc.plugins.cpu_node import CpuNode, StepMemo
from dsc.plugins.stored import StoredWeight

FEW = 8  # queries for which torch's int8 kernel, head by head, beats making the codes float32


@dataclass(frozen=True, eq=False)
class KvB:
    """kv_b as it is stored [H*(N+V), L], made float32 where it is used, to be in the processor's cache then."""

    w: StoredWeight
    heads: int
    nope: int
    v: int

    def whole(self) -> torch.Tensor:
        """float32 [H*(N+V), L]"""
        return self.w.dequantize()

    def to_latents(self, step: StepMemo, q_nHN: NDArray[np.float32]) -> torch.Tensor:
        """q_h W_UK,h of every head: float32 [n, H, L]."""
        latents = _by_head(step, torch.from_numpy(q_nHN).unbind(1), self._halves()[0].mT.unbind(0))
        return latents.view(len(q_nHN), self.heads, -1)

    def sums_dtype(self, count: int) -> torch.dtype:
        """The dtype that `to_values` wants for `count` queries."""
        return torch.float32

    def to_values(self, step: StepMemo, sums_HnL: torch.Tensor) -> torch.Tensor:
        """W_UV,h o_h of every head: [n, H*V]."""
        return _by_head(step, sums_HnL.unbind(0), self._halves()[1].unbind(0))

    def _halves(self) -> tuple[torch.Tensor, ...]:
        """[H, N, L] and [H, V, L]"""
        w = self.w.data if self.w.scales is None else self.w.dequantize()
        return w.view(self.heads, self.nope + self.v, -1).split_with_sizes((self.nope, self.v), 1)


@dataclass(frozen=True, eq=False)
class Int8KvB:
    """kv_b of wint8 under bfloat16 activations, a tensor for each head. The scales of W_UK's rows go to the query.

    keys          int8 [L, N]: transposed, as torch's kernel wants it; ones bfloat16 [L], its scales
    values        int8 [V, L]
    key_scales    float32 [H, 1, N]
    value_scales  bfloat16 [V]
    """

    keys: tuple[torch.Tensor, ...]
    key_scales: torch.Tensor
    ones: torch.Tensor
    values: tuple[torch.Tensor, ...]
    value_scales: tuple[torch.Tensor, ...]

    def whole(self) -> torch.Tensor:
        """float32 [H*(N+V), L]"""
        parts = zip(self.keys, self.key_scales, self.values, self.value_scales, strict=True)
        return torch.cat([half for k, ks, v, vs in parts for half in (k.mT.float() * ks.mT, v.float() * vs[:, None])])

    def to_latents(self, step: StepMemo, q_nHN: NDArray[np.float32]) -> torch.Tensor:
        """q_h W_UK,h of every head: [n, H, L]."""
        count, heads, _ = q_nHN.shape
        q_HnN = torch.from_numpy(np.multiply(q_nHN.swapaxes(0, 1), self._key_scales, order="C"))
        if count > FEW:
            return _by_head(step, q_HnN.unbind(0), self.keys).view(count, heads, -1)
        parts = zip(q_HnN.bfloat16().unbind(0), self.keys, strict=True)
        return torch.cat([torch._weight_int8pack_mm(q, k, self.ones) for q, k in parts], 1).view(count, heads, -1)

    def sums_dtype(self, count: int) -> torch.dtype:
        """The dtype that `to_values` wants for `count` queries."""
        return torch.float32 if count > FEW else torch.bfloat16

    def to_values(self, step: StepMemo, sums_HnL: torch.Tensor) -> torch.Tensor:
        """W_UV,h o_h of every head: [n, H*V]."""
        if sums_HnL.dtype is torch.float32:
            return _by_head(step, sums_HnL.unbind(0), self.values).mul_(torch.cat(self.value_scales))
        parts = zip(sums_HnL.unbind(0), self.values, self.value_scales, strict=True)
        return torch.cat([torch._weight_int8pack_mm(*part) for part in parts], 1)

    @cached_property
    def _key_scales(self) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self.key_scales.numpy()
        return array


def bind_kv_b(node: CpuNode, heads: int, nope: int, v: int) -> KvB | Int8KvB:
    """The node's kv_b, packed once for both modes."""
    return node.pack("kv_b", pack_kv_b, heads, nope, v, node.types["q"].dtype == "bfloat16")


def pack_kv_b(w: StoredWeight, heads: int, nope: int, v: int, int8: bool) -> KvB | Int8KvB:
    """For `CpuNode.pack`. int8: whether wint8 is to be multiplied in torch's int8 kernel."""
    latent = w.shape[1]
    # The kernel reads beyond other widths.
    if w.scales is None or w.format.kind != "wint8" or not int8 or nope % 32 or latent % 32:
        return KvB(w, heads, nope, v)
    codes_HFL, scales_HF = w.data.view(heads, nope + v, latent), w.scales.view(heads, nope + v)
    return Int8KvB(
        keys=codes_HFL[:, :nope].mT.contiguous().unbind(0),
        key_scales=scales_HF[:, None, :nope].float(),
        ones=torch.ones(latent, dtype=torch.bfloat16),
        values=codes_HFL[:, nope:].contiguous().unbind(0),
        value_scales=scales_HF[:, nope:].bfloat16().contiguous().unbind(0),
    )


def _by_head(step: StepMemo, x: Sequence[torch.Tensor], w: Sequence[torch.Tensor]) -> torch.Tensor:
    """x_h W_h^T side by side, float32 [n, H*N], of the heads' x [n, K] and w [N, K].

    One head's weight is made float32 at a time, in memory that all of a step's layers share: it never leaves the
    second-level cache.
    """
    heads = zip(x, w, strict=True)
    if w[0].dtype is torch.float32:
        return torch.cat([linear(x_nK, w_NK) for x_nK, w_NK in heads], 1)
    room = step.once(("kv_b", w[0].stride(), w[0].shape), lambda: torch.empty_like(w[0], dtype=torch.float32))
    return torch.cat([linear(x_nK, room.copy_(w_NK)) for x_nK, w_NK in heads], 1)
