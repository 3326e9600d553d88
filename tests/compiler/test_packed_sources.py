"""Weights that AutoAWQ, GPTQ and compressed-tensors packed: what they mean, what is passed on, what of them is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import ABSENT, change_tensors, make_checkpoint, read_tensors
from support.packed import Module, PackedCheckpoint, pack, pack_checkpoint, quantize

from dsc.compiler import convert, pieces, unpack
from dsc.compiler.checkpoint import Checkpoint, check_names
from dsc.compiler.config import read_config
from dsc.compiler.convert import memory_of, outcome
from dsc.compiler.emission_plan import EmissionPlan, plan_emission
from dsc.compiler.evaluate import evaluate
from dsc.compiler.importer.model import import_main, import_mtp
from dsc.compiler.ir.graph import expression_of
from dsc.compiler.ir.simplify import loses_codes
from dsc.compiler.ir.weight import Concat, DequantizePacked, Expression, Quantize, Source, Stack, WeightValues
from dsc.compiler.ledger import make_ledger
from dsc.compiler.packing import LAYOUTS, declared, parts_of
from dsc.compiler.quantize import Errors
from dsc.plugins.formats import parse_format
from dsc.plugins.stored import StoredWeight
from dsc.runtime.errors import DscError
from dsc.runtime.spec import ModelSpec, Packing

# method, bits, group, symmetric; -1: a group for each row. Widths of the faults family: 256, 320, 128, 96, 64.
LAYOUT_CASES = [
    ("awq", 4, 32, False),
    ("awq", 4, -1, False),
    ("gptq", 4, 64, False),  # 96 columns are one group and a half
    ("gptq", 4, 128, True),
    ("gptq", 8, 32, False),
    ("gptq_v2", 4, 32, False),
    ("gptq_v2", 8, -1, True),
    ("compressed-tensors", 4, 32, False),
    ("compressed-tensors", 4, 32, True),
    ("compressed-tensors", 8, 64, False),
    ("compressed-tensors", 8, -1, True),
]
Pack = Callable[..., PackedCheckpoint]
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A packed checkpoint of the faults family, by pack_checkpoint's options; each is made once, and not to be changed."""
    source = make_checkpoint(
        tmp_path_factory.mktemp("source") / "faults", "faults", num_hidden_layers=2, quantization_config=ABSENT
    )

    @cache
    def made(method: str, **options: Any) -> PackedCheckpoint:
        return pack_checkpoint(tmp_path_factory.mktemp("packed") / "model", source, method, **options)

    return made


@pytest.fixture
def changeable(packs: Pack, tmp_path: Path) -> Pack:
    """The same as a copy of the test's own."""

    def made(method: str, **options: Any) -> PackedCheckpoint:
        found = packs(method, **options)
        shutil.copytree(found.folder, tmp_path / "model")
        return PackedCheckpoint(tmp_path / "model", found.twin, found.modules)

    return made


def open_(folder: Path, **options: Any) -> Checkpoint:
    return Checkpoint.open(folder, read_config(folder), **options)


def imported(checkpoint: Checkpoint) -> dict[str, Expression]:
    spec = checkpoint.spec
    graphs = [import_main(spec, checkpoint.source, 64)]
    if spec.num_mtp_layers:
        graphs.append(import_mtp(spec, checkpoint.source, 64))
    return {name: expression_of(constant) for graph in graphs for name, constant in graph.weights().items()}


# -- what they mean


@pytest.mark.parametrize(("method", "bits", "group", "symmetric"), LAYOUT_CASES)
def test_values_are_code_minus_zero_times_scale_bit_for_bit(
    method: str, bits: int, group: int, symmetric: bool, packs: Pack
) -> None:
    made = packs(method, bits=bits, group=group, symmetric=symmetric)
    checkpoint, twin, compared = open_(made.folder), read_tensors(made.twin), 0
    for name, expression in imported(checkpoint).items():
        for matrix in expression.parts if isinstance(expression, Stack) else (expression,):
            if isinstance(matrix, DequantizePacked):
                module = next(matrix.sources()).name.rpartition(".")[0]
                assert torch.equal(evaluate(matrix, checkpoint.read), twin[f"{module}.weight"]), module
                compared += 1
            elif not name.startswith("rope."):
                assert torch.equal(evaluate(matrix, checkpoint.read).float(), twin[name]), name
    assert compared == len(made.modules)
    zeros = torch.cat([module.zeros.flatten() for module in made.modules.values()])
    assert (len(zeros.unique()) > 4) == (not symmetric)  # else zeros that are not honoured would not show


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_of_every_float(dtype: torch.dtype, packs: Pack) -> None:
    made = packs("awq", group=32, scale_dtype=dtype)
    checkpoint = open_(made.folder)
    matrix = imported(checkpoint)["model.layers.0.mlp.down_proj.weight"]
    values = evaluate(matrix, checkpoint.read)
    assert torch.equal(values, made.modules["model.layers.0.mlp.down_proj"].values())


def random_module(rows: int, columns: int, bits: int, group: int, symmetric: bool, seed: int = 0) -> Module:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return quantize(weight, bits, group, symmetric, torch.float16, least=1)


def expression_of_module(
    module: Module, method: str, bits: int, symmetric: bool
) -> tuple[DequantizePacked, dict[str, torch.Tensor]]:
    """A module as an expression, and its stored tensors by name."""
    packing = Packing(
        method.removesuffix("_v2"), bits, module.group, zeros=not (symmetric and method == "compressed-tensors"),
        zero_offset=int(method == "gptq"),
    )  # fmt: skip
    shape, stored = tuple(module.codes.shape), pack(module, method, bits, symmetric)
    for end, part in parts_of(packing, *shape).items():
        assert (tuple(stored[end].shape), str(stored[end].dtype)[6:] in part.dtypes) == (part.shape, True), end
    sources = {end: Source(end, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for end, t in stored.items()}
    layout = LAYOUTS[packing.method]
    zeros = sources.get(layout.zeros) if packing.zeros else None
    return DequantizePacked(sources[layout.words], sources[layout.scales], zeros, packing, shape), stored


def reader(stored: dict[str, torch.Tensor]) -> unpack.Read:
    return lambda name, rows: stored[name] if rows is None else stored[name][rows]


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_pieces_are_the_whole_however_they_are_cut(data: st.DataObject) -> None:
    method, bits, group, symmetric = data.draw(st.sampled_from(LAYOUT_CASES))
    rows, columns = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    module = random_module(rows, columns, bits, group, symmetric, data.draw(st.integers(0, 9)))
    expression, stored = expression_of_module(module, method, bits, symmetric)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    block = data.draw(st.integers(4, 400))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpack, "BLOCK_BYTES", block)
        got = evaluate(expression, reader(stored), (first, last))
    assert torch.equal(got, module.values()[first:last])


def test_of_a_large_matrix_no_more_than_blocks_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "BLOCK_BYTES", 1 << 10)
    for method in ("awq", "gptq"):
        expression, stored = expression_of_module(random_module(256, 512, 4, 64, False), method, 4, False)
        largest = 0

        def read(name: str, rows: slice | None, stored: dict[str, torch.Tensor] = stored) -> torch.Tensor:
            nonlocal largest
            found = stored[name] if rows is None else stored[name][rows]
            largest = max(largest, found.nbytes)
            return found

        evaluate(expression, read, (8, 24))
        assert largest == stored["scales"].nbytes == 4096  # 1/16 of the words


def test_a_zero_that_implementations_read_differently_is_refused() -> None:
    """GPTQ's first format stores zeros less one: 15 is 16 to the kernels that add 1, and 0 where that overflows."""
    module = random_module(16, 64, 4, 32, False)
    for zero in (0, 16):
        module.zeros[3, 1] = zero
        expression, stored = expression_of_module(module, "gptq", 4, False)
        with pytest.raises(DscError) as raised:
            converted(Quantize(expression, "wint8", "data"), reader(stored))
        assert "holds a stored zero of 15, which some implementations read as 16 and others as 0" in raised.value.text()
        assert "weight w.weight" in raised.value.text()
        assert "checkpoint_format gptq_v2" in raised.value.text()
    module.zeros[3, 1] = 0
    expression, stored = expression_of_module(module, "gptq_v2", 4, False)
    assert torch.equal(evaluate(expression, reader(stored)), module.values())


# -- what is passed on


def plan_of(expression: Quantize) -> EmissionPlan:
    parts = parse_format(expression.format).parts(expression.x.shape)
    named = {"data": "w.packed", "scales": "w.scales"}
    weights = {named[part]: Quantize(expression.x, expression.format, part) for part in parts}
    return plan_emission({name: WeightValues(name, made, "experts") for name, made in weights.items()})


def converted(expression: Quantize, read: unpack.Read) -> tuple[StoredWeight, list[str], Errors]:
    """A weight [N, K] as stored, the outcomes of its jobs, and the last one's errors."""
    plan = plan_of(expression)
    made = {name: torch.zeros(values.nbytes, dtype=torch.uint8) for name, values in plan.weights.items()}

    def write(tensor: str, offset: int, values: torch.Tensor) -> None:
        content = values.contiguous().view(-1).view(torch.uint8)
        made[tensor][offset : offset + len(content)] = content

    outcomes = []
    for job in plan.jobs:
        errors = convert.convert(job, read, write, lambda count: None)
        outcomes.append(outcome(job.segment, errors))
    parsed = parse_format(expression.format)
    parts = parsed.parts(expression.x.shape)
    views = {
        part: made[f"w.{'packed' if part == 'data' else part}"].view(getattr(torch, dtype)).view(shape)
        for part, (dtype, shape) in parts.items()
    }
    return StoredWeight(parsed, views["data"], views.get("scales")), outcomes, errors


def exact_scales(module: Module) -> Module:
    """The same codes with scales that bfloat16 holds."""
    return Module(module.codes, module.zeros, module.scales.bfloat16().to(module.scales.dtype), module.group)


@pytest.mark.parametrize("method", ["awq", "gptq", "gptq_v2", "compressed-tensors"])
@pytest.mark.parametrize(("group", "into"), [(32, 32), (64, 64), (128, 128), (128, 32), (-1, 64)])
def test_symmetric_codes_and_exact_scales_are_passed_bit_for_bit(method: str, group: int, into: int) -> None:
    module = exact_scales(random_module(40, 256, 4, group, True))
    expression, stored = expression_of_module(module, method, 4, True)
    weight, outcomes, errors = converted(Quantize(expression, f"wint4:{into}", "data"), reader(stored))
    assert outcomes == ["passed"]
    assert (errors.square, errors.saturated, errors.zero_groups, errors.grids) == (0, 0, 0, {"of the source": 1})
    codes = module.codes - 8
    want = (codes[:, ::2] & 15) | ((codes[:, 1::2] & 15) << 4)
    assert torch.equal(weight.data, want.to(torch.uint8))
    assert int(codes.min()) < -7  # -8 is a code too
    assert weight.scales is not None
    assert torch.equal(weight.scales.float(), module.scales.float().repeat_interleave(module.group // into, 1))
    assert torch.equal(weight.dequantize(), module.values())


def test_scales_that_bfloat16_does_not_hold_are_rounded_and_codes_are_kept() -> None:
    """Of float16 scales: a 500th of the values, where another grid costs a twentieth."""
    module = random_module(40, 256, 4, 64, True)
    expression, stored = expression_of_module(module, "gptq", 4, True)
    weight, outcomes, errors = converted(Quantize(expression, "wint4:64", "data"), reader(stored))
    assert outcomes == ["requantized"]
    assert errors.grids == {"of the source": 1}
    assert weight.scales is not None
    assert torch.equal(weight.scales, module.scales.bfloat16())
    values, error = module.values().double(), weight.dequantize().double() - module.values().double()
    assert errors.relative == pytest.approx(float(error.norm() / values.norm()), rel=1e-6)
    assert errors.worst_row == pytest.approx(float((error.norm(dim=1) / values.norm(dim=1)).max()), rel=1e-6)
    assert 0 < errors.worst_row < 2**-8
    floats = Quantize(Source("x", "float32", (40, 256)), "wint4:64", "data")
    assert converted(floats, reader({"x": module.values()}))[2].relative > 20 * errors.relative
    smaller, (verdict,), others = converted(Quantize(expression, "wint4:32", "data"), reader(stored))
    assert verdict == "requantized"  # groups of 32 lie within those of 64
    assert others.relative == errors.relative
    assert torch.equal(smaller.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "format_"),
    [(4, 64, False, "wint4:64"), (4, 32, True, "wint4:64"), (8, 64, True, "wint4:64"), (8, -1, True, "wint8")],
)
def test_what_cannot_be_passed_is_rounded_from_its_exact_values(
    bits: int, group: int, symmetric: bool, format_: str
) -> None:
    """Zeros that are not the middle, wider groups, other bits: as the same values in float32 are."""
    module = exact_scales(random_module(40, 256, bits, group, symmetric))
    expression, stored = expression_of_module(module, "gptq", bits, symmetric)
    weight, outcomes, errors = converted(Quantize(expression, format_, "data"), reader(stored))
    floats = Quantize(Source("x", "float32", (40, 256)), format_, "data")
    plain, (verdict,), wanted = converted(floats, reader({"x": module.values()}))
    assert (outcomes, verdict) == (["requantized"], "quantized")
    assert errors == wanted
    assert torch.equal(weight.data, plain.data)
    assert torch.equal(weight.scales, plain.scales)


def test_wider_groups_than_those_of_codes_that_could_be_kept() -> None:
    sources = Source("x", "int32", (8, 32)), Source("s", "bfloat16", (8, 8))
    for packing, format_, group in (
        (Packing("compressed-tensors", 4, 32, zeros=False), "wint4:64", 32),
        (Packing("compressed-tensors", 4, 32, zeros=False), "wint4:32", 0),
        (Packing("compressed-tensors", 4, 32, zeros=False), "wint8", 0),
        (Packing("compressed-tensors", 8, 32, zeros=False), "wint4:64", 0),
    ):
        x = DequantizePacked(*sources, None, packing, (8, 256))
        assert (
            loses_codes(x, format_)
            == loses_codes(Stack((x, x)), format_)
            == loses_codes(Concat((x,)), format_)
            == group
        )
    asymmetric = DequantizePacked(
        *sources, Source("z", "int32", (1, 8)), Packing("compressed-tensors", 4, 32), (8, 256)
    )
    assert loses_codes(asymmetric, "wint4:64") == 0


def test_joined_weights_are_passed_each_by_itself() -> None:
    """fuse_qkv joins rows: one part symmetric, the other not."""
    passed, other = exact_scales(random_module(24, 128, 4, 64, True)), random_module(16, 128, 4, 64, False, seed=1)
    (a, first), (b, second) = (expression_of_module(m, "gptq_v2", 4, False) for m in (passed, other))

    def named(x: DequantizePacked, prefix: str) -> DequantizePacked:
        parts = [Source(f"{prefix}{s.name}", s.dtype, s.shape) for s in x.sources()]
        return DequantizePacked(parts[0], parts[1], parts[2], x.packing, x.to)

    stored = {f"a.{k}": v for k, v in first.items()} | {f"b.{k}": v for k, v in second.items()}
    joint = Concat((named(a, "a."), named(b, "b.")))
    weight, outcomes, _ = converted(Quantize(joint, "wint4:64", "data"), reader(stored))
    assert sorted(outcomes) == ["passed", "requantized"]
    assert torch.equal(weight.dequantize()[:24], passed.values())
    assert not torch.equal(weight.dequantize()[24:], other.values())


def test_groups_of_scale_0_have_scale_1_and_codes_0_and_are_counted() -> None:
    module = exact_scales(random_module(8, 128, 4, 64, True))
    module.scales[2, 1] = 0
    expression, stored = expression_of_module(module, "compressed-tensors", 4, True)
    weight, outcomes, errors = converted(Quantize(expression, "wint4:32", "data"), reader(stored))
    assert (outcomes, errors.zero_groups) == (["passed"], 2)
    assert weight.scales is not None
    assert weight.scales[2].tolist() == [float(module.scales[2, 0])] * 2 + [1.0, 1.0]
    assert torch.equal(weight.dequantize(), module.values())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["awq", "compressed-tensors"])
def test_scales_that_are_not_numbers_are_refused(method: str, symmetric: bool) -> None:
    module = random_module(8, 64, 4, 32, symmetric)
    module.scales[5, 0] = float("inf")
    module.codes[5, 0] = 3
    expression, stored = expression_of_module(module, method, 4, symmetric)
    for format_ in ("wint4:32", "wint8", "bf16"):
        with pytest.raises(DscError, match="holds NaN or infinity"):
            converted(Quantize(expression, format_, "data"), reader(stored))


# -- memory


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_a_larger_matrix_takes_no_more_memory(method: str) -> None:
    packing, found = Packing(method, 4, 128), {}
    layout = LAYOUTS[method]
    for rows in (8192, 65536):
        parts = parts_of(packing, rows, 8192)
        words, scales, zeros = (
            Source(end, "float16" if end == layout.scales else "int32", parts[end].shape)
            for end in (layout.words, layout.scales, layout.zeros)
        )
        x = DequantizePacked(words, scales, zeros, packing, (rows, 8192))
        for format_ in ("wint4:128", "fp8", "bf16"):
            (job,) = plan_of(Quantize(x, format_, "data")).jobs
            found[format_, rows] = memory_of(job)
    held = pieces.HELD_BYTES if layout.turned else 0
    assert found["wint4:128", 8192] == found["wint4:128", 65536] == 24 * (1 << 22) + held
    assert found["bf16", 8192] == found["bf16", 65536] == 40 * (1 << (22 if layout.turned else 18)) + held
    assert found["fp8", 8192] == found["fp8", 65536] == 40 * (1 << (22 if layout.turned else 21)) + held


@pytest.mark.parametrize("elements", [1 << 9, 1 << 11])
@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
@pytest.mark.parametrize("format_", ["wint4:64", "wint8", "fp8", "bf16", "fp32"])
def test_stored_bytes_do_not_depend_on_pieces(
    format_: str, method: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on whether words are held between them."""
    for symmetric in (True, False):
        expression, stored = expression_of_module(random_module(150, 128, 4, 64, symmetric), method, 4, symmetric)
        whole, outcomes, errors = converted(Quantize(expression, format_, "data"), reader(stored))
        for name in ("INTEGER_ELEMENTS", "FP8_ELEMENTS", "RUN_ELEMENTS", "COPIED_ELEMENTS"):
            monkeypatch.setattr(pieces, name, elements)
        monkeypatch.setattr(convert, "HELD_BYTES", 0)
        cut, again, more = converted(Quantize(expression, format_, "data"), reader(stored))
        monkeypatch.undo()
        assert torch.equal(cut.data.view(torch.uint8), whole.data.view(torch.uint8))
        assert cut.scales is None or torch.equal(cut.scales, whole.scales)
        assert again == outcomes
        assert more.square == pytest.approx(errors.square, rel=1e-12)


# -- names


def test_the_ledger_accounts_for_every_tensor(packs: Pack) -> None:
    made = packs("gptq", group=32)
    checkpoint = open_(made.folder)
    data = json.loads(json.dumps(make_ledger(checkpoint, imported(checkpoint)).to_json()))
    assert sum(part["count"] for part in data.values()) == len(checkpoint.names())
    ruled = data["dropped"]["tensors"]["g_idx: columns are in the order of their groups"]
    assert ruled == sorted(f"{module}.g_idx" for module in made.modules)
    ends = ("qweight", "qzeros", "scales")
    assert {f"{module}.{end}" for module in made.modules for end in ends} <= set(data["derived"]["tensors"])
    assert "model.norm.weight" in data["consumed"]["tensors"]


@pytest.mark.parametrize(
    ("dtype", "symmetric", "format_", "state"),
    [
        (torch.bfloat16, True, "wint4:32", "consumed"),
        (torch.bfloat16, True, "wint4:64", "derived"),  # wider groups
        (torch.float16, True, "wint4:32", "derived"),  # only the values tell
        (torch.bfloat16, False, "wint4:32", "derived"),
        (torch.bfloat16, True, "wint8", "derived"),
    ],
)
def test_consumed_is_what_is_certain_to_be_passed(
    dtype: torch.dtype, symmetric: bool, format_: str, state: str, packs: Pack
) -> None:
    made = packs("compressed-tensors", group=32, symmetric=symmetric, scale_dtype=dtype)
    checkpoint = open_(made.folder)
    weights = imported(checkpoint)
    stacked = "model.layers.1.mlp.experts.up_proj.weight"
    ledger = make_ledger(checkpoint, {**weights, stacked: Quantize(weights[stacked], format_, "data")})
    found = {entry.name: entry.state for entry in ledger.entries}
    assert found[f"{EXPERT}.weight_packed"] == found[f"{EXPERT}.weight_scale"] == state
    assert found[f"{EXPERT}.weight_shape"] == "dropped"


def fault(folder: Path) -> str:
    with pytest.raises(DscError) as raised:
        open_(folder)
    return str(raised.value)


@pytest.mark.parametrize(
    ("method", "end"),
    [
        ("awq", "qzeros"),
        ("awq", "scales"),
        ("awq", "qweight"),
        ("gptq", "qzeros"),
        ("compressed-tensors", "weight_scale"),
        ("compressed-tensors", "weight_zero_point"),
    ],
)
def test_a_missing_partner_is_named(method: str, end: str, changeable: Pack) -> None:
    made = changeable(method, group=32)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{EXPERT}.{end}"]

    change_tensors(made.folder, change)
    text = fault(made.folder)
    assert f"1 of {len(read_tensors(made.folder)) + 1} tensors are missing" in text
    assert f"{EXPERT}.{end}" in text


def test_tensors_that_only_tell_may_be_absent(changeable: Pack) -> None:
    made = changeable("gptq", group=32)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]

    change_tensors(made.folder, change)
    checkpoint = open_(made.folder)
    make_ledger(checkpoint, imported(checkpoint))


@pytest.mark.parametrize(
    ("method", "end", "change", "wanted"),
    [
        ("awq", "qweight", lambda t: t.T.contiguous(), "int32 [256, 12]"),
        ("awq", "qzeros", lambda t: t[:, :-1].contiguous(), "int32 [8, 12]"),
        ("awq", "scales", lambda t: t.double(), "float16 or bfloat16 or float32 [8, 96]"),
        ("gptq", "qweight", lambda t: t[:-1].clone(), "int32 [32, 96]"),
        ("gptq", "g_idx", lambda t: t[:-1].clone(), "int32 or int64 [256]"),
        ("compressed-tensors", "weight_packed", lambda t: t.view(torch.uint8).clone(), "int32 [96, 32]"),
        ("compressed-tensors", "weight_scale", lambda t: t[:, :1].clone(), "float16 or bfloat16 or float32 [96, 8]"),
        ("compressed-tensors", "weight_zero_point", lambda t: t.T.contiguous(), "int32 [12, 8]"),
    ],
)
def test_shapes_are_checked_before_any_work(
    method: str, end: str, change: Callable[[torch.Tensor], torch.Tensor], wanted: str, changeable: Pack
) -> None:
    made = changeable(method, group=32)

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{EXPERT}.{end}"] = change(tensors[f"{EXPERT}.{end}"])

    change_tensors(made.folder, apply)
    text = fault(made.folder)
    assert f"{EXPERT}.{end} does not fit config.json" in text
    assert f"wanted  {wanted}" in text.replace("wanted ", "wanted  ").replace("   ", "  ")


@pytest.mark.parametrize(
    ("method", "end", "change", "told"),
    [
        ("gptq", "g_idx", lambda t: t.flip(0), ["columns are not in the order of their groups", "column 0 in group 0"]),
        ("compressed-tensors", "weight_shape", lambda t: t.flip(0), ["does not fit config.json", "[96, 256]"]),
    ],
)
def test_what_no_graph_reads_must_hold_what_its_rule_says(
    method: str, end: str, change: Callable[[torch.Tensor], torch.Tensor], told: list[str], changeable: Pack
) -> None:
    made = changeable(method, group=32)

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{EXPERT}.{end}"] = change(tensors[f"{EXPERT}.{end}"])

    change_tensors(made.folder, apply)
    checkpoint = open_(made.folder)
    with pytest.raises(DscError) as raised:
        make_ledger(checkpoint, imported(checkpoint))
    for piece in (f"{EXPERT}.{end}", *told):
        assert piece in raised.value.text()


def test_unknown_tensors_and_modules_stored_twice_are_named(changeable: Pack) -> None:
    made = changeable("awq", group=32)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{EXPERT}.g_idx"] = torch.zeros(256, dtype=torch.int32)
        tensors[f"{EXPERT}.bias"] = torch.zeros(96)
        other = EXPERT.replace(".3.", ".4.")
        tensors[f"{other}.weight"] = torch.zeros(96, 256, dtype=torch.float16)

    change_tensors(made.folder, change)
    text = fault(made.folder)
    assert f"{EXPERT}.g_idx is unknown" in text
    assert f"{EXPERT}.bias is unknown" in text
    assert "3 packed tensors are of modules whose weight is stored too" in text


# -- which modules are packed


KIMI = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


def only_experts(module: str) -> bool:
    return ".experts." in module


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("compressed-tensors", {"ignore": KIMI}),
        ("awq", {"modules_to_not_convert": ["self_attn", "shared_experts", "layers.0.mlp"]}),
        ("gptq", {"dynamic": {"-:.*(self_attn|shared_experts|layers.0).*": {}}}),
    ],
)
def test_experts_alone_are_packed(method: str, config: dict[str, Any], changeable: Pack, packs: Pack) -> None:
    """Kimi-K2-Thinking stores its experts so. Where lists and tensors agree there is nothing to tell."""
    made = packs(method, group=32, packs=only_experts)
    path = changeable(method, group=32, packs=only_experts).folder / "config.json"
    data = json.loads(path.read_text())
    data["quantization_config"].update(config)
    path.write_text(json.dumps(data))
    checkpoint = open_(path.parent)
    assert checkpoint.notes == ()
    twin = read_tensors(made.twin)
    weights = imported(checkpoint)
    attention = weights["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(evaluate(attention, checkpoint.read), twin["model.layers.0.self_attn.o_proj.weight"])
    make_ledger(checkpoint, weights)
    spec, notes = check_names(path.parent, read_config(path.parent), set(checkpoint.names()))
    assert (spec, notes) == (checkpoint.spec, ())


def test_what_is_stored_decides_and_contradictions_are_told(packs: Pack, changeable: Pack) -> None:
    made = changeable("awq", group=32, packs=only_experts)
    (note,) = open_(made.folder).notes  # config.json names no module that is not packed
    assert note.startswith("config.json says that 24 modules are packed, they are stored unpacked: model.layers.")
    path = packs("awq", group=32).folder
    spec = read_config(path)
    kept = ModelSpec(
        **{**vars(spec), "source": type(spec.source)(**{**vars(spec.source), "unpacked": ("*kv_b_proj",)})}
    )
    (note,) = Checkpoint.open(path, kept).notes
    assert note == (
        "config.json says that 3 modules are unpacked, they are stored packed: model.layers.{0-2}.self_attn.kv_b_proj"
    )


def test_names_in_lists() -> None:
    says = declared((), ("a.b", "*shared", "re:.*attn"))
    assert [says(name) for name in ("a.b", "a.b.c", "x.shared_experts.y", "x.attn.q", "x.mlp")] == [
        False, True, False, False, True,
    ]  # fmt: skip
    says = declared(("re:.*experts.*",), ("re:.*shared.*",))
    assert [says(name) for name in ("x.experts.0", "x.shared_experts", "x.mlp")] == [True, False, False]


def test_the_spec_goes_through_json(packs: Pack) -> None:
    for method in ("awq", "gptq", "compressed-tensors"):
        spec = read_config(packs(method, group=32).folder)
        assert spec.source.packing is not None
        assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
