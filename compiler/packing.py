"""How quantization tools pack linear weights: which tensors a module [N, K] has, and which modules config.json names.

AutoAWQ (WQLinear_GEMM), AutoGPTQ and GPTQModel (QuantLinear), compressed-tensors (pack-quantized). Words are int32; the first
code of a word lies in its lowest bits, but for AWQ's order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dsc.runtime.spec import Packing

SCALES = ("float16", "bfloat16", "float32")
IN_ORDER = "g_idx: columns are in the order of their groups"
SHAPE_TOLD = "weight_shape: config.json tells it"


class Layout(NamedTuple):
    """Where a method keeps what it stores of a module.

    words, scales, zeros  ends of the tensors' names
    turned   words and scales are stored with their columns first: [K, N] and [groups, N]
    by_rows  a word holds codes of neighbouring rows of one column; else of neighbouring columns of one row
    order    where in its word the code of each row or column lies; () for in order

    Words of zeros always hold those of neighbouring rows: [groups, N / codes] where turned, else [N / codes, groups].
    """

    words: str
    scales: str
    zeros: str
    turned: bool
    by_rows: bool = False
    order: tuple[int, ...] = ()


LAYOUTS = {
    # A word's bits from the lowest on hold columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
    "awq": Layout("qweight", "scales", "qzeros", turned=True, by_rows=True, order=(0, 4, 1, 5, 2, 6, 3, 7)),
    "gptq": Layout("qweight", "scales", "qzeros", turned=True),
    "compressed-tensors": Layout("weight_packed", "weight_scale", "weight_zero_point", turned=False),
}


class Stored(NamedTuple):
    """One tensor of a packed module.

    rule     why no graph reads it; "" for one that is read
    content  what it must hold then: ("groups", G), the group of each column; ("numbers", ...), these
    """

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    rule: str = ""
    content: tuple[str | int, ...] = ()


def parts_of(packing: Packing, rows: int, columns: int) -> dict[str, Stored]:
    """The tensors of a packed module [rows, columns] by the end of their names; those with a rule may be absent."""
    layout, groups, codes = LAYOUTS[packing.method], packing.groups(columns), 32 // packing.bits
    words = (-(-rows // codes), columns) if layout.by_rows else (rows, -(-columns // codes))
    zeros = (-(-rows // codes), groups)

    def turned(shape: tuple[int, int]) -> tuple[int, int]:
        return shape[::-1] if layout.turned else shape

    found = {
        layout.words: Stored(("int32",), turned(words)),
        layout.scales: Stored(SCALES, turned((rows, groups))),
    }
    if packing.zeros:
        found[layout.zeros] = Stored(("int32",), turned(zeros))
    if packing.method == "gptq":
        found["g_idx"] = Stored(("int32", "int64"), (columns,), IN_ORDER, ("groups", packing.group or columns))
    if packing.method == "compressed-tensors":
        found["weight_shape"] = Stored(("int64", "int32"), (2,), SHAPE_TOLD, ("numbers", rows, columns))
    return found


def is_packed(module: str, packing: Packing, stored: Callable[[str], bool]) -> bool | None:
    """Whether a module is stored packed, by what is there of it; None where nothing is."""
    if stored(f"{module}.weight"):
        return False
    layout = LAYOUTS[packing.method]
    ends = (layout.words, layout.scales, layout.zeros)
    return True if any(stored(f"{module}.{end}") for end in ends) else None


def declared(packed: Sequence[str], unpacked: Sequence[str]) -> Callable[[str], bool]:
    """Whether config.json says that a module is packed.

    packed, unpacked  names of modules; "re:..." a regular expression for the beginning of a name, "*..." a part of one
    """
    wanted, kept = _matcher(packed), _matcher(unpacked)
    return lambda module: (not packed or wanted(module)) and not kept(module)


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    exact = {pattern for pattern in patterns if not pattern.startswith(("re:", "*"))}
    parts = [pattern[1:] for pattern in patterns if pattern.startswith("*")]
    regexes = [re.compile(pattern[3:]) for pattern in patterns if pattern.startswith("re:")]
    return lambda module: (
        module in exact or any(part in module for part in parts) or any(regex.match(module) for regex in regexes)
    )
