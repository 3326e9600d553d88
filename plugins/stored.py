"""Stored weights in plain torch, and what a linear layer means in each storage format.

Legend: N rows, K columns of a weight; G columns that share a scale. Imports torch only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dsc.plugins.formats import Format, parse_format

Quantized = tuple[torch.Tensor, torch.Tensor]  # codes [..., K] and scales [..., ceil(K/128)] of activations
FP8_MAX = 448.0  # largest finite float8_e4m3fn
FP8_BLOCK = 128
SMALLEST_AMAX = 1e-4  # of an activation group, so that a group of zeros has a finite scale (DeepSeek-V3, act_quant)


@dataclass(frozen=True)
class StoredWeight:
    """A weight [..., N, K] as an engine stores it: `data` and `scales` as `Format` describes them."""

    format: Format
    data: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., N, K]."""
        return self.format.logical_shape(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def __getitem__(self, index: int | slice) -> StoredWeight:
        """Select along the leading axis of a stacked weight: one expert, or a range of them."""
        assert self.data.dim() > 2, self.shape
        return StoredWeight(self.format, self.data[index], None if self.scales is None else self.scales[index])

    def dequantize(self) -> torch.Tensor:
        """The values, float32 [..., N, K], freshly made unless the format is fp32."""
        if self.scales is None:
            return self.data.float()
        if self.format.kind == "wint8":
            return self.data.float().mul_(self.scales.float().unsqueeze(-1))
        if self.format.kind == "wint4":
            codes = _look_up(self.data, _nibble_pairs()).view(*self.scales.shape, self.format.group)
            return codes.mul_(self.scales.float().unsqueeze(-1)).flatten(-2)
        return scale_blocks(_look_up(self.data.view(torch.uint8), _e4m3_values()), self.scales)

    def dequantize_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Chosen rows of a matrix [N, K], float32 [len(rows), K], without touching the others."""
        if self.scales is None:
            return self.data[rows].float()
        if self.format.kind == "fp8":
            spread = self.scales[rows // FP8_BLOCK].repeat_interleave(FP8_BLOCK, -1)
            return self.data[rows].float().mul_(spread[..., : self.shape[-1]])
        return StoredWeight(self.format, self.data[rows], self.scales[rows]).dequantize()


def _look_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """float32 values of the bytes `codes` [..., M] from a table of 256 entries: [..., M], or [..., 2 * M] where an entry
    is two floats in the guise of a float64. Several times as fast on CPUs as shifts, or as torch's own float8 cast.
    """
    floats = table.index_select(0, codes.reshape(-1).int()).view(torch.float32)
    return floats.view(*codes.shape[:-1], codes.shape[-1] * table.itemsize // 4)


@functools.cache
def _nibble_pairs() -> torch.Tensor:
    """The two values of each byte of packed nibbles."""
    return unpack_nibbles(torch.arange(256, dtype=torch.uint8).unsqueeze(1)).float().view(torch.float64).view(-1)


@functools.cache
def _e4m3_values() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def scale_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """values [..., N, K] *= scales of 128x128 blocks [..., ceil(N/128), ceil(K/128)], in place; edge blocks are partial."""
    rows, columns = values.shape[-2:]
    scales = scales.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]
    if columns % FP8_BLOCK:
        return values.mul_(scales.repeat_interleave(FP8_BLOCK, -1)[..., :columns])
    values.view(*scales.shape, FP8_BLOCK).mul_(scales.unsqueeze(-1))
    return values


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] of two's-complement nibbles, the low one first -> int8 [..., K] in -8..7."""
    signed = packed.view(torch.int8)
    # A left shift drops the high nibble and the arithmetic right shift brings the sign back.
    return torch.stack(((signed << 4) >> 4, signed >> 4), -1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_nibbles`: int8 [..., K] in -8..7 -> uint8 [..., K/2]."""
    return ((codes[..., ::2] & 15) | (codes[..., 1::2] << 4)).view(torch.uint8)


def quantize_activations(x: torch.Tensor, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., K] to float8_e4m3fn in groups of 128 along K (the last one may be partial).

    scale = max(amax, 1e-4) / 448, or the next power of two with ue8m0; codes by true division, saturating.
    returns (codes [..., K], scales float32 [..., ceil(K/128)]). DeepSeek-V3 inference/kernel.py, act_quant.
    """
    columns = x.shape[-1]
    groups = _pad_groups(x.float())
    scales = groups.abs().amax(-1).clamp_min(SMALLEST_AMAX) / FP8_MAX
    if ue8m0:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (groups / scales.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2)[..., :columns], scales


def dequantize_activations(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of what `quantize_activations` made, float32 [..., K]."""
    return (_pad_groups(codes.float()) * scales.unsqueeze(-1)).flatten(-2)[..., : codes.shape[-1]]


def round_activations(x: torch.Tensor, ue8m0: bool = False) -> torch.Tensor:
    """x after `quantize_activations` and back, float32 [..., K]."""
    return dequantize_activations(*quantize_activations(x, ue8m0))


def norm_codes(y: torch.Tensor, quantize: str) -> tuple[torch.Tensor, ...]:
    """What a norm makes of its result y [T, D] beside it, by its attribute `quantize`, the format of the weights that are to
    multiply it: codes [T, D] and scales [ceil(D/128), T]; nothing for "".
    """
    if not quantize:
        return ()
    codes, scales = quantize_activations(y, parse_format(quantize).ue8m0)
    return codes, scales.mT.contiguous()


def given_codes(codes: torch.Tensor | None, scales: torch.Tensor | None) -> Quantized | None:
    """Operands that `norm_codes` made as `quantize_activations` gives them; None where they are absent."""
    return None if codes is None or scales is None else (codes, scales.mT)


def _pad_groups(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., K] -> [..., ceil(K/128), 128], zeros behind."""
    groups = -(-x.shape[-1] // FP8_BLOCK)
    padded = torch.nn.functional.pad(x, (0, groups * FP8_BLOCK - x.shape[-1]))
    return padded.view(*x.shape[:-1], groups, FP8_BLOCK)


def linear(x: torch.Tensor, w: StoredWeight, quantized: Quantized | None = None) -> torch.Tensor:
    """x [T, K] times w [N, K] transposed, float32 [T, N], as a linear layer in w's format means it.

    With fp8 weights the activations are quantized first, or were (`quantized`); every other format multiplies x as it is.
    """
    return multiplied(x, w.format, quantized) @ w.dequantize().mT


def multiplied(x: torch.Tensor, format_: Format, quantized: Quantized | None = None) -> torch.Tensor:
    """What a weight in a format multiplies, x [..., K] or its codes, in float32."""
    if format_.kind != "fp8":
        return x.float()
    return dequantize_activations(*quantized) if quantized is not None else round_activations(x, format_.ue8m0)
