"""Random weights from integers: the same bytes on every machine, at any thread count, from any row on.

A tensor's name and a seed make two keys; element pair i is a 32-bit hash of i and the keys ("lowbias32", Wellons 2018, after
a keyed step of the golden ratio), and each half of it looks its value up among 65,536 equally likely ones. The tables
are float64 made from additions, multiplications and square roots alone, rounded once.
"""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from dsc.plugins.formats import Format
from dsc.plugins.stored import FP8_BLOCK, FP8_MAX, pack_nibbles

Doubles = NDArray[np.float64]

LEVELS = 1 << 16
NIBBLE_LEVELS = 1 << 8
RUN_WORDS = 1 << 17  # hashed at a time: what a core's cache holds
STEPS_PER_SIGMA, SIGMAS = 2048, 7


def draw(table: torch.Tensor, name: str, first: int, count: int, seed: int = 0) -> torch.Tensor:
    """Elements first .. first + count of the tensor `name`, each one of `table` (LEVELS of them), flat."""
    out = torch.empty(count, dtype=table.dtype)
    start = first // 2
    lead = first - 2 * start
    for begin in range(0, lead + count, 2 * RUN_WORDS):
        words = min(RUN_WORDS, (lead + count - begin + 1) // 2)
        index = _words(name, seed, start + begin // 2, words).view(torch.int16).int().add_(LEVELS // 2)
        skip = lead if begin == 0 else 0
        at = begin + skip - lead
        index = index[skip : skip + count - at]
        torch.index_select(table, 0, index, out=out[at : at + len(index)])
    return out


def _words(name: str, seed: int, first: int, count: int) -> torch.Tensor:
    """int32 [count]: hashes of the counters first .. first + count. Products and sums wrap at 32 bits."""
    key, second_key = _keys(name, seed)
    x = torch.add(_counters()[:count], _signed(first + key))
    shifted = torch.empty_like(x)

    def fold(bits: int) -> None:
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))

    x.mul_(_signed(0x9E3779B9)).add_(_signed(second_key))
    fold(16)
    x.mul_(_signed(0x7FEB352D))
    fold(15)
    x.mul_(_signed(0x846CA68B))
    fold(16)
    return x


@cache
def _counters() -> torch.Tensor:
    return torch.arange(RUN_WORDS, dtype=torch.int32)


@cache
def _keys(name: str, seed: int) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _signed(word: int) -> int:
    """The low 32 bits as torch's int32 takes them."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


# -- tables of LEVELS values, each as likely as any other


@cache
def float_table(dtype: str, deviation: float) -> torch.Tensor:
    """N(0, deviation^2) in a floating dtype."""
    return torch.from_numpy(_normal(LEVELS) * deviation).to(getattr(torch, dtype))


@cache
def data_table(format_: Format, width: int) -> torch.Tensor:
    """Stored data of N(0, 1) in a quantized format, as its quantizer would have it for a typical scale."""
    if format_.kind == "wint4":
        codes = torch.from_numpy(_codes(format_, width, NIBBLE_LEVELS)).to(torch.int8)
        pairs = torch.stack((codes.repeat(NIBBLE_LEVELS), codes.repeat_interleave(NIBBLE_LEVELS)), -1)
        return pack_nibbles(pairs).flatten()
    codes = torch.from_numpy(_codes(format_, width, LEVELS))
    return codes.to(torch.int8 if format_.kind == "wint8" else torch.float32).to(_data_dtype(format_))


@cache
def scale_table(format_: Format, width: int, deviation: float) -> torch.Tensor:
    """Scales that go with `data_table`: spread as largest values of a group are, so that all values have `deviation`."""
    peaks = _peaks(_group_size(format_, width))
    codes = _codes(format_, width, NIBBLE_LEVELS if format_.kind == "wint4" else LEVELS)
    scales = peaks * (deviation / (_rms(peaks) * _rms(codes)))
    return torch.from_numpy(scales).to(torch.float32 if format_.kind == "fp8" else torch.bfloat16)


def _data_dtype(format_: Format) -> torch.dtype:
    return torch.int8 if format_.kind == "wint8" else torch.float8_e4m3fn


def _group_size(format_: Format, width: int) -> int:
    """Values that share a scale; `width` is the weight's K."""
    return {"fp8": FP8_BLOCK * FP8_BLOCK, "wint8": width, "wint4": format_.group}[format_.kind]


def _codes(format_: Format, width: int, levels: int) -> Doubles:
    """Codes of `levels` values of N(0, 1) under the scale of a group whose largest value is typical."""
    peak = _rms(_peaks(_group_size(format_, width)))
    largest = {"fp8": FP8_MAX, "wint8": 127.0, "wint4": 7.0}[format_.kind]
    codes = np.clip(_normal(levels) * (largest / peak), -largest, largest)
    if format_.kind == "fp8":
        return torch.from_numpy(codes).float().to(torch.float8_e4m3fn).double().numpy()
    return np.rint(codes)


def _rms(values: Doubles) -> float:
    return math.sqrt(math.fsum((values * values).tolist()) / len(values))


@cache
def _normal(levels: int) -> Doubles:
    """Quantiles of N(0, 1) at (i + 1/2) / levels."""
    half = _quantiles(_half_normal(), levels // 2)
    return np.concatenate((-half[::-1], half))


@cache
def _peaks(count: int) -> Doubles:
    """Quantiles at (i + 1/2) / LEVELS of the largest of `count` absolute values of N(0, 1)."""
    distribution, square, left = np.ones(STEPS_PER_SIGMA * SIGMAS + 1), _half_normal(), count
    while left:
        if left & 1:
            distribution = distribution * square
        square, left = square * square, left >> 1
    return _quantiles(distribution, LEVELS)


def _quantiles(distribution: Doubles, levels: int) -> Doubles:
    """Where a distribution on the grid reaches (i + 1/2) / levels, between two points by a straight line."""
    wanted = (np.arange(levels) + 0.5) / levels
    above = np.searchsorted(distribution, wanted)
    low, high = distribution[above - 1], distribution[above]
    return (above - 1 + (wanted - low) / (high - low)) / STEPS_PER_SIGMA


@cache
def _half_normal() -> Doubles:
    """P(|x| < k / STEPS_PER_SIGMA) of N(0, 1) for k = 0 .. STEPS_PER_SIGMA * SIGMAS, by the trapezoid rule.

    The density goes from point to point by multiplication, since the C library's exp is not the same everywhere.
    """
    step = Decimal(1) / STEPS_PER_SIGMA
    ratio, change = float((-step * step / 2).exp()), float((-step * step).exp())
    density, sums = 2 / (math.sqrt(2 * math.pi) * STEPS_PER_SIGMA), [0.0]
    for _ in range(STEPS_PER_SIGMA * SIGMAS):
        following = density * ratio
        ratio *= change
        sums.append(sums[-1] + (density + following) / 2)
        density = following
    return np.array(sums)
