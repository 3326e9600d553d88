"""`dsc verify`: numbers agree with transformers', the fp32 engine has none to speak of, and the certificate is kept."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.damage import change_tensor, double_at, rehash
from support.engines import ROOT, TINY_R1, compile_tiny, fp32_recipe
from support.families import make_checkpoint
from support.oracle import Oracle
from support.quality import judge

from dsc import runtime
from dsc.compiler.build import RandomWeights, compile_engine
from dsc.compiler.certify import reference
from dsc.compiler.certify.certify import check_budget, verify_engine
from dsc.compiler.certify.device import open_device
from dsc.compiler.certify.measures import compare_rows
from dsc.compiler.certify.numerics import Numerics, measure
from dsc.compiler.certify.segments import cut
from dsc.compiler.certify.steps import make_steps
from dsc.compiler.certify.text import read_windows
from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.cli import main
from dsc.compiler.config import read_config
from dsc.compiler.recipe import load_recipe, parse_recipe
from dsc.runtime import certificate
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.batch import Batch, Segment
from dsc.runtime.errors import DscError

from support.engines import prompt_tokens  # isort: skip


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("engines")
    return cache(lambda name: compile_tiny(f"tiny-r1-{name}", folder))


@pytest.fixture(scope="module")
def certify(build: Callable[[str], Path]) -> Callable[[str], certificate.Certificate]:
    return cache(lambda name: verify_engine(build(name), windows=2, window_tokens=128))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(TINY_R1, tmp_path_factory.mktemp("oracle") / "float32")


# -- numbers


def test_a_float32_engine_is_the_unquantized_model(certify: Callable[[str], certificate.Certificate]) -> None:
    found = certify("fp32")
    assert [(layer.model, layer.layer) for layer in found.layers] == [
        ("main", 0), ("main", 1), ("main", 2), ("main", 3), ("mtp", 4),
    ]  # fmt: skip
    for layer in found.layers:
        for errors in (layer.reached, layer.alone):
            assert errors.worst_row_error < 1e-4
            assert errors.worst_row_cosine > 1 - 1e-6
            assert errors.largest > 1  # of the stream, not of its error
    end = found.end_to_end
    assert abs(end.kl) < 1e-8
    assert end.top1 == 1.0
    assert end.nats == pytest.approx(end.reference_nats, abs=1e-6)
    assert found.mtp is not None
    assert found.mtp.engine == found.mtp.reference


@pytest.mark.parametrize("name", ["wint4", "wint8", "fp8", "bf16"])
def test_predictions_are_judged_as_by_transformers(
    name: str, certify: Callable[[str], certificate.Certificate], build: Callable[[str], Path], oracle: Oracle
) -> None:
    """The same windows through the engine as it is loaded, against transformers in float32."""
    windows, text = read_windows(EngineFolder.open(build(name)), None, 2, 128)
    assert (text.windows, text.tokens) == (2, 256)
    engine = _logits(runtime.load(build(name)), windows)
    tokens = {tuple(window): oracle.main(window) for window in windows}
    quality = judge(lambda w: engine[tuple(w)], lambda w: tokens[tuple(w)][0], windows)
    end = certify(name).end_to_end
    assert end.tokens == quality.tokens == 254
    assert end.kl == pytest.approx(quality.kl, rel=0.01, abs=1e-6)
    assert end.nats == pytest.approx(quality.nats, abs=1e-5)
    assert end.top1 == pytest.approx(quality.top1)
    first = [oracle.mtp(window[1:], tokens[tuple(window)][1][:-1])[0].argmax(-1) for window in windows]
    wanted = [tokens[tuple(window)][0].argmax(-1)[1:] for window in windows]
    accepted = float((torch.cat(first) == torch.cat(wanted)).double().mean())
    mtp = certify(name).mtp
    assert mtp is not None
    assert mtp.tokens == 254
    assert mtp.reference == pytest.approx(accepted, abs=2 / 254)
    assert mtp.engine == pytest.approx(accepted, abs=0.1)


def _logits(engine: runtime.Engine, windows: list[list[int]]) -> dict[tuple[int, ...], torch.Tensor]:
    """Of all windows in one step, as they were certified: bf16 rounds differently in steps of another size."""
    block = engine.manifest.kv_cache.block_tokens
    counts = [-(-len(window) // block) for window in windows]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    segments = [
        Segment(window, 0, list(range(start, start + count)), logits=len(window))
        for window, start, count in zip(windows, starts, counts, strict=True)
    ]
    logits = engine.forward(Batch.of(segments, block), phase="prefill").float()
    return {tuple(w): rows for w, rows in zip(windows, logits.split([len(w) for w in windows]), strict=True)}


def test_coarser_formats_are_further_away(certify: Callable[[str], certificate.Certificate]) -> None:
    found = [certify(name) for name in ("fp32", "bf16", "wint8", "wint4")]
    kls = [item.end_to_end.kl for item in found]
    assert kls == sorted(kls)
    assert 0.01 < kls[-1] < 0.1
    float32, bf16, wint8, wint4 = found
    for before, after in ((float32, bf16), (float32, wint8), (wint8, wint4)):
        for one, other in zip(before.layers, after.layers, strict=True):
            assert one.alone.relative_error < other.alone.relative_error
    assert wint4.layers[0].alone == wint4.layers[0].reached  # the first layer has nothing before it
    assert wint4.layers[3].alone.relative_error < wint4.layers[3].reached.relative_error
    assert wint4.stored.saturated > 0


@pytest.mark.parametrize("family", ["v2-lite", "v2", "r1", "v3.1", "k2", "faults"])
def test_every_family(family: str, tmp_path: Path) -> None:
    """q_proj and q_a, MTP and none, odd widths; ragged windows over several steps."""
    folder = make_checkpoint(tmp_path / family, family)
    recipe = fp32_recipe(mtp=bool(read_config(folder).num_mtp_layers))
    built = compile_engine(recipe, model=str(folder), output=tmp_path / "engine").folder
    checkpoint = Checkpoint.open(folder, read_config(folder), mtp=recipe.mtp.enabled)
    engine = EngineFolder.open(built)
    windows = [*prompt_tokens(3, 150, 500), [5, 6], *prompt_tokens(2, 70, 500, seed=1)]
    found: Numerics = measure(engine, recipe, checkpoint, windows, *open_device(engine, None))
    assert found.end_to_end.tokens == 3 * 149 + 1 + 2 * 69
    assert abs(found.end_to_end.kl) < 1e-6
    assert len(found.layers) == checkpoint.spec.num_layers + checkpoint.spec.num_mtp_layers
    assert max(layer.alone.worst_row_error for layer in found.layers) < 1e-3


def test_the_reference_holds_a_matrix_or_an_expert_at_a_time(
    build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    evaluate = reference.evaluate
    monkeypatch.setattr(reference, "evaluate", lambda e, *rest: read.append(e.shape) or evaluate(e, *rest))
    verify_engine(build("bf16"), windows=1, window_tokens=32)
    assert read
    assert all(len(shape) <= 2 for shape in read), max(read, key=len)


def test_a_matrix_is_gone_before_the_next_one(build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    dequantize = reference.SourceWeight.dequantize

    def watched(self: reference.SourceWeight) -> torch.Tensor:
        held = [values for values in (ref() for ref in made) if values is not None]
        values = dequantize(self)
        assert all(values is other for other in held)  # the head's, which is asked for again
        made.append(weakref.ref(values))
        return values

    monkeypatch.setattr(reference.SourceWeight, "dequantize", watched)
    verify_engine(build("bf16"), windows=1, window_tokens=150)
    assert len(made) > 100


def test_a_packed_weights_pages_are_given_back(build: Callable[[str], Path]) -> None:
    folder = EngineFolder.open(build("wint4"))
    _, bind = open_device(folder, None)
    segment = next(segment.program for segment in cut(folder.program("main.prefill")) if segment.layer == 2)
    read = sum(o.bytes for o in segment.operands.values() if o.role == "weight")
    folder.release_pages()
    assert mapped_bytes(folder.path) == 0
    for operand in segment.operands.values():
        if operand.role == "weight":
            folder.tensor(operand.tensor).view(torch.uint8).sum()
    assert mapped_bytes(folder.path) >= read
    held = bind(segment)
    assert mapped_bytes(folder.path) < read / 20
    del held


def mapped_bytes(folder: Path) -> int:
    """Resident bytes of this process's mappings of an engine's weights."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(".safetensors") and str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_segments_are_the_program(build: Callable[[str], Path]) -> None:
    folder = EngineFolder.open(build("wint4"))
    for name in ("main.prefill", "main.decode", "mtp.prefill"):
        program = folder.program(name)
        segments = cut(program)
        assert tuple(node for segment in segments for node in segment.program.nodes) == program.nodes
        layers = [segment.layer for segment in segments if segment.layer is not None]
        assert layers == ([4] if name.startswith("mtp") else [0, 1, 2, 3])
        assert [segment.is_head for segment in segments] == [False] * (len(segments) - 1) + [True]


def test_steps_hold_whole_windows() -> None:
    windows = [[1] * 5, [2] * 9, [3] * 3, [4] * 3, [5] * 3]
    steps = make_steps(windows, block_tokens=4, max_tokens=12, max_sequences=3)
    assert [step.inputs["tokens"].tolist() for step in steps] == [[1] * 5, [2] * 9 + [3] * 3, [4] * 3 + [5] * 3]
    assert [(step.rows.start, step.rows.stop) for step in steps] == [(0, 5), (5, 17), (17, 23)]
    assert [step.num_blocks for step in steps] == [2, 4, 2]


def test_rows_are_judged_one_by_one() -> None:
    want = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    got = want.clone()
    got[7] = 0
    found = compare_rows(got, want)
    assert found.worst_row_error == pytest.approx(1)
    assert found.worst_row_cosine == 0
    assert found.relative_error < 0.2
    got[9, 3] = torch.nan
    assert compare_rows(got, want).non_finite == 1
    assert compare_rows(want, want) == certificate.RowErrors(
        0, 0, pytest.approx(1), pytest.approx(1), 0, pytest.approx(float(want.abs().max()))
    )


# -- the certificate


def test_the_certificate_is_kept_outside_the_content_hash(build: Callable[[str], Path], tmp_path: Path) -> None:
    engine = compile_tiny("tiny-r1-wint8", tmp_path)
    before = EngineFolder.open(engine).content_hash
    assert certificate.read(EngineFolder.open(engine)) is None
    made = verify_engine(engine, windows=1, window_tokens=32)
    folder = EngineFolder.open(engine)
    folder.verify_hashes()
    assert folder.content_hash == before == made.engine
    kept = certificate.read(folder)
    assert kept is not None
    assert kept.to_json() == made.to_json()
    assert kept.stored.tensors == len(folder.manifest.tensors)
    change_tensor(engine, "model.norm.weight", double_at(3))
    rehash(engine)
    with pytest.raises(DscError, match="belongs to another engine"):
        certificate.read(EngineFolder.open(engine))


def test_a_text_of_ones_own(build: Callable[[str], Path], tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("import heapq\n" * 30)
    result = CliRunner().invoke(
        main, ["verify", str(build("wint8")), "--text", str(text), "--window-tokens", "64", "--json"]
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["text"]["name"] == "own.txt"
    assert data["end_to_end"]["tokens"] == data["text"]["tokens"] - data["text"]["windows"]
    text.write_bytes(b"\xff\xfe\x00")
    assert CliRunner().invoke(main, ["verify", str(build("wint8")), "--text", str(text)]).exit_code == 2
    text.write_text("")
    result = CliRunner().invoke(main, ["verify", str(build("wint8")), "--text", str(text)])
    assert "the text is too short" in result.output


def test_what_the_command_prints(build: Callable[[str], Path]) -> None:
    arguments = ["verify", str(build("wint4")), "--against", str(TINY_R1), "--windows", "1", "--window-tokens", "48"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    for part in ("main 3", "mtp 4", "top-1 agreement", "MTP acceptance", "132 compared"):
        assert part in result.output
    refused = CliRunner().invoke(main, [*arguments, "--max-kl", "0.0001"])
    assert refused.exit_code == 2
    assert "too far from the unquantized model" in refused.output


# -- budgets


def recipe_with_budget(max_kl: float) -> str:
    text = (ROOT / "recipes" / "tiny-r1-wint4.yaml").read_text()
    return text.replace("passes:\n", f"verify: {{max_kl: {max_kl}}}\npasses:\n")


def test_a_build_over_its_budget_fails(tmp_path: Path) -> None:
    recipe = parse_recipe(recipe_with_budget(0.001), "strict.yaml", "strict")
    with pytest.raises(DscError) as raised:
        compile_engine(recipe, model=str(TINY_R1), output=tmp_path / "engine")
    assert raised.value.wanted == "max_kl: 0.001"
    assert "adds most" in raised.value.text()
    assert list(tmp_path.iterdir()) == []


def test_a_build_within_its_budget_has_a_certificate(tmp_path: Path) -> None:
    recipe = parse_recipe(recipe_with_budget(0.08), "kind.yaml", "kind")
    built = compile_engine(recipe, model=str(TINY_R1), output=tmp_path / "engine")
    kept = certificate.read(EngineFolder.open(built.folder))
    assert kept is not None
    assert 0 < kept.end_to_end.kl < 0.08
    assert any(note.startswith("verified: KL 0.0") for note in built.notes)


def test_random_weights_have_no_budget(tmp_path: Path) -> None:
    recipe = parse_recipe(recipe_with_budget(0.001), "strict.yaml", "strict")
    built = compile_engine(recipe, model=str(TINY_R1), output=tmp_path / "engine", random=RandomWeights())
    with pytest.raises(DscError, match="random weights"):
        verify_engine(built.folder)


def test_a_budget_wants_a_tokenizer(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "r1")
    (folder / "tokenizer.json").unlink()
    recipe = parse_recipe(recipe_with_budget(0.08), "kind.yaml", "kind")
    with pytest.raises(DscError, match="verify needs the tokenizer"):
        compile_engine(recipe, model=str(folder), output=tmp_path / "engine")


def test_what_is_not_finite_fails_whatever_the_budget(certify: Callable[[str], certificate.Certificate]) -> None:
    from dataclasses import replace

    good = certify("wint8")
    check_budget(good, {"max_kl": 1.0}, "here")
    with pytest.raises(DscError, match="NaN or infinity"):
        check_budget(replace(good, end_to_end=replace(good.end_to_end, non_finite=1)), {}, "here")
    with pytest.raises(DscError, match="too far"):
        check_budget(replace(good, end_to_end=replace(good.end_to_end, kl=float("nan"))), {"max_kl": 1.0}, "here")


def test_another_checkpoint_is_told(build: Callable[[str], Path], tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "r1")
    with pytest.raises(DscError) as raised:
        verify_engine(build("wint4"), str(other))
    assert "num_layers differs from the engine's" in raised.value.text()
    assert load_recipe("tiny-r1-wint4").verify is None
