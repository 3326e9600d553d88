"""Emission: the right bytes in the right place, files that safetensors and onnx open, the same at any thread count."""

import hashlib
import json
import os
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path

import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.damage import parts_sha256
from support.families import dequantized_tensors, make_checkpoint, read_tensors

from dsc.compiler import evaluate as evaluation
from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.emission_plan import EmissionPlan, plan_emission
from dsc.compiler.emit import Emission, emit, gather, outgrows, place, remaining_bytes
from dsc.compiler.evaluate import evaluate, row_blocks
from dsc.compiler.importer.model import import_main, import_mtp
from dsc.compiler.ir.graph import Graph
from dsc.compiler.ir.weight import Cast, Concat, Dequantize, Expression, Quantize, Reshape, Source, Stack, WeightValues
from dsc.compiler.journal import Journal
from dsc.compiler.safetensors_layout import lay_out
from dsc.plugins.formats import parse_format
from dsc.plugins.stored import StoredWeight
from dsc.runtime.errors import DscError

FORMATS = {"experts": "wint4:32", "attention": "fp8", "kv_b": "bf16", "dense_mlp": "wint8", "shared_experts": "fp8",
           "embeddings": "bf16", "lm_head": "bf16", "eh_proj": "fp8"}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "r1", num_hidden_layers=2)
    return Checkpoint.open(folder, read_config(folder))


def graphs_of(checkpoint: Checkpoint) -> list[Graph]:
    return [make(checkpoint.spec, checkpoint.source, 64) for make in (import_main, import_mtp)]


def stored(weights: dict[str, WeightValues], formats: dict[str, str]) -> dict[str, WeightValues]:
    """The tensors of an engine for imported weights, as the pass quantize_weights names them."""
    made = {}
    for name, values in weights.items():
        if values.weight_class == "exact":
            made[name] = values
            continue
        format_ = parse_format(formats[values.weight_class])
        base = name.removesuffix(".weight")
        for part in format_.parts(values.expression.shape):
            packed = "packed" if format_.kind.startswith("w") else "weight"
            tensor = f"{base}.{packed if part == 'data' else part}"
            made[tensor] = WeightValues(tensor, Quantize(values.expression, str(format_), part), values.weight_class)
    return made


def write(
    checkpoint: Checkpoint,
    folder: Path,
    formats: dict[str, str] = FORMATS,
    file_bytes_max: int = 1 << 30,
    **options: object,
) -> Emission:
    plan = plan_of(stored(gather(graphs_of(checkpoint)), formats), checkpoint, file_bytes_max)
    return emit(plan, checkpoint.read, folder, **options)  # type: ignore[arg-type]


def plan_of(weights: dict[str, WeightValues], checkpoint: Checkpoint, file_bytes_max: int = 1 << 30) -> EmissionPlan:
    return plan_emission(weights, position=position_in(checkpoint), file_bytes_max=file_bytes_max)


def position_in(checkpoint: Checkpoint) -> Callable[[str], tuple[str, int]]:
    return lambda name: (checkpoint.info(name).file.name, checkpoint.info(name).offset)


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Emission]:
    folder = tmp_path_factory.mktemp("engine")
    return folder, write(checkpoint, folder, file_bytes_max=400_000)


def load(folder: Path, emission: Emission) -> dict[str, torch.Tensor]:
    tensors = {}
    for location in emission.parts_sha256:
        with safe_open(folder / location, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def test_safetensors_opens_the_files_and_they_are_laid_out_as_promised(engine: tuple[Path, Emission]) -> None:
    folder, emission = engine
    assert len(emission.parts_sha256) > 3
    names = [Path(location).name for location in emission.parts_sha256]
    assert names == [f"rank0-{number:05d}.safetensors" for number in range(1, len(names) + 1)]
    assert sorted(p.name for p in (folder / "weights").iterdir()) == names
    tensors = load(folder, emission)
    assert {name for name in tensors if not name.startswith("_pad.")} == emission.placements.keys()
    for name, place_ in emission.placements.items():
        assert place_.offset >= 4096
        assert place_.offset % 64 == 0
        content = (folder / place_.location).read_bytes()[place_.offset : place_.offset + place_.length]
        assert content == tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert emission.tensor_sha256[name] == hashlib.sha256(content).hexdigest()
    for location, digest in emission.parts_sha256.items():
        content = (folder / location).read_bytes()
        places = [(p.offset, p.length) for p in emission.placements.values() if p.location == location]
        assert digest == parts_sha256(content, places)
        begin = 8 + int.from_bytes(content[:8], "little")
        assert begin % 4096 == 0
        assert min(p.offset for p in emission.placements.values() if p.location == location) == begin


def test_values_are_those_of_the_checkpoint(checkpoint: Checkpoint, engine: tuple[Path, Emission]) -> None:
    """Every weight of every graph, dequantized, against the checkpoint dequantized, by its worst row."""
    folder, emission = engine
    tensors, wanted = load(folder, emission), dequantized_tensors(checkpoint.folder)
    bounds = {"fp8": 0.04, "bf16": 2.0**-8, "wint8": 0.012, "wint4:32": 0.16}
    seen = set()
    for record in emission.weights:
        if record.weight_class == "exact":
            assert record.verdict == "exact"
            assert record.relative_error == 0
            continue
        base = record.name.removesuffix(".weight")
        data = tensors.get(f"{base}.packed", tensors.get(record.name))
        got = StoredWeight(parse_format(record.format), data, tensors.get(f"{base}.scales")).dequantize()
        if record.weight_class == "experts":
            parts = base.split(".experts.")
            numbers = range(checkpoint.spec.num_experts)
            value = torch.stack([wanted[f"{parts[0]}.experts.{e}.{parts[1]}.weight"] for e in numbers])
        else:
            value = wanted[record.name]
        error = float(((got - value).norm(dim=-1) / value.norm(dim=-1)).max())
        assert error <= (0.0 if record.verdict in ("passed", "exact") else bounds[record.format]), record
        assert error == pytest.approx(record.worst_row_error, rel=2e-2, abs=1e-9), record
        assert record.stored_bytes == data.nbytes + (tensors[f"{base}.scales"].nbytes if record.format != "bf16" else 0)
        seen.add((record.format, record.verdict))
    assert seen == {("wint4:32", "requantized"), ("fp8", "passed"), ("fp8", "quantized"), ("bf16", "rounded"),
                    ("bf16", "exact"), ("wint8", "requantized")}  # fmt: skip


def test_fp8_passes_codes_and_scales_through_bit_for_bit(checkpoint: Checkpoint, engine: tuple[Path, Emission]) -> None:
    folder, emission = engine
    tensors, source = load(folder, emission), read_tensors(checkpoint.folder)
    passed = [record.name for record in emission.weights if record.verdict == "passed"]
    assert len(passed) == 3 * 4 + 2 * 3  # q_a, q_b, kv_a, o of two layers and MTP's, shared experts of two
    for name in passed:
        assert torch.equal(tensors[name].view(torch.uint8), source[name].view(torch.uint8))
        assert torch.equal(tensors[name.replace(".weight", ".scales")], source[f"{name}_scale_inv"])


def hashes(emission: Emission) -> tuple[dict[str, str], dict[str, str]]:
    return emission.parts_sha256, emission.tensor_sha256


@pytest.mark.parametrize("experts", ["wint4:128", "fp8"])
def test_same_bytes_from_another_folder_with_other_threads(
    checkpoint: Checkpoint, tmp_path: Path, experts: str
) -> None:
    formats = {**FORMATS, "experts": experts}
    first = write(checkpoint, tmp_path / "one", formats)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        second = write(checkpoint, tmp_path / "b" / "two", formats, threads=2)
    finally:
        torch.set_num_threads(before)
    assert hashes(first) == hashes(second)
    assert first.weights == second.weights


def test_same_bytes_however_the_pieces_are_cut(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of few rows, so that every weight has several."""
    formats = {**FORMATS, "attention": "wint4:64", "dense_mlp": "wint4:128", "lm_head": "fp8", "kv_b": "wint8"}
    whole = write(checkpoint, tmp_path / "whole", formats)
    for module in ("pieces", "quantize"):
        monkeypatch.setattr(f"dsc.compiler.{module}.RUN_ELEMENTS", 1)
    monkeypatch.setattr("dsc.compiler.pieces.INTEGER_ELEMENTS", 1)
    monkeypatch.setattr("dsc.compiler.pieces.FP8_ELEMENTS", 1)
    monkeypatch.setattr("dsc.compiler.pieces.COPIED_ELEMENTS", 1000)
    cut = write(checkpoint, tmp_path / "cut", formats)
    assert hashes(whole) == hashes(cut)
    assert whole.weights == cut.weights


def test_memory_is_bounded_by_a_piece(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read asks for more than a piece; each source is read through once, in its file's order, and announced."""
    monkeypatch.setattr("dsc.compiler.quantize.SAMPLED_ELEMENTS", 0)
    for module in ("pieces", "quantize"):
        monkeypatch.setattr(f"dsc.compiler.{module}.RUN_ELEMENTS", 1 << 12)
    monkeypatch.setattr("dsc.compiler.pieces.INTEGER_ELEMENTS", 1 << 12)
    monkeypatch.setattr("dsc.compiler.pieces.FP8_ELEMENTS", 1 << 12)
    monkeypatch.setattr("dsc.compiler.pieces.COPIED_ELEMENTS", 1 << 12)
    reads: list[tuple[str, int, int]] = []
    announced: list[str] = []

    def read(name: str, rows: slice | None) -> torch.Tensor:
        values = checkpoint.read(name, rows)
        first, last, _ = (rows or slice(None)).indices(checkpoint.info(name).shape[0])
        assert values.numel() <= max(1 << 12, 128 * checkpoint.info(name).shape[-1])
        reads.append((name, first, last))
        return values

    # Not wint4, whose sample is read twice.
    plan = plan_of(stored(gather(graphs_of(checkpoint)), {**FORMATS, "experts": "wint8"}), checkpoint)
    emit(plan, read, tmp_path, expect=announced.append)
    codes = [item for item in reads if not item[0].endswith("_scale_inv")]
    for name, group in groupby(codes, key=lambda item: item[0]):
        pieces = list(group)
        assert [first for _, first, _ in pieces] == [0, *(last for _, _, last in pieces[:-1])], name
        assert pieces[-1][2] == checkpoint.info(name).shape[0]
    order = [name for name, _ in groupby(codes, key=lambda item: item[0])]
    assert len(order) == len(set(order)) > 100
    places = [position_in(checkpoint)(name) for name in order]
    assert places == sorted(places)
    assert len(set(announced)) > len(order)


def in_cache(path: Path, offset: int) -> bool:
    """Whether a byte of a file can be read without the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError as error:  # a file system that has no such question, or no disk
        pytest.skip(f"{path.parent}: {error.strerror}")
    finally:
        os.close(handle)


def test_what_is_done_with_leaves_the_cache(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Sources after the last job that reads them, what is written once it is on the disk; the bytes stay the same."""
    plan, order = plan_of(stored(gather(graphs_of(checkpoint)), FORMATS), checkpoint), []

    def read(name: str, rows: slice | None) -> torch.Tensor:
        order.append(("read", name))
        return checkpoint.read(name, rows)

    def release(name: str) -> None:
        order.append(("release", name))
        checkpoint.release(name)

    kept = emit(plan, checkpoint.read, tmp_path / "kept")
    released = emit(plan, read, tmp_path / "released", release=release)
    assert hashes(kept) == hashes(released)
    sources = {source.name for job in plan.jobs for source in job.sources}
    last = {name: event for event, name in order}
    assert last == dict.fromkeys(sources, "release")
    for layout in plan.layouts:
        assert in_cache(tmp_path / "kept" / layout.location, layout.nbytes // 2)
        assert not in_cache(tmp_path / "released" / layout.location, layout.nbytes // 2)


def test_builds_larger_than_their_memory_leave_the_cache(checkpoint: Checkpoint) -> None:
    plan = plan_of(gather(graphs_of(checkpoint)), checkpoint)
    size = plan.source_bytes + plan.file_bytes
    assert [outgrows(plan, ram) for ram in (size - 1, size, None)] == [True, False, False]


def test_onnx_external_data_points_at_the_bytes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    graphs = graphs_of(checkpoint)
    weights = gather(graphs)
    emission = emit(plan_of(weights, checkpoint), checkpoint.read, tmp_path)
    place(graphs, emission.placements)
    wanted = dequantized_tensors(checkpoint.folder)
    for graph in graphs:
        onnx.save(graph.to_onnx(), tmp_path / f"{graph.name}.onnx")
        model = onnx.load(tmp_path / f"{graph.name}.onnx")
        arrays = {p.name: onnx.numpy_helper.to_array(p) for p in model.graph.initializer if p.name in weights}
        assert arrays.keys() == graph.weights().keys()
        for name in arrays.keys() & wanted.keys():
            assert torch.equal(torch.from_numpy(arrays[name].copy()), wanted[name]), name
        layer = "model.layers.2" if graph.info.model == "mtp" else "model.layers.1"
        expert = wanted[f"{layer}.mlp.experts.7.up_proj.weight"]
        assert torch.equal(torch.from_numpy(arrays[f"{layer}.mlp.experts.up_proj.weight"][7].copy()), expert)


def one(expression: Expression, name: str = "w.weight") -> dict[str, WeightValues]:
    return {name: WeightValues(name, expression)}


def test_a_weight_with_nan_is_named(tmp_path: Path) -> None:
    values = torch.ones(4, 32)
    values[2, 3] = torch.nan
    source = Source("model.norm.weight", "float32", (4, 32))
    for expression in (source, Quantize(source, "wint8"), Quantize(source, "bf16")):
        with pytest.raises(DscError) as error:
            emit(plan_emission(one(expression)), lambda name, rows: values, tmp_path)
        assert str(error.value) == "weight w.weight: holds NaN or infinity\n  from  model.norm.weight"
    codes = torch.full((4, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    passed = Quantize(Dequantize(Source("q", "float8_e4m3fn", (4, 32)), Source("s", "float32", (1, 1))), "fp8", "data")
    with pytest.raises(DscError, match=r"weight w\.weight: holds NaN"):
        emit(plan_emission(one(passed)), lambda name, rows: codes, tmp_path)


def test_an_expert_of_zeros_is_stored_and_counted(tmp_path: Path) -> None:
    """An expert that no token ever reached may be all zeros, whatever its source's scale says."""
    tensors = {
        "a": torch.full((128, 128), 7.0),
        "b": torch.zeros(128, 128),
        "s": torch.ones(1, 1),
        "z": torch.zeros(1, 1),
    }

    def read(name: str, rows: slice | None) -> torch.Tensor:
        values = tensors[name].to(torch.float8_e4m3fn) if name in "ab" else tensors[name]
        return values if rows is None else values[rows]

    for codes, scale in (("b", "s"), ("a", "z"), ("b", "z")):
        experts = Stack(tuple(
            Dequantize(Source(c, "float8_e4m3fn", (128, 128)), Source(s, "float32", (1, 1)))
            for c, s in (("a", "s"), (codes, scale))
        ))  # fmt: skip
        weights = {}
        for part, name in (("data", "experts.packed"), ("scales", "experts.scales")):
            weights |= one(Quantize(experts, "wint4:32", part), name)
        emission = emit(plan_emission(weights), read, tmp_path)
        (record,) = emission.weights
        assert (record.zero_groups, record.relative_error, record.worst_row_error) == (128 * 4, 0.0, 0.0)
        tensors_out = load(tmp_path, emission)
        assert not tensors_out["experts.packed"][1].any()
        assert bool((tensors_out["experts.scales"][1] == 1).all())


def test_the_first_failure_ends_it(tmp_path: Path) -> None:
    reads: list[str] = []

    def read(name: str, rows: slice | None) -> torch.Tensor:
        reads.append(name)
        if name >= "b":
            raise OSError(f"{name} is gone")
        return torch.zeros(4, 32)

    weights = {}
    for name in "abcdefgh":
        weights |= one(Source(name, "float32", (4, 32)), name)
    for threads in (1, 2):
        reads.clear()
        with pytest.raises(OSError, match="b is gone"):
            emit(plan_emission(weights), read, tmp_path / str(threads), threads=threads)
        assert len(reads) <= 2 * threads
        assert torch.get_num_threads() == 1 or "OMP_NUM_THREADS" not in os.environ


def test_progress_adds_up_to_the_source_bytes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    done: list[int] = []
    plan = plan_of(stored(gather(graphs_of(checkpoint)), FORMATS), checkpoint)
    emit(plan, checkpoint.read, tmp_path, advance=done.append, threads=2)
    assert sum(done) == plan.source_bytes == remaining_bytes(plan, Journal())
    assert len(done) > len(plan.jobs)


# -- evaluation by rows


def test_rows_of_every_kind_of_expression() -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "a": torch.randn(300, 64, generator=generator).bfloat16(),
        "b": torch.randn(100, 64, generator=generator).bfloat16(),
        "codes": torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn),
        "scales": torch.rand(3, 2, generator=generator),
        "small": torch.rand(5, 4, generator=generator),
    }
    asked: list[int] = []

    def read(name: str, rows: slice | None = None) -> torch.Tensor:
        values = tensors[name] if rows is None else tensors[name][rows]
        asked.append(values.numel())
        return values

    a, b = (Source(name, "bfloat16", tuple(tensors[name].shape)) for name in "ab")
    codes, scales = Source("codes", "float8_e4m3fn", (300, 200)), Source("scales", "float32", (3, 2))
    expressions: list[Expression] = [
        a,
        Cast(a, "float32"),
        Concat((a, b, a)),
        Stack((a, a, a)),
        Dequantize(codes, scales),
        Dequantize(codes, Source("small", "float32", (5, 4)), (64, 64)),
        Reshape(a, (600, 32)),
        Reshape(a, (3, 100, 64)),
        Reshape(a, (10, 1920)),
        Reshape(Concat((a, b)), (25, 1024)),
        Quantize(Cast(a, "float32"), "wint4:32"),
        Quantize(Dequantize(codes, scales), "fp8", "scales"),
        Quantize(Stack((Cast(a, "float32"), Cast(a, "float32"))), "wint8"),
    ]
    for expression in expressions:
        whole = evaluate(expression, read)
        assert tuple(whole.shape) == expression.shape
        assert str(whole.dtype) == f"torch.{expression.dtype}"
        last = expression.shape[0]
        for rows in [(0, last), (0, 1), (last - 1, last), (last // 3, last // 2 + 1)]:
            part = evaluate(expression, read, rows)
            assert torch.equal(part.view(torch.uint8), whole[rows[0] : rows[1]].contiguous().view(torch.uint8)), (
                expression
            )
    asked.clear()
    evaluate(Stack((a, a, a)), read, (1, 2))
    evaluate(Concat((a, b)), read, (310, 320))
    evaluate(Reshape(a, (600, 32)), read, (2, 4))
    assert asked == [300 * 64, 10 * 64, 64]


def test_dequantize_against_the_definition() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(100)[: 130 * 140].view(130, 140)
    codes[(codes & 0x7F) == 0x7F] = 0
    tensors = {"c": codes.view(torch.float8_e4m3fn), "s": torch.tensor([[1.5, 2.0**-9], [3.0, 0.1]])}
    expression = Dequantize(Source("c", "float8_e4m3fn", (130, 140)), Source("s", "float32", (2, 2)))
    values = evaluate(expression, lambda name, rows: tensors[name] if rows is None else tensors[name][rows])
    for row, column in [(0, 0), (127, 127), (128, 127), (127, 128), (129, 139)]:
        scale = tensors["s"][row // 128, column // 128]
        assert values[row, column] == tensors["c"][row, column].float() * scale


@given(rows=st.integers(1, 2000), columns=st.integers(1, 3000), elements=st.integers(1, 1 << 20))
def test_row_blocks_cover_every_row_once(rows: int, columns: int, elements: int) -> None:
    blocks = list(row_blocks((rows, columns), elements))
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(rows))
    assert all(start % 128 == 0 for start, _ in blocks)
    assert all((stop - start) * columns <= max(elements, 128 * columns) for start, stop in blocks)


def test_pieces_are_as_large_as_an_expert_of_r1() -> None:
    assert list(row_blocks((2048, 7168))) == [(0, 2048)]
    assert evaluation.PIECE_ELEMENTS * 4 < 70e6


# -- layout


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["uint8", "bfloat16", "float32", "int8", "float8_e4m3fn", "int32", "int64"]),
            st.lists(st.integers(1, 40), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 20_000),
)
def test_layout_is_whole_and_aligned(tensors: list[tuple[str, list[int]]], file_bytes_max: int) -> None:
    layouts = lay_out([(f"t{i}", d, tuple(s)) for i, (d, s) in enumerate(tensors)], "x", file_bytes_max)
    names = [slot.name for layout in layouts for slot in layout.slots]
    assert sorted(names) == sorted(f"t{i}" for i in range(len(tensors)))
    for layout in layouts:
        begin = len(layout.header)
        assert begin % 4096 == 0
        assert int.from_bytes(layout.header[:8], "little") == begin - 8
        entries = json.loads(layout.header[8:])
        ends = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
        assert ends[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(ends))
        assert layout.nbytes == begin + ends[-1][1]
        assert all(slot.offset % 64 == 0 for slot in layout.slots)
        assert layout.nbytes - begin <= file_bytes_max or len(layout.slots) == 1


def test_a_header_larger_than_a_page_takes_the_next(tmp_path: Path) -> None:
    weights = {}
    for i in range(40):
        weights |= one(Source("s", "float32", (3,)), f"{'long' * 10}.{i}")
    emission = emit(plan_emission(weights), lambda name, rows: torch.ones(3), tmp_path)
    assert min(p.offset for p in emission.placements.values()) == 8192
    assert len(load(tmp_path, emission)) == 40 + 39
    assert os.path.getsize(tmp_path / "weights" / "rank0-00001.safetensors") == 8192 + 39 * 64 + 12
