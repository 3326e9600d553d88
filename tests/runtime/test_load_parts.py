"""A rank's part of a stored tensor comes from disk as `shards.take` has it, read where it lies, and nothing else is held."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pretend_gpu import move_on_cpu

from dsc.runtime.cuda import load, parts
from dsc.runtime.cuda.load import load_parts, parts_bytes
from dsc.runtime.cuda.parts import Part
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import TensorEntry
from dsc.runtime.program import DTYPE_BYTES
from dsc.runtime.shards import ALONE, Cut, Place, shard_shape, take

TWO, FOUR = Place(1, 2, 2), Place(2, 4, 2)
# name: dtype, shape, cuts, place
KINDS = {
    "norm": ("bfloat16", (48,), (), TWO),
    "rows": ("float8_e4m3fn", (64, 40), (Cut(0, "tensor", 32),), TWO),
    "rows and those kept": ("bfloat16", (70, 24), (Cut(0, "tensor", 32, 6),), TWO),
    "columns": ("uint8", (40, 64), (Cut(1, "tensor", 32),), TWO),
    "columns of float32": ("float32", (9, 6), (Cut(1, "tensor", 3),), TWO),
    "columns and those kept": ("int8", (40, 70), (Cut(1, "tensor", 16, 6),), FOUR),
    "experts": ("uint8", (8, 12, 10), (Cut(0, "expert", 4),), TWO),
    "experts' rows": ("uint8", (8, 12, 10), (Cut(0, "expert", 4), Cut(1, "width", 6)), FOUR),
    "experts' columns": ("float32", (8, 12, 10), (Cut(0, "expert", 4), Cut(2, "width", 5)), FOUR),
    "columns of all experts": ("float32", (8, 12, 10), (Cut(2, "tensor", 3),), Place(3, 4, 1)),
    "vocabulary": ("bfloat16", (130, 8), (Cut(0, "tensor", 128),), TWO),
    "beyond the vocabulary": ("bfloat16", (100, 8), (Cut(0, "tensor", 128),), TWO),
    "padded columns": ("uint8", (6, 13), (Cut(1, "tensor", 8),), TWO),
    "padded columns and those kept": ("uint8", (6, 13), (Cut(1, "tensor", 8, 2),), TWO),
    "padded experts' columns": ("uint8", (5, 6, 7), (Cut(2, "width", 4), Cut(0, "expert", 3)), Place(3, 4, 2)),
    "a row of a table": ("int32", (4, 16), (Cut(0, "expert", 1),), Place(3, 4, 4)),
    "nothing": ("float32", (0, 4), (), TWO),
}


class Store:
    """Tensors in one file, with bytes between them, as an engine's weights are stored."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors, self.parts = folder, {}, {}
        self._bytes = bytearray(b"\xee" * 100)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], cuts: tuple[Cut, ...], place: Place) -> None:
        count = math.prod(shape) * DTYPE_BYTES[dtype]
        generator = torch.Generator().manual_seed(len(self._bytes))
        raw = torch.randint(1, 127, (count,), dtype=torch.uint8, generator=generator)
        self._bytes += b"\xee" * (-len(self._bytes) % 64)
        entry = TensorEntry("w", len(self._bytes), count, dtype, shape, "0" * 64, "", "", "", (), "row_major")
        self._bytes += raw.numpy().tobytes()
        self.tensors[name] = raw.view(getattr(torch, dtype)).view(shape)
        self.parts[name] = Part(entry, cuts, place)
        (self.folder / "w").write_bytes(self._bytes + b"\xee" * 100)

    def check(self) -> None:
        """Load all parts into dirty memory, and compare them with what `take` gives."""
        loaded = load_parts(self.folder, self.parts, torch.device("cpu"))
        held = 0
        for name, part in self.parts.items():
            want = take(self.tensors[name], part.cuts, part.place).contiguous()
            got = loaded.tensors[name]
            assert (got.dtype, got.dim(), got.nbytes) == (want.dtype, 1, want.nbytes), name
            assert tuple(want.shape) == shard_shape(part.entry.shape, part.cuts)
            assert torch.equal(got.view(torch.uint8), want.view(-1).view(torch.uint8)), name
            assert got.data_ptr() % got.element_size() == 0
            held += -(-want.nbytes // load.ALIGN) * load.ALIGN
        assert held == parts_bytes(self.parts.values())
        assert loaded.num_bytes == sum(part.bytes for part in self.parts.values())


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not zero by chance, and copies on the CPU."""
    monkeypatch.setattr(load, "_move", move_on_cpu)
    empty = torch.empty

    def dirty(*sizes: object, **options: object) -> torch.Tensor:
        return empty(*sizes, **options).fill_(0xDD)

    monkeypatch.setattr(torch, "empty", dirty)


@pytest.mark.parametrize("run_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize(("piece_bytes", "rows_bytes"), [(64 << 20, 16 << 20), (100, 100)])
def test_every_kind(
    run_bytes: int, piece_bytes: int, rows_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether runs are read by themselves or picked out of rows, whatever is read at once."""
    monkeypatch.setattr(parts, "RUN_BYTES", run_bytes)
    monkeypatch.setattr(parts, "ROWS_BYTES", rows_bytes)
    monkeypatch.setattr(load, "PIECE_BYTES", piece_bytes)
    store = Store(tmp_path)
    for name, kind in KINDS.items():
        store.add(name, *kind)
    store.check()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cuts(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("any"))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    expert = data.draw(st.sampled_from([1, 2, 4]))
    place = Place(data.draw(st.integers(0, 3)), 4, expert)
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    cuts = tuple(
        Cut(
            axis,
            data.draw(st.sampled_from(["tensor", "expert", "width"])),
            data.draw(st.integers(1, 5)),
            data.draw(st.integers(0, shape[axis] - 1)),
        )
        for axis in axes
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "RUN_BYTES", data.draw(st.sampled_from([1, 8, 1 << 20])))
        patch.setattr(parts, "ROWS_BYTES", data.draw(st.sampled_from([1, 32, 1 << 20])))
        store.add("w", data.draw(st.sampled_from(["uint8", "bfloat16", "float32"])), shape, cuts, place)
        store.check()


def test_neighbours_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that lie near each other in one read; what is far is not read for nothing."""
    reads = []

    def read(piece: load._Piece, into: torch.Tensor) -> None:
        reads.append((piece.offset, piece.bytes))
        _read(piece, into)

    _read = load._read
    monkeypatch.setattr(load, "_read", read)
    monkeypatch.setattr(load, "GAP_BYTES", 128)
    store = Store(tmp_path)
    for i in range(4):
        store.add(f"norm{i}", "float32", (10,), (), TWO)
    store.add("rows", "uint8", (64, 64), (Cut(0, "tensor", 32),), TWO)
    store.check()
    first, rows = store.parts["norm0"].entry, store.parts["rows"].entry
    end = store.parts["norm3"].entry.offset + 40
    assert reads == [(first.offset, end - first.offset), (rows.offset + 32 * 64, 32 * 64)]


def test_one_rank_has_the_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("rows", "uint8", (64, 64), (), ALONE)
    store.check()


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("columns", *KINDS["columns"])
    part = store.parts["columns"]
    beyond = replace(part.entry, offset=part.entry.offset + 200)
    with pytest.raises(DscError, match="ends too early"):
        load_parts(tmp_path, {"columns": replace(part, entry=beyond)}, torch.device("cpu"))
