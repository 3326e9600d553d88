"""Which axes of a weight are split over the ranks, and which splits there can be: whole heads, experts, blocks and groups.

A rule goes by a weight's name, class, shape and format alone, so a plan of config.json and the pass over a graph agree.

A split must leave what one rank has a part of what is stored for all: shards put together are the whole, bit for bit. So
no block of 128 rows and columns (FP8) and no group of columns (wint4) is ever cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsc.compiler.ir.mesh import Mesh
from dsc.plugins.formats import Format
from dsc.runtime.shards import Axis, Cut
from dsc.runtime.spec import ModelSpec

BLOCK = 128  # rows and columns that FP8 keeps together, and rows of a vocabulary that any format does
EXPERTS, ROWS, COLUMNS = -3, -2, -1
AXES = {EXPERTS: "experts", ROWS: "rows", COLUMNS: "columns"}
EXPERT_MAP = "expert_map"  # where each expert lies in each group of ranks: a row for each group
HEAD = "lm_head.weight"  # tied to the embeddings it has their name, and stays whole as they do
# Ends of the names of weights that are split; the others lie on every rank.
BY_HEADS = {"q_b_proj": ROWS, "q_proj": ROWS, "kv_b_proj": ROWS, "o_proj": COLUMNS}
BY_WIDTH = {"gate_proj": ROWS, "up_proj": ROWS, "down_proj": COLUMNS}


@dataclass(frozen=True)
class Split:
    """An axis of a weight [..., N, K] over `ways` ranks or groups of ranks, in equal parts.

    axis    EXPERTS, ROWS or COLUMNS
    heads   how many heads the axis is made of, none of which is cut; 0: it is made of none
    kept    rows at the end that every rank has
    padded  whole blocks of 128 on every rank, the last ones beyond the end where these do not come out even
    """

    axis: int
    by: Axis
    ways: int
    heads: int = 0
    kept: int = 0
    padded: bool = False

    def part(self, length: int) -> int:
        """Elements of one rank of an axis of `length` elements, without those kept."""
        if self.padded:
            return math.ceil(math.ceil(length / BLOCK) / self.ways) * BLOCK
        return (length - self.kept) // self.ways

    def fault(self, shape: Sequence[int], format_: Format | None) -> str:
        """Why a weight of this shape and format cannot be split so, or ""."""
        if self.padded:
            return ""
        if self.heads % self.ways:
            return f"{self.heads} heads = {divided(self.heads, self.ways)}"
        length = shape[self.axis] - self.kept
        grain, what = _grain(format_, self.axis)
        if length % (self.ways * grain):
            told = f"{length} {AXES[self.axis]} = {divided(length, self.ways)}"
            return told + (f", not in whole {what}" if what else "")
        return ""

    def text(self, shape: Sequence[int]) -> str:
        """What a rank has of the axis: `384 of 768 rows by tensor`."""
        length = shape[self.axis] - self.kept
        told = f"{self.part(shape[self.axis])} of {length} {AXES[self.axis]} by {self.by}"
        padded = self.padded and self.part(length) * self.ways > length
        return told + (f", {self.kept} more kept" if self.kept else "") + (", padded" if padded else "")


def splits_of(spec: ModelSpec, name: str, weight_class: str, mesh: Mesh) -> tuple[Split, ...]:
    """How a weight is split; () where every rank has all of it. `name` is the checkpoint's, or that of joined weights."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    found: list[Split] = []
    if name == EXPERT_MAP:
        found = [Split(ROWS, "expert", mesh.expert)]
    elif name == HEAD:
        found = [Split(ROWS, "tensor", mesh.tensor, padded=True)]
    elif weight_class in ("attention", "kv_b") and last in BY_HEADS:
        found = [Split(BY_HEADS[last], "tensor", mesh.tensor, spec.num_heads)]
    elif weight_class == "attention" and last == "qkv_proj" and spec.q_lora_rank is None:
        found = [Split(ROWS, "tensor", mesh.tensor, spec.num_heads, kept=spec.cache_width)]
    elif weight_class in ("dense_mlp", "shared_experts") and last in BY_WIDTH:
        found = [Split(BY_WIDTH[last], "tensor", mesh.tensor)]
    elif weight_class == "experts" and last in BY_WIDTH:
        found = [Split(EXPERTS, "expert", mesh.expert), Split(BY_WIDTH[last], "width", mesh.expert_width_ways)]
    return tuple(split for split in found if split.ways > 1)


def shape_of_rank(shape: Sequence[int], splits: Sequence[Split]) -> tuple[int, ...]:
    """The logical shape of what one rank has."""
    found = list(shape)
    for split in splits:
        found[split.axis] = split.part(shape[split.axis]) + split.kept
    return tuple(found)


def cuts_of(shape: Sequence[int], format_: Format, part: str, splits: Sequence[Split]) -> tuple[Cut, ...]:
    """The cuts of a stored part ("data", "scales") of a weight, in elements of the stored tensor. Splits without faults."""
    cuts = []
    for split in splits:
        at = _stored_axis(format_, part, split.axis, len(shape))
        if at is not None:
            axis, unit = at
            cuts.append(Cut(axis, split.by, split.part(shape[split.axis]) // unit, math.ceil(split.kept / unit)))
    return tuple(cuts)


def divided(size: int, ways: int) -> str:
    """`320 over 3` in words: "3 x 106 + 2"."""
    whole, rest = divmod(size, ways)
    return f"{ways} x {whole}" + (f" + {rest}" if rest else "")


def _grain(format_: Format | None, axis: int) -> tuple[int, str]:
    """Rows or columns that a format keeps together."""
    if format_ is not None and format_.kind == "fp8" and axis != EXPERTS:
        return BLOCK, f"blocks of {BLOCK}"
    if format_ is not None and format_.kind == "wint4" and axis == COLUMNS:
        return format_.group, f"groups of {format_.group}"
    return 1, ""


def _stored_axis(format_: Format, part: str, axis: int, dimensions: int) -> tuple[int, int] | None:
    """The axis of a stored part that is an axis of the weight, and how many elements of the weight one of its elements is
    for; None where the part has one for all of them.
    """
    at = dimensions + axis
    if part == "data":
        return at, 2 if format_.kind == "wint4" and axis == COLUMNS else 1
    if format_.kind == "wint8" and axis == COLUMNS:
        return None
    return at, _grain(format_, axis)[0]
