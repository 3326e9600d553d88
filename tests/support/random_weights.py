"""Stored weights with random codes and scales: every format without a quantizer."""

from __future__ import annotations

import torch

from dsc.plugins.formats import parse_format
from dsc.plugins.stored import StoredWeight

FORMATS = ("fp32", "bf16", "fp8", "fp8:ue8m0", "wint8", "wint4:128", "wint4:64", "wint4:32")


def random_weight(format_: str, shape: tuple[int, ...], generator: torch.Generator) -> StoredWeight:
    """A weight whose values have a spread of about 1 / sqrt(K)."""
    kind = parse_format(format_)
    parts = kind.parts(shape)
    spread = shape[-1] ** -0.5
    if not kind.quantized:
        data = torch.randn(shape, generator=generator) * spread
        return StoredWeight(kind, data.to(getattr(torch, parts["data"][0])))
    dtype, size = parts["data"]
    code_spread = {"fp8": 1.0, "wint8": 74.0, "wint4": 4.6}[kind.kind]
    if kind.kind == "fp8":
        data = torch.randn(size, generator=generator).to(torch.float8_e4m3fn)
    elif kind.kind == "wint8":
        data = torch.randint(-127, 128, size, generator=generator, dtype=torch.int8)
    else:
        data = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    dtype, size = parts["scales"]
    scales = (0.5 + torch.rand(size, generator=generator)) * (spread / code_spread)
    return StoredWeight(kind, data, scales.to(getattr(torch, dtype)))
