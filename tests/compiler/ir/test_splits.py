"""Splits of weights, for any shape, format and mesh: parts are what the format stores for a rank, and make up the whole."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.splits import COLUMNS, EXPERTS, ROWS, Split, cuts_of, shape_of_rank, splits_of
from dsc.compiler.model_shapes import read_shape
from dsc.compiler.opt import TINY_R1
from dsc.plugins.formats import Format, parse_format
from dsc.runtime.shards import Cut, Place, shard_shape, take

FORMATS = ("fp32", "bf16", "fp8", "wint8", "wint4:128", "wint4:64", "wint4:32")


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Format, tuple[Split, ...], Place]:
    """A weight, how it is split, and the rank to look at."""
    format_ = parse_format(draw(st.sampled_from(FORMATS)))
    expert, width = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (2, 4)]))
    ranks = expert * width
    place = Place(draw(st.integers(0, ranks - 1)), ranks, expert)
    units = st.integers(1, 3)
    rows, columns = draw(units) * 128 * ranks, draw(units) * 128 * ranks
    axis = draw(st.sampled_from([ROWS, COLUMNS]))
    if draw(st.booleans()):
        shape: tuple[int, ...] = (draw(units) * expert, rows, columns)
        found = [Split(EXPERTS, "expert", expert), Split(axis, "width", width)]
    else:
        kept = draw(st.sampled_from([0, 96, 576])) if axis == ROWS else 0
        shape = (rows + kept, columns)
        found = [Split(axis, "tensor", ranks, kept=kept)]
    return shape, format_, tuple(split for split in found if split.ways > 1), place


@given(cases())
@settings(max_examples=200, deadline=None)
def test_a_part_is_what_its_format_stores_for_a_rank(
    case: tuple[tuple[int, ...], Format, tuple[Split, ...], Place],
) -> None:
    """Its shape, and its values: numbers that tell each element's row and column come out where the rank has them."""
    shape, format_, splits, place = case
    assert [split.fault(shape, format_) for split in splits] == [""] * len(splits)
    local = format_.parts(shape_of_rank(shape, splits))
    for part, (_, stored) in format_.parts(shape).items():
        cuts = cuts_of(shape, format_, part, splits)
        assert shard_shape(stored, cuts) == local[part][1]
        whole = torch.arange(math.prod(stored)).reshape(stored)
        got, wanted = take(whole, cuts, place), whole
        for cut in cuts:
            own = torch.arange(cut.size) + place.index(cut.by) * cut.size
            rows = torch.cat([own, torch.arange(stored[cut.axis] - cut.kept, stored[cut.axis])])
            wanted = wanted.index_select(cut.axis, rows)
        assert torch.equal(got, wanted)


@given(st.integers(1, 5000), st.integers(2, 16))
@settings(deadline=None)
def test_a_vocabulary_has_its_rows_once(rows: int, ways: int) -> None:
    """Whole blocks of 128 on each rank, zeros behind the last row."""
    split = Split(ROWS, "tensor", ways, padded=True)
    shape = (rows, 2)
    assert split.fault(shape, parse_format("fp8")) == ""
    (cut,) = cuts_of(shape, parse_format("bf16"), "data", (split,))
    assert cut.size % 128 == 0
    assert cut.size * ways - rows < 128 * (ways + 1)
    whole = torch.arange(1, rows + 1)[:, None].expand(shape)
    parts = torch.cat([take(whole, (cut,), Place(rank, ways, 1)) for rank in range(ways)])
    assert torch.equal(parts[:rows], whole)
    assert not parts[rows:].any()


@pytest.mark.parametrize(
    ("split", "shape", "format_", "fault"),
    [
        (Split(ROWS, "tensor", 8, heads=4), (768, 128), "bf16", "4 heads = 8 x 0 + 4"),
        (Split(ROWS, "tensor", 4, heads=4), (768, 128), "bf16", ""),
        (Split(ROWS, "tensor", 4, heads=4), (768, 128), "fp8", "768 rows = 4 x 192, not in whole blocks of 128"),
        (Split(COLUMNS, "tensor", 4), (96, 320), "wint4:64", "320 columns = 4 x 80, not in whole groups of 64"),
        (Split(COLUMNS, "tensor", 5), (96, 320), "wint4:64", ""),
        (Split(ROWS, "tensor", 3), (320, 96), "wint4:64", "320 rows = 3 x 106 + 2"),
        (Split(ROWS, "tensor", 2, kept=576), (768 + 576, 96), "fp8", ""),
        (Split(EXPERTS, "expert", 3), (16, 8, 8), "fp8", "16 experts = 3 x 5 + 1"),
        (Split(EXPERTS, "expert", 4), (16, 8, 8), "fp8", ""),
    ],
)
def test_what_is_never_cut(split: Split, shape: tuple[int, ...], format_: str, fault: str) -> None:
    assert split.fault(shape, parse_format(format_)) == fault


def test_queries_beside_what_all_share() -> None:
    """A joint projection of a model without q_lora, in fp8: 24 blocks of queries a rank and 4.5 kept."""
    spec = replace(read_shape("deepseek-ai/DeepSeek-R1")[0], q_lora_rank=None)
    shape, mesh = (128 * 192 + 576, 7168), Mesh(8, 8)
    splits = splits_of(spec, "model.layers.3.self_attn.qkv_proj.weight", "attention", mesh)
    assert shape_of_rank(shape, splits) == (16 * 192 + 576, 7168)
    assert cuts_of(shape, parse_format("fp8"), "data", splits) == (Cut(0, "tensor", 3072, 576),)
    assert cuts_of(shape, parse_format("fp8"), "scales", splits) == (Cut(0, "tensor", 24, 5),)
    assert cuts_of(shape, parse_format("wint8"), "scales", splits) == (Cut(0, "tensor", 3072, 576),)
    assert splits[0].text(shape) == "3072 of 24576 rows by tensor, 576 more kept"


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "model.layers.4.eh_proj.weight", "model.norm.weight",
    ],
)  # fmt: skip
def test_what_every_rank_has(name: str) -> None:
    for weight_class in ("attention", "embeddings", "eh_proj", "exact"):
        assert splits_of(TINY_R1, name, weight_class, Mesh(4, 4)) == ()
