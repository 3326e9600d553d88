"""Storage formats of quantizable weights: which tensors a format stores for a logical weight [..., N, K].

A leaf: imports only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("fp32", "bf16", "fp8", "wint8", "wint4")
GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Format:
    """A storage format; `str(format)` is its name in recipes, graphs and manifests.

    fp32, bf16      data [..., N, K]
    fp8             data float8_e4m3fn [..., N, K], scales float32 [..., ceil(N/128), ceil(K/128)] (multiply);
                    activations are quantized online in 1x128 groups; `fp8:ue8m0` takes powers of two for their scales
    wint8           data int8 [..., N, K], scales bfloat16 [..., N]
    wint4:G         data uint8 [..., N, K/2] (two's-complement nibbles, the low nibble is the even k),
                    scales bfloat16 [..., N, K/G]; symmetric, groups of G along K
    """

    kind: str
    group: int = 0
    ue8m0: bool = False

    def __str__(self) -> str:
        if self.kind == "wint4":
            return f"wint4:{self.group}"
        return "fp8:ue8m0" if self.ue8m0 else self.kind

    @property
    def quantized(self) -> bool:
        """Whether the format has scales."""
        return self.kind in ("fp8", "wint8", "wint4")

    def parts(self, shape: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Stored tensors of a logical weight of `shape`: part name ("data", "scales") -> (dtype, shape).

        Raises ValueError when the format cannot hold the shape (a group that does not divide K).
        """
        *lead, rows, cols = shape
        if self.kind in ("fp32", "bf16"):
            return {"data": ("float32" if self.kind == "fp32" else "bfloat16", tuple(shape))}
        if self.kind == "fp8":
            blocks = (*lead, -(-rows // 128), -(-cols // 128))
            return {"data": ("float8_e4m3fn", tuple(shape)), "scales": ("float32", blocks)}
        if self.kind == "wint8":
            return {"data": ("int8", tuple(shape)), "scales": ("bfloat16", (*lead, rows))}
        if cols % self.group:
            raise ValueError(f"{cols} = {cols // self.group} x {self.group} + {cols % self.group}")
        return {
            "data": ("uint8", (*lead, rows, cols // 2)),
            "scales": ("bfloat16", (*lead, rows, cols // self.group)),
        }

    def logical_shape(self, data_shape: Sequence[int]) -> tuple[int, ...]:
        """The weight's shape, from its stored data's shape."""
        if self.kind == "wint4":
            return (*data_shape[:-1], data_shape[-1] * 2)
        return tuple(data_shape)


def parse_format(text: str) -> Format:
    """`fp32`, `bf16`, `fp8`, `fp8:ue8m0`, `wint8`, `wint4:128|64|32` -> Format; ValueError otherwise."""
    match = re.fullmatch(r"wint4:(\d+)", text)
    if match and int(match[1]) in GROUPS:
        return Format("wint4", int(match[1]))
    if text == "fp8:ue8m0":
        return Format("fp8", ue8m0=True)
    if text in ("fp32", "bf16", "fp8", "wint8"):
        return Format(text)
    known = ["fp32", "bf16", "fp8", "fp8:ue8m0", "wint8", *(f"wint4:{group}" for group in GROUPS)]
    raise ValueError(f"unknown weight format {text!r}, known: {', '.join(known)}")
