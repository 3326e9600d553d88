"""Engines of several ranks: weights stored once, as for one rank; programs that say which part of them each rank has."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs
import pytest
import torch
from support.builds import dsc, edit_json, recipe, refusal
from support.engines import ROOT, TINY_R1, prompt_tokens
from support.families import make_checkpoint

from dsc.compiler.build import check_buildable, compile_engine
from dsc.compiler.certify.device import open_device
from dsc.compiler.certify.numerics import measure
from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.weight import CUTS, part_shape
from dsc.compiler.planning.capacity import make_stages
from dsc.compiler.planning.weights import planned_weights
from dsc.compiler.recipe import Recipe, parse_recipe
from dsc.runtime import codec
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import GraphFiles, Parallel
from dsc.runtime.program import Operand
from dsc.runtime.shards import Cut, Place, spans, take

SHARED = "shared_experts: {format: bf16}"  # 128 wide: two ranks would cut a block
FORMATS = {
    "fp32": "",
    "wint8": "default: {format: wint8}\nlm_head: {format: wint8}",
    "wint4": "default: {format: wint4, group: 32}\nkv_b: {format: wint8}\nlm_head: {format: wint4, group: 128}",
    "fp8": f"default: {{format: fp8, block: [128, 128]}}\nlm_head: {{format: fp8}}\n{SHARED}",
    "fp8 of four": f"default: {{format: fp8}}\nattention: {{format: bf16}}\nkv_b: {{format: fp8}}\n{SHARED}",
}
MESHES = [
    ("fp32", 2, 2), ("fp32", 4, 4), ("wint8", 2, 1), ("wint8", 4, 2), ("wint4", 2, 2), ("wint4", 4, 4), ("fp8", 2, 2),
    ("fp8 of four", 4, 4),
]  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """An engine, and one of the same recipe on one rank."""

    recipe: Recipe
    engine: EngineFolder
    one: EngineFolder

    @property
    def places(self) -> list[Place]:
        manifest = self.engine.manifest
        return [manifest.parallel.place(rank) for rank in range(manifest.ranks)]

    def weights(self) -> dict[tuple[str, tuple[Cut, ...]], Operand]:
        """Weights of all programs, by tensor and cuts."""
        programs = [self.engine.program(name) for name in self.engine.manifest.graphs]
        operands = [o for program in programs for o in program.operands.values() if o.role == "weight"]
        return {(operand.tensor, operand.cuts): operand for operand in operands}


def with_ranks(given: Recipe, tensor: int, expert: int, pipeline: int = 1) -> Recipe:
    return replace(given, parallel=Parallel(tensor, expert, pipeline))


def build(given: Recipe, folder: Path) -> EngineFolder:
    return EngineFolder.open(compile_engine(given, model=str(TINY_R1), output=folder).folder)


@pytest.fixture(scope="module", params=MESHES, ids=lambda mesh: "-".join(map(str, mesh)))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, tensor, expert = request.param
    folder = tmp_path_factory.mktemp("ranks")
    given = with_ranks(recipe(FORMATS[name], activations="fp32" if name == "fp32" else "bf16"), tensor, expert)
    one = build(with_ranks(given, 1, 1), folder / "one.engine")
    return Pair(given, build(given, folder / "all.engine"), one)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# -- what is stored


def test_parts_put_together_are_what_one_rank_stores(pair: Pair) -> None:
    """Every element of every tensor is on as many ranks as have it, and comes out as it is stored for one."""
    cut = 0
    for (name, cuts), operand in pair.weights().items():
        stored = pair.engine.tensor(name)
        parts = [take(stored, cuts, place) for place in pair.places]
        assert {tuple(part.shape) for part in parts} == {operand.shape}, name
        if name == "expert_map":
            continue
        whole = pair.one.tensor(name)
        found, seen = torch.zeros_like(whole), torch.zeros(whole.shape, dtype=torch.int32)
        for place, part in zip(pair.places, parts, strict=True):
            at, own = region(whole.shape, cuts, place)
            found[at] = part[own]
            seen[at] += 1
        assert same(found, whole), name
        assert seen.min() >= 1, name
        if cuts:
            cut += 1
            assert int(seen.sum()) < seen.numel() * len(pair.places), name
    assert cut > 40


def region(shape: tuple[int, ...], cuts: tuple[Cut, ...], place: Place) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a rank's part lies in a whole tensor, and what of the part that is: all but padding. Without kept elements."""
    whole, own = [slice(0, size) for size in shape], [slice(0, size) for size in shape]
    for cut in cuts:
        assert not cut.kept, cut
        start = min(place.index(cut.by) * cut.size, shape[cut.axis])
        stop = min(start + cut.size, shape[cut.axis])
        whole[cut.axis], own[cut.axis] = slice(start, stop), slice(0, stop - start)
    return tuple(whole), tuple(own)


def test_files_of_weights_are_those_of_one_rank(pair: Pair) -> None:
    """Byte for byte; only where experts lie is stored besides, in a file of its own."""
    held = {
        folder: sorted(path.name for path in (folder.path / "weights").iterdir()) for folder in (pair.one, pair.engine)
    }
    spread = pair.recipe.parallel.expert > 1
    assert held[pair.engine] == [*held[pair.one], *(["ranks-00001.safetensors"] if spread else [])]
    for name in held[pair.one]:
        assert (pair.engine.path / "weights" / name).read_bytes() == (pair.one.path / "weights" / name).read_bytes()
    assert pair.engine.manifest.tensors.keys() - pair.one.manifest.tensors.keys() == (
        {"expert_map"} if spread else set()
    )
    for name, entry in pair.one.manifest.tensors.items():
        assert pair.engine.manifest.tensors[name] == entry


def test_the_table_of_experts(pair: Pair) -> None:
    """Each group of ranks has its experts at their places, and no other's."""
    groups = pair.recipe.parallel.expert
    if groups == 1:
        assert "expert_map" not in pair.engine.manifest.tensors
        return
    table = pair.engine.tensor("expert_map").tolist()
    of_group = 16 // groups
    assert table == [
        [expert % of_group if expert // of_group == group else -1 for expert in range(16)] for group in range(groups)
    ]


def test_a_plan_tells_what_a_rank_loads(pair: Pair) -> None:
    spec, parallel = pair.engine.spec, pair.recipe.parallel
    weights = planned_weights(spec, pair.recipe)
    (stage,) = make_stages(spec, pair.recipe, weights, Mesh(parallel.tensor, parallel.expert))
    assert stage.weight_bytes == sum(operand.bytes for operand in pair.weights().values())
    assert sum(w.nbytes for w in weights) == sum(entry.bytes for entry in pair.engine.manifest.tensors.values())


def test_the_manifest(pair: Pair) -> None:
    manifest, ranks = pair.engine.manifest, pair.recipe.parallel.num_ranks
    assert (manifest.ranks, manifest.parallel) == (ranks, pair.recipe.parallel)
    for name, files in manifest.graphs.items():
        assert files == (GraphFiles(f"{name}.onnx", f"program/{name}.json"),) * ranks
        assert {pair.engine.program(name, rank).onnx_sha256 for rank in range(ranks)} == {
            manifest.files[f"{name}.onnx"].sha256
        }
    pair.engine.verify_hashes()


def test_graphs_hold_whole_tensors_and_say_what_is_cut(pair: Pair) -> None:
    """As onnx and every other tool read them."""
    path = str(pair.engine.path / "main.decode.onnx")
    onnx.checker.check_model(path)
    model = onnx.load(path)
    operands = pair.engine.program("main.decode").operands
    cut = 0
    for tensor in model.graph.initializer:
        operand, stored = operands[tensor.name], pair.engine.tensor(tensor.name)
        assert tuple(tensor.dims) == tuple(stored.shape)
        assert tensor.raw_data == bytes(stored.contiguous().view(-1).view(torch.uint8).numpy())
        assert part_shape(tensor) == operand.shape
        told = {item.key: json.loads(item.value) for item in tensor.metadata_props}
        assert [Cut(**entry) for entry in told.get(CUTS, [])] == list(operand.cuts)
        cut += bool(operand.cuts)
    assert cut > 20
    graph = gs.import_onnx(onnx.load(path, load_external_data=False))
    assert [node.name for node in graph.nodes] == [node.name for node in pair.engine.program("main.decode").nodes]


def test_same_bytes_again(pair: Pair, tmp_path: Path) -> None:
    again = build(pair.recipe, tmp_path / "again.engine")
    assert again.content_hash == pair.engine.content_hash


def test_kept_rows_are_on_every_rank() -> None:
    """Queries by heads, then what all share, as in a joint projection."""
    whole = torch.arange(10)[:, None]
    cut = Cut(0, "tensor", 3, kept=4)
    assert [take(whole, (cut,), Place(rank, 2, 2)).flatten().tolist() for rank in range(2)] == [
        [0, 1, 2, 6, 7, 8, 9],
        [3, 4, 5, 6, 7, 8, 9],
    ]
    assert spans(10, cut, Place(1, 2, 2))[1] == 0


# Family, what of it is changed, formats, ranks and groups for experts: a joint projection whose rows are kept in part, in
# blocks and in codes; heads in other blocks than a rank's; a vocabulary that is padded.
MODELS = [
    ("r1", {"q_lora_rank": None}, f"default: {{format: fp8}}\n{SHARED}", 2, 2),
    ("v2-lite", {}, "default: {format: wint4, group: 32}\nkv_b: {format: wint8}", 4, 2),
    ("r1", {"vocab_size": 515}, "default: {format: wint8}\nlm_head: {format: fp8}", 4, 4),
]


@pytest.mark.parametrize(("family", "changes", "formats", "tensor", "expert"), MODELS)
def test_all_ranks_are_as_good_as_one(
    family: str, changes: dict[str, Any], formats: str, tensor: int, expert: int, tmp_path: Path
) -> None:
    """Layer by layer, by the ops that run engines: as far from the unquantized model as an engine for one rank."""
    model = make_checkpoint(tmp_path / "model", family, **changes)
    mtp = family == "r1"
    found = []
    for mesh in ((1, 1), (tensor, expert)):
        given = with_ranks(recipe(formats, mtp=mtp, activations="bf16"), *mesh)
        folder = compile_engine(given, model=str(model), output=tmp_path / f"{mesh[0]}.engine").folder
        engine = EngineFolder.open(folder)
        checkpoint = Checkpoint.open(model, read_config(model), mtp=mtp)
        windows = prompt_tokens(2, 48, engine.spec.vocab_size)
        found.append(measure(engine, given, checkpoint, windows, *open_device(engine, "cpu")))
    one, all_ranks = found
    # Sums in another order may move a token to another expert, which such random models answer otherwise.
    assert all_ranks.end_to_end.kl < 2 * one.end_to_end.kl
    for alone, together in zip(one.layers, all_ranks.layers, strict=True):
        assert together.alone.relative_error < 1.3 * alone.alone.relative_error < 0.16


# -- what the commands tell of it


def test_inspect(two_ranks: Path) -> None:
    text = dsc("inspect", two_ranks).stdout
    assert "cpu, 2 ranks: tensor 2, expert 2, pipeline 1, schema version" in text
    assert re.search(r"weights of a rank +29\.58 MB", text)
    assert re.search(r"shard +37 / 37 +37 / 37 +11 / 11 +11 / 11", text)
    part = "model.layers.1.mlp.experts.down_proj.weight: experts as fp32, 1,048,576 bytes of [16, 256, 128] by expert along axis 0"
    assert part in dsc("inspect", two_ranks, "--layer", "1").stdout
    engine = json.loads(dsc("inspect", two_ranks, "--json").stdout)["engine"]
    assert engine["parallel"] == {"tensor": 2, "expert": 2, "pipeline": 1}
    given = with_ranks(recipe(), 2, 2)
    weights = planned_weights(EngineFolder.open(two_ranks).spec, given)
    (stage,) = make_stages(EngineFolder.open(two_ranks).spec, given, weights, Mesh(2, 2))
    assert engine["rank_weight_bytes"] == stage.weight_bytes


def test_explain(two_ranks: Path) -> None:
    text = dsc("explain", two_ranks, "model.layers.0.self_attn.o_proj.weight").stdout
    assert "a rank has [256, 256] of it, by tensor along axis 1" in text
    assert "a rank has" not in dsc("explain", two_ranks, "model.embed_tokens.weight").stdout
    text = dsc("explain", two_ranks, "layers.1.mlp.all_reduce").stdout
    assert "dsc.AllReduce" in text
    text = dsc("explain", two_ranks, "layers.1.mlp.router").stdout
    assert "expert_map: int32 [1, 16] of [2, 16], int32" in text
    assert "experts to places in 2 groups of ranks" in text


def test_the_other_commands(two_ranks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two.engine"
    shutil.copytree(two_ranks, folder)
    assert "nothing to do" in dsc("migrate", folder).stdout
    verified = json.loads(
        dsc("verify", folder, "--against", TINY_R1, "--windows", "1", "--window-tokens", "32", "--json").stdout
    )
    assert verified["stored"]["tensors"] == len(EngineFolder.open(folder).manifest.tensors)
    assert verified["end_to_end"]["kl"] < 1e-6
    one = build(recipe(), tmp_path / "one.engine").path
    found = json.loads(dsc("diff", one, folder, "--json").stdout)
    assert [entry["weight"] for entry in found["tensors"]] == ["expert_map"]
    assert {entry["key"] for entry in found["recipe"]} == {"parallel.tensor", "parallel.expert"}
    dsc("report", folder, "--html", tmp_path / "page.html")
    assert "2 ranks: tensor 2, expert 2, pipeline 1" in (tmp_path / "page.html").read_text()


# -- what is refused of an engine


@pytest.fixture
def damaged(tmp_path: Path, two_ranks: Path) -> Iterator[Callable[[dict[str, Any]], str]]:
    """What opening a program says after facts of its operand lm_head.weight are others."""
    folder = tmp_path / "damaged.engine"
    shutil.copytree(two_ranks, folder)
    path = "program/main.decode.json"

    def change(facts: dict[str, Any]) -> str:
        data = codec.read_json(folder / path, path)
        data["operands"]["lm_head.weight"].update(facts)
        content = codec.dump_json(data)
        (folder / path).write_bytes(content)
        files = codec.read_json(folder / "manifest.json", "")["files"]
        files[path] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        edit_json(folder / "manifest.json", files=files)
        with pytest.raises(DscError) as caught:
            EngineFolder.open(folder).program("main.decode", rank=1)
        return caught.value.text()

    return change


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(with_ranks(recipe(), 2, 2), tmp_path_factory.mktemp("two") / "two.engine").path


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (
            {"cuts": []},
            "tensor lm_head.weight is of another type\n  wanted  float32 [1024, 256]\n  got     float32 [2048, 256]",
        ),
        ({"cuts": [{"axis": 1, "by": "tensor", "size": 128}]}, "got     float32 [2048, 128] of [2048, 256] for a rank"),
        ({"cuts": [{"axis": 2, "by": "tensor", "size": 1024}]}, "axis 2 by tensor: there are 2 axes"),
        ({"cuts": [{"axis": 0, "by": "tensor", "size": 1024}] * 2}, "axis 0 by tensor: the axis is cut twice"),
        ({"cuts": [{"axis": 0, "by": "tensor", "size": 0}]}, "no part has 0 elements and 0 kept of 2048"),
        (
            {"cuts": [{"axis": 0, "by": "tensor", "size": 9, "kept": 2048}]},
            "no part has 9 elements and 2048 kept of 2048",
        ),
        (
            {"cuts": [{"axis": 0, "by": "tensor", "size": 1023}]},
            "axis 0 by tensor: 2 x 1023 elements do not cover 2048",
        ),
        ({"cuts": [{"axis": 0, "by": "width", "size": 1024}]}, "axis 0 by width: 1 x 1024 elements do not cover 2048"),
        ({"cuts": [{"axis": 0, "by": "heads", "size": 1024}]}, "by is of the wrong kind"),
        ({"dtype": "int32"}, "wanted  int32 [1024, 256]\n  got     float32 [1024, 256] of [2048, 256] for a rank"),
    ],
)
def test_a_program_of_other_parts_is_refused(
    damaged: Callable[[dict[str, Any]], str], facts: dict[str, Any], told: str
) -> None:
    text = damaged(facts)
    assert told in text, text
    assert "program/main.decode.json" in text


def test_a_missing_file_is_of_all_ranks(tmp_path: Path, two_ranks: Path) -> None:
    folder = tmp_path / "missing.engine"
    shutil.copytree(two_ranks, folder)
    (folder / "main.decode.onnx").unlink()
    with pytest.raises(DscError, match=r"main\.decode\.onnx: is missing: a file of 2 ranks"):
        EngineFolder.open(folder)
    with pytest.raises(DscError, match=r"no rank 2\n  wanted  0 to 1"):
        EngineFolder.open(two_ranks).program("main.decode", rank=2)


# -- what is refused before any work


def texts(tensor: int, expert: int, pipeline: int = 1, edit: tuple[str, str] = ("", "")) -> Recipe:
    """tiny-r1-fp32 with other ranks."""
    text = (ROOT / "recipes" / "tiny-r1-fp32.yaml").read_text()
    one = "{tensor: 1, expert: 1, pipeline: 1}"
    assert one in text
    text = text.replace(one, f"{{tensor: {tensor}, expert: {expert}, pipeline: {pipeline}}}")
    return parse_recipe(text.replace(*edit) if edit[0] else text, "mine.yaml", "mine")


def refusals() -> Iterator[tuple[Recipe, list[str]]]:
    yield (
        texts(2, 1, 2),
        [
            "several pipeline stages are not built yet", "wanted  pipeline: 1, and expert: a divisor of tensor",
            "got     parallel: {tensor: 2, expert: 1, pipeline: 2}", "try     parallel: {tensor: 2, expert: 1, pipeline: 1}",
        ],
    )  # fmt: skip
    yield (
        texts(2, 4),
        ["expert ranks do not divide their tensor ranks", "try     parallel: {tensor: 2, expert: 2, pipeline: 1}"],
    )
    yield (
        texts(4, 3),
        ["expert ranks do not divide their tensor ranks", "try     parallel: {tensor: 4, expert: 1, pipeline: 1}"],
    )
    yield (
        texts(2, 2, edit=("  - shard\n", "")),
        ["2 ranks, and no pass cuts weights for them", "the line `  - shard` before `  - plan_memory`, or --ranks 1"],
    )


@pytest.mark.parametrize(("given", "told"), list(refusals()))
def test_what_is_not_built_is_refused_by_name(given: Recipe, told: list[str]) -> None:
    with pytest.raises(DscError) as caught:
        check_buildable(given)
    text = caught.value.text()
    assert [part for part in told if part not in text] == [], text


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("  - shard\n  - plan_memory\n", "  - plan_memory\n  - shard\n", "wanted  plan_memory after it"),
        ("  - quantize_weights:", "  - shard\n  - quantize_weights:", "wanted  quantize_weights before it"),
    ],
)
def test_a_pass_out_of_order_is_refused(old: str, new: str, told: str) -> None:
    edit = (old, new)
    text = (ROOT / "recipes" / "tiny-r1-fp32.yaml").read_text().replace("  - shard\n", "", old.count("quantize"))
    with pytest.raises(DscError) as caught:
        parse_recipe(text.replace(*edit), "mine.yaml", "mine")
    assert told in caught.value.text()


def test_what_cannot_be_cut_is_refused_before_any_work(tmp_path: Path) -> None:
    output = tmp_path / "x.engine"
    text = refusal("compile", "--recipe", "tiny-r1-fp8", "--ranks", "2", "--output", output)
    assert "parallel {tensor: 2, expert: 2, pipeline: 1} cannot split this model" in text
    assert "mlp.shared_experts.down_proj.weight  128 columns = 2 x 64, not in whole blocks of 128" in text
    assert "{tensor: 1, expert: 1}; or for shared_experts a format without groups and blocks: wint8, bf16" in text
    text = refusal("compile", "--recipe", "tiny-r1-fp32", "--ranks", "3", "--output", output)
    assert "heads 4 = 3 x 1 + 1" in " ".join(text.split())
    assert "a format" not in text
    assert not list(tmp_path.iterdir())
