"""Random weights: the same bytes however they are drawn, distributed as promised, and an engine of a model never downloaded."""

import hashlib
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.engines import TINY_R1

from dsc.compiler.build import RandomWeights, compile_engine
from dsc.compiler.cli import main
from dsc.compiler.model_shapes import KNOWN, first_layers, read_shape
from dsc.compiler.random_checkpoint import DEVIATION, RandomCheckpoint
from dsc.compiler.random_numbers import LEVELS, data_table, draw, float_table, scale_table
from dsc.compiler.recipe import load_recipe
from dsc.plugins.formats import parse_format
from dsc.plugins.stored import StoredWeight
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.executor import Executor

FORMATS = ("fp8", "wint8", "wint4:128", "wint4:64", "wint4:32")
INDEX = torch.arange(LEVELS, dtype=torch.int32)


def drawn(format_: str, rows: int, columns: int) -> StoredWeight:
    parsed = parse_format(format_)
    parts = parsed.parts((rows, columns))
    made = {}
    for part, make in (("data", data_table), ("scales", scale_table)):
        arguments = (parsed, columns) if part == "data" else (parsed, columns, DEVIATION)
        shape = parts[part][1]
        made[part] = draw(make(*arguments), f"{format_}.{part}", 0, math.prod(shape)).view(shape)
    return StoredWeight(parsed, made["data"], made["scales"])


@pytest.mark.parametrize("format_", FORMATS)
def test_stored_formats_hold_the_normal_distribution(format_: str):
    weight = drawn(format_, 512, 2048)
    parts = weight.format.parts((512, 2048))
    assert str(weight.data.dtype).removeprefix("torch.") == parts["data"][0]
    assert str(weight.scales.dtype).removeprefix("torch.") == parts["scales"][0]
    values = weight.dequantize().double()
    assert float(values.std()) == pytest.approx(DEVIATION, rel=0.02)
    assert abs(float(values.mean())) < 4 * DEVIATION / 1000
    within = (values.abs() < DEVIATION).double().mean()
    assert float(within) == pytest.approx(0.683, abs=0.08)  # wint4 steps are wide
    rows = values / DEVIATION / 2048**0.5
    product = (rows @ rows.T).fill_diagonal_(0)
    assert float(product.abs().max()) < 6 / 2048**0.5


def test_floats_are_normal():
    values = draw(float_table("float32", 1.0), "x", 0, 1 << 20).double()
    assert float(values.mean()) == pytest.approx(0, abs=0.005)
    for sigmas, share in ((0.5, 0.38292), (1, 0.68269), (2, 0.95450), (3, 0.99730)):
        assert float((values.abs() < sigmas).double().mean()) == pytest.approx(share, abs=0.002)
    exact = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(LEVELS).double() + 0.5) / LEVELS)
    torch.testing.assert_close(float_table("float32", 1.0).double(), exact, rtol=0, atol=2e-6)


def test_draws_are_uniform_and_unlike_each_other():
    count = 1 << 21
    first, second = (draw(INDEX, name, 0, count) for name in "ab")
    expected = count / LEVELS
    for values in (first, second):
        spread = ((torch.bincount(values, minlength=LEVELS) - expected) ** 2 / expected).mean()
        assert float(spread) == pytest.approx(1, abs=0.05)
    a, b = ((values.double() + 0.5) / LEVELS * 12**0.5 - 3**0.5 for values in (first, second))
    limit = 5 / count**0.5
    assert abs(float((a * b).mean())) < limit
    for lag in (1, 2, 3, 64, 1024, 7168):
        assert abs(float((a[:-lag] * a[lag:]).mean())) < limit, lag


def test_a_piece_is_the_same_alone_and_in_the_whole():
    whole = draw(INDEX, "x", 0, 700_001)
    cuts = [0, 1, 2, 3, 1000, 262_144, 262_145, 524_289, 700_001]
    pieces = [draw(INDEX, "x", a, b - a) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), whole)


def test_the_bytes_of_any_machine():
    """Pinned: another processor, thread count or version of torch must make the same."""
    digests = {}
    for format_ in ("fp8", "wint8", "wint4:128"):
        weight = drawn(format_, 256, 512)
        content = weight.data.view(torch.uint8).numpy().tobytes() + weight.scales.view(torch.uint8).numpy().tobytes()
        digests[format_] = hashlib.sha256(content).hexdigest()[:16]
    assert digests == DIGESTS


DIGESTS = {"fp8": "6b52aa0aad7643be", "wint8": "c692fb8deaa293d5", "wint4:128": "e43db2e1ba1d8d41"}


@pytest.mark.parametrize("recipe", ["tiny-r1-fp32", "tiny-r1-fp8", "tiny-r1-wint4"])
def test_an_engine_is_the_same_twice_and_runs(tmp_path: Path, recipe: str):
    hashes = []
    for name, threads in (("a", 1), ("b", 2)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        built = compile_engine(
            load_recipe(recipe), model=str(TINY_R1), output=tmp_path / name, random=RandomWeights(layers=3)
        )
        torch.set_num_threads(before)
        hashes.append(EngineFolder.open(built.folder).content_hash)
    assert hashes[0] == hashes[1]
    assert built.notes == ("weights are random: DeepseekV3ForCausalLM of 1 dense and 2 MoE layers",)
    engine = EngineFolder.open(built.folder)
    assert engine.manifest.models.keys() == {"main", "sample"}
    assert "random weights" in str(engine.manifest.recipe["model"])
    if recipe != "tiny-r1-fp32":  # it has no pass that chooses formats: its weights are what the source would be
        verdicts = {record["verdict"] for record in engine.report["weights"] if record["weight_class"] != "exact"}
        assert verdicts == {"random"}
    for tensor in engine.manifest.tensors:
        if tensor.endswith("norm.weight"):
            assert bool((engine.tensor(tensor) == 1).all()), tensor


def test_experts_of_a_layer_differ_and_so_do_their_parts(tmp_path: Path):
    built = compile_engine(
        load_recipe("tiny-r1-wint4"), model=str(TINY_R1), output=tmp_path / "e", random=RandomWeights(layers=2)
    )
    engine = EngineFolder.open(built.folder)
    name = "model.layers.1.mlp.experts.{}_proj.packed"
    tensors = [engine.tensor(name.format(part)).flatten(1) for part in ("gate", "up")]
    rows = torch.cat(tensors)
    assert len(torch.unique(rows, dim=0)) == len(rows) == 32


def test_known_models_have_the_released_shapes():
    for model, layers, experts in (("deepseek-ai/DeepSeek-R1", 61, 256), ("deepseek-ai/DeepSeek-V2-Lite", 27, 64)):
        spec, _ = read_shape(model)
        assert (spec.num_layers, spec.num_experts) == (layers, experts)
    r1, lite = read_shape("deepseek-ai/DeepSeek-R1")[0], read_shape("deepseek-ai/DeepSeek-V2-Lite-Chat")[0]
    assert r1.softmax_scale == pytest.approx(0.135234, abs=1e-6)
    assert lite.softmax_scale == pytest.approx(0.11472, abs=1e-5)
    checkpoint = RandomCheckpoint.open("deepseek-ai/DeepSeek-R1")
    values = sum(math.prod(checkpoint.info(n).shape) for n in checkpoint.names() if not n.endswith("_scale_inv"))
    assert values / 1e9 == pytest.approx(682.6, abs=0.1)
    assert all(KNOWN[name] in ("deepseek-r1.json", "deepseek-v2-lite.json") for name in KNOWN)


def test_slices_keep_a_dense_layer_and_have_experts():
    spec, _ = read_shape("deepseek-ai/DeepSeek-R1")
    kept = {layers: first_layers(spec, layers).num_dense_layers for layers in (1, 2, 3, 4, 5, 61)}
    assert kept == {1: 1, 2: 1, 3: 1, 4: 3, 5: 3, 61: 3}
    with pytest.raises(DscError) as error:
        first_layers(spec, 62)
    assert error.value.wanted == "--layers 1 to 61"


def test_the_command(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((TINY_R1 / "config.json").read_text())
    arguments = ["compile", "--recipe", "tiny-r1-wint4", "--model", str(folder), "--output", str(tmp_path / "e.engine")]
    refused = CliRunner().invoke(main, [*arguments, "--layers", "2"])
    assert (refused.exit_code, "--weights random" in refused.output) == (2, True)
    done = CliRunner().invoke(main, [*arguments, "--weights", "random", "--layers", "2", "--mtp", "--json"])
    assert done.exit_code == 0, done.output
    engine = EngineFolder.open(json.loads(done.output)["folder"])
    assert engine.spec.num_mtp_layers == 1
    assert engine.manifest.models.keys() == {"main", "mtp", "sample"}
    assert not (engine.tokenizer_dir / "tokenizer.json").exists()
    assert Executor(engine.program("main.decode"), engine).program.nodes
