"""Products x W^T on CPUs: one kernel per storage format, each keeping its weight once, in the machine's own packing.

Legend: T tokens, N rows, K columns of a weight, G columns that share a scale. benchmarks/cpu_ops.py measures the choices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from dsc.plugins.cpu_node import CpuNode
from dsc.plugins.stored import FP8_BLOCK, Quantized, StoredWeight, multiplied, unpack_nibbles

# From so many tokens on, making the weight float32 and torch's float32 product beat the packed kernels.
MANY = 48
INT4_ROWS = 64  # rows that torch's int4 packing interleaves on machines with AVX-512
# Tensors, since torch converts Python numbers anew in each call.
_FIFTEEN, _FOUR = torch.tensor(15, dtype=torch.uint8), torch.tensor(4, dtype=torch.uint8)
_EIGHT = torch.tensor(8, dtype=torch.int8)


class Product:
    """x [T, K] -> x W^T [T, N] in x's dtype, summed in float32. What `prepare` returns may serve several products of x.

    quantized  x as fp8 weights multiply it, where it was made before; only such products look at it
    """

    def __call__(self, x: torch.Tensor, quantized: Quantized | None = None) -> torch.Tensor:
        return self.multiply(self.prepare(x, quantized))

    def prepare(self, x: torch.Tensor, quantized: Quantized | None = None) -> torch.Tensor:
        """What can be computed from x alone, for products of one format."""
        return x

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The product of a prepared x."""
        raise NotImplementedError

    def multiply_wide(self, x: torch.Tensor) -> torch.Tensor:
        """The product of a prepared x in float32, float32: for many tokens, where the weight's conversion is little."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Plain(Product):
    """A weight of the activations' own dtype."""

    w: torch.Tensor

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.w)

    def multiply_wide(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.w.float())


@dataclass(frozen=True, eq=False)
class Blocked(Product):
    """bf16 under bfloat16 activations, in oneDNN's blocked layout, which it would otherwise make for each call."""

    w: torch.Tensor  # opaque to all but oneDNN

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < MANY:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.w, None, "none", [], "")
            return y
        return self.multiply_wide(x.float()).bfloat16()

    def multiply_wide(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.w.to_dense().float())


@dataclass(frozen=True, eq=False)
class Dequantized(Product):
    """Any stored weight, made float32 for each call; under fp8 weights the activations are quantized."""

    w: StoredWeight
    dtype: torch.dtype

    def prepare(self, x: torch.Tensor, quantized: Quantized | None = None) -> torch.Tensor:
        return multiplied(x, self.w.format, quantized)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply_wide(x).to(self.dtype)

    def multiply_wide(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.w.dequantize())


@dataclass(frozen=True, eq=False)
class Int8(Product):
    """wint8, its codes as they are stored."""

    codes: torch.Tensor  # int8 [N, K]
    scales: torch.Tensor  # [N] in the activations' dtype

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < MANY:
            return torch._weight_int8pack_mm(x, self.codes, self.scales)
        return self.multiply_wide(x.float()).to(x.dtype)

    def multiply_wide(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.codes.float()).mul_(self.scales)


@dataclass(frozen=True, eq=False)
class Int4(Product):
    """wint4 under bfloat16 activations, in the packing of torch's int4 kernel.

    scales  bfloat16 [K/G, N, 2]: beside each scale the kernel's zero point, which is 0
    blocks  whether the packing is known to be `unpack_int4`'s
    """

    codes: torch.Tensor  # uint8 [N, K/2] in the machine's order
    scales: torch.Tensor
    group: int
    blocks: bool

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] >= MANY and self.blocks:
            return self.multiply_wide(x.float()).bfloat16()
        return torch._weight_int4pack_mm_for_cpu(x.contiguous(), self.codes, self.group, self._kernel_scales())

    def __call__(self, x: torch.Tensor, quantized: Quantized | None = None) -> torch.Tensor:
        return self.multiply(x)

    def multiply_wide(self, x: torch.Tensor) -> torch.Tensor:
        if not self.blocks:
            return self.multiply(x.bfloat16()).float()
        w_KN = unpack_int4(self.codes).float()
        w_KN.view(-1, self.group, w_KN.shape[1]).mul_(self._scales_by_group().float().unsqueeze(1))
        return torch.mm(x, w_KN)

    def _kernel_scales(self) -> torch.Tensor:
        """[K/G, N, 2]"""
        return self.scales

    def _scales_by_group(self) -> torch.Tensor:
        """[K/G, N]"""
        return self.scales[..., 0]


@dataclass(frozen=True, eq=False)
class Int4Narrow(Int4):
    """The same for groups below 128, where zero points would add over 5 % to the weight: scales [K/G, N] are kept
    without them, and they are added for each call.
    """

    def _kernel_scales(self) -> torch.Tensor:
        return _with_zeros(self.scales)

    def _scales_by_group(self) -> torch.Tensor:
        return self.scales


@dataclass(frozen=True, eq=False)
class Padded(Product):
    """A product whose rows were padded to what its kernel wants."""

    product: Product
    rows: int

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.multiply(x)[:, : self.rows]

    def multiply_wide(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.multiply_wide(x)[:, : self.rows]


def bind_product(node: CpuNode, operands: str | tuple[str, ...], dtype: torch.dtype) -> Product:
    """The product with a weight [N, K] under activations of `dtype`; with several (`can_join`), their rows joined."""
    return node.pack(operands, pack_product, dtype)


def pack_product(*arguments: StoredWeight | torch.dtype) -> Product:
    """For `CpuNode.pack`: weights, then the activations' dtype -> the product with all their rows."""
    *weights, dtype = arguments
    assert isinstance(dtype, torch.dtype), dtype
    return make_product(join_rows([w for w in weights if isinstance(w, StoredWeight)]), dtype)


def can_join(weights: Sequence[StoredWeight]) -> bool:
    """Whether the rows of several weights make one weight: one format, and no fp8 block across two of them."""
    whole = all(w.format.kind != "fp8" or w.shape[-2] % FP8_BLOCK == 0 for w in weights[:-1])
    return whole and len({w.format for w in weights}) == 1


def join_rows(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Weights [..., N, K] for which `can_join` holds -> one with all their rows."""
    if len(weights) == 1:
        return weights[0]
    assert can_join(weights), [str(w.format) for w in weights]
    scales = [w.scales for w in weights if w.scales is not None]
    along = -1 if weights[0].format.kind == "wint8" else -2
    data = torch.cat([w.data for w in weights], -2)
    return StoredWeight(weights[0].format, data, torch.cat(scales, along) if scales else None)


def make_product(w: StoredWeight, dtype: torch.dtype) -> Product:
    """The product with one weight [N, K] under activations of `dtype`."""
    rows, columns = w.shape
    if w.scales is None:
        if w.data.dtype is not dtype:
            return Dequantized(w, dtype)
        blocked = dtype is torch.bfloat16 and _has_onednn_bf16()
        return Blocked(torch.ops.mkldnn._reorder_linear_weight.default(w.data)) if blocked else Plain(w.data)
    if w.format.kind == "wint8" and columns % 32 == 0:  # torch's kernel reads beyond other widths
        return Int8(w.data, w.scales.to(dtype))
    if w.format.kind == "wint4" and dtype is torch.bfloat16:
        missing = -rows % 16
        if not missing:
            return _make_int4(w, w.scales)
        scales = pad(w.scales, (0, 0, 0, missing))
        return Padded(_make_int4(StoredWeight(w.format, pad(w.data, (0, 0, 0, missing)), scales), scales), rows)
    return Dequantized(w, dtype)


def _make_int4(w: StoredWeight, scales: torch.Tensor) -> Int4:
    codes = torch._convert_weight_to_int4pack_for_cpu(unpack_nibbles(w.data).int() + 8, 1)  # the kernel subtracts 8
    by_group = scales.mT.contiguous()
    blocks = len(codes) % INT4_ROWS == 0 and _packs_in_blocks()
    if w.format.group < 128:
        return Int4Narrow(codes, by_group, w.format.group, blocks)
    return Int4(codes, _with_zeros(by_group), w.format.group, blocks)


def _with_zeros(scales: torch.Tensor) -> torch.Tensor:
    return torch.stack((scales, torch.zeros_like(scales)), -1)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Weights as torch packs them with AVX-512, uint8 [N, K/2] -> int8 -8..7, [K, N].

    64 rows are a block of [K, 32] bytes: the low nibble of byte i is row i's, the high one row i + 32's; 8 is added.
    """
    rows, half = packed.shape
    bytes_ = packed.view(rows // INT4_ROWS, half * 2, INT4_ROWS // 2).transpose(0, 1)
    codes = torch.cat((bytes_ & _FIFTEEN, bytes_ >> _FOUR), -1)
    return codes.view(torch.int8).sub_(_EIGHT).view(half * 2, rows)


@functools.cache
def _packs_in_blocks() -> bool:
    """Whether `unpack_int4` is right on this machine: torch's packing follows the width of its vectors."""
    codes = (torch.arange(2 * INT4_ROWS * 32, dtype=torch.int32) * 40503 // 128 % 16).view(-1, 32)
    unpacked = unpack_int4(torch._convert_weight_to_int4pack_for_cpu(codes, 1))
    return torch.equal(unpacked.mT.int() + 8, codes)


@functools.cache
def _has_onednn_bf16() -> bool:
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())
