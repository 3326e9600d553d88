"""Checkpoints: read as stored, across shards; whatever is wrong with a folder is told at once, before any work."""

import json
import os
import struct
from dataclasses import replace
from itertools import combinations

import psutil
import pytest
import torch
from safetensors.torch import save_file
from support.families import (
    ABSENT,
    FAMILIES,
    change_config,
    change_tensors,
    make_checkpoint,
    read_tensors,
    write_tensors,
)

from dsc.compiler.checkpoint import DROPPED_MTP, Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.tensor_names import expected_tensors, fold_names, mtp_tensors
from dsc.runtime.errors import DscError

INDEX = "model.safetensors.index.json"
SHARD_1, SHARD_2, SHARD_3 = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path / "faults", "faults")


def open_(folder, **options) -> Checkpoint:
    return Checkpoint.open(folder, read_config(folder), **options)


def faults(folder, **options) -> list[DscError]:
    with pytest.raises(DscError) as caught:
        open_(folder, **options)
    return list(getattr(caught.value, "errors", (caught.value,)))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# -- reading


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_expected_and_read_as_stored(tmp_path, family):
    folder = make_checkpoint(tmp_path, family)
    checkpoint, stored = open_(folder), read_tensors(folder)
    assert checkpoint.names() == sorted(stored) == sorted(expected_tensors(checkpoint.spec))
    assert not checkpoint.notes
    assert not checkpoint.dropped
    for name, value in stored.items():
        info = checkpoint.info(name)
        assert (info.dtype, info.shape, info.nbytes) == (str(value.dtype)[6:], tuple(value.shape), value.nbytes)
        assert (checkpoint.source(name).dtype, checkpoint.source(name).shape) == (info.dtype, info.shape)
        assert same_bytes(checkpoint.read(name), value), name
        assert same_bytes(checkpoint.read(name, slice(1, 3)), value[1:3]), name
        assert same_bytes(checkpoint.read(name, slice(len(value) - 1, None)), value[-1:]), name


def test_weight_and_scale_lie_in_different_shards(folder):
    checkpoint = open_(folder)
    scaled = [name for name in checkpoint.names() if name.endswith("_scale_inv")]
    assert len(scaled) > 100
    for scale in scaled:
        assert checkpoint.info(scale).file != checkpoint.info(scale.removesuffix("_scale_inv")).file


def test_partial_blocks_round_up(tmp_path):
    checkpoint = open_(make_checkpoint(tmp_path, "r1"))
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert checkpoint.info(name).shape == (576, 256)
    assert checkpoint.info(f"{name}_scale_inv").shape == (5, 2)
    spec = replace(checkpoint.spec, hidden_size=7168)
    assert expected_tensors(spec)[f"{name}_scale_inv"].shape == (5, 56)


def test_one_file_without_an_index(folder):
    stored = read_tensors(folder)
    write_tensors(folder, stored, shards=1)
    assert not (folder / INDEX).exists()
    checkpoint = open_(folder)
    assert checkpoint.names() == sorted(stored)
    assert list(checkpoint.files()) == ["model.safetensors"]
    assert checkpoint.files()["model.safetensors"] == (folder / "model.safetensors").stat().st_size


def test_shards_without_an_index_are_read_and_that_is_said(folder):
    (folder / INDEX).unlink()
    checkpoint = open_(folder)
    assert len(checkpoint.files()) == 3
    assert checkpoint.notes == (f"faults has no {INDEX}: the tensors are those of its 3 files",)


def test_hugging_face_cache_layout(folder, tmp_path):
    """Snapshots hold links to blobs."""
    snapshot = tmp_path / "hub" / "models--deepseek-ai--DeepSeek-R1" / "snapshots" / "abc"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    assert len(open_(snapshot).names()) == len(expected_tensors(read_config(snapshot)))
    (blobs / str(sorted(p.name for p in snapshot.iterdir()).index(SHARD_2))).unlink()
    [fault] = faults(snapshot)
    assert (fault.what, fault.where) == ("is missing", str(snapshot / SHARD_2))
    assert fault.try_ == "hf download deepseek-ai/DeepSeek-R1"


def test_a_read_only_source_is_enough(folder):
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    checkpoint = open_(folder)
    assert sum(len(checkpoint.read(name)) for name in checkpoint.names()) > 0
    folder.chmod(0o755)


def test_reading_leaves_nothing_mapped(folder):
    """What counts as memory is what is held, so that streaming 685 GB needs the largest piece alone."""
    checkpoint = open_(folder)
    process = psutil.Process()
    before = {m.path for m in process.memory_maps(grouped=True)}
    held = [checkpoint.read(name, slice(0, 2)) for name in checkpoint.names()]
    assert sum(view.untyped_storage().nbytes() for view in held) == sum(view.nbytes for view in held)
    assert not [m.path for m in process.memory_maps(grouped=True) if m.path not in before and str(folder) in m.path]


def test_a_file_that_changes_while_it_is_read_is_told(folder):
    checkpoint = open_(folder)
    name = checkpoint.names()[0]
    checkpoint.read(name)
    checkpoint.check_unchanged()
    path = checkpoint.info(name).file
    with path.open("r+b") as file:
        file.truncate(checkpoint.info(name).offset)
    with pytest.raises(DscError, match="changed while it was read"):
        checkpoint.read(name)
    with pytest.raises(DscError, match="changed while it was read"):
        checkpoint.check_unchanged()
    path.unlink()
    with pytest.raises(DscError, match=r"changed while it was read\n  got  No such file"):
        checkpoint.check_unchanged()


def swap_two(content: bytes) -> bytes:
    """A safetensors file whose header gives two tensors of one type each other's place."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    for first, second in combinations(sorted(header.keys() - {"__metadata__"}), 2):
        if [header[first][key] for key in ("dtype", "shape")] == [header[second][key] for key in ("dtype", "shape")]:
            offsets = header[first]["data_offsets"]
            header[first]["data_offsets"], header[second]["data_offsets"] = header[second]["data_offsets"], offsets
            break
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= length
    return content[:8] + text.ljust(length) + content[8 + length :]


def test_identity_tells_a_file_of_another_time_size_or_header(folder):
    before = open_(folder).identity()
    assert before == open_(folder).identity()
    path = folder / SHARD_2
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(swap_two(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert {name for name, value in open_(folder).identity().items() if value != before[name]} == {SHARD_2}
    path.write_bytes(content)
    assert {name for name, value in open_(folder).identity().items() if value != before[name]} == {SHARD_2}
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_(folder).identity() == before


def test_values_behind_a_header_of_odd_length(tmp_path):
    """Other writers do not pad the header: the tensor starts where float32 cannot be viewed."""
    folder = make_checkpoint(tmp_path, "v2-lite", shards=1)
    path = folder / "model.safetensors"
    stored = {name: value.clone() for name, value in read_tensors(folder).items()}
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length].rstrip() + b" "
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    checkpoint = open_(folder)
    assert checkpoint.info("model.norm.weight").offset % 2 == 1
    assert all(same_bytes(checkpoint.read(name), value) for name, value in stored.items())


# -- files


def test_missing_cut_and_pointer_shards_are_told_together_with_their_tensors(folder):
    in_2 = {n for n, file in json.loads((folder / INDEX).read_text())["weight_map"].items() if file == SHARD_2}
    (folder / SHARD_1).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n")
    (folder / SHARD_2).unlink()
    (folder / SHARD_3).write_bytes((folder / SHARD_3).read_bytes()[:-1])
    found = faults(folder)
    assert [(fault.where, fault.what) for fault in found] == [
        (str(folder / SHARD_1), "is a git-lfs pointer"),
        (str(folder / SHARD_2), "is missing"),
        (str(folder / SHARD_3), "is cut short"),
    ]
    assert found[0].try_ == "git lfs pull"
    assert found[1].details[0] == ("tensors", str(len(in_2)))
    assert [line for _, line in found[1].details[1:]] == fold_names(sorted(in_2))
    assert "model.norm.weight" in str(found[1])


def test_numbered_shards_without_an_index_name_the_missing_one(folder):
    (folder / INDEX).unlink()
    (folder / SHARD_2).unlink()
    found = faults(folder)
    assert (found[0].where, found[0].what) == (str(folder / SHARD_2), "is missing")
    assert any("tensors are missing" in fault.what for fault in found[1:])


def test_index_and_shard_disagree(folder):
    index = json.loads((folder / INDEX).read_text())
    moved = "model.layers.0.mlp.up_proj.weight"
    assert index["weight_map"][moved] == SHARD_1
    index["weight_map"][moved] = SHARD_3
    (folder / INDEX).write_text(json.dumps(index))
    told = [str(fault) for fault in faults(folder)]
    assert len(told) == 2
    assert f"{SHARD_1} holds tensors that the index does not place there" in told[0]
    assert f"{SHARD_3} does not hold tensors that the index places there" in told[1]
    assert all(moved in text for text in told)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", 3])
def test_an_index_may_name_files_beside_it_alone(folder, file):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    [fault] = faults(folder)
    assert "model.norm.weight is in" in fault.what
    assert fault.wanted == "a .safetensors file beside the index"


def test_pickles_are_refused_unread(tmp_path, folder):
    for path in folder.glob("model*"):
        path.unlink()
    [fault] = faults(folder)
    assert fault.what == "no weights"
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    [fault] = faults(folder)
    assert "pickle files, which can run code" in fault.what
    assert fault.got == "pytorch_model.bin"
    assert "convert" in fault.try_


def header(data: bytes, **tensors) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not a safetensors file"),
        (b"<!DOCTYPE html><html>not found</html>", "not a safetensors file"),
        (struct.pack("<Q", 50) + b"{}", "cut short"),
        (struct.pack("<Q", 2) + b"{}xx", "bytes that no tensor claims"),
        (struct.pack("<Q", 4) + b"nope", "not valid JSON"),
        (header(bytes(8), a=F32, b=F32), "overlaps"),
        (header(bytes(20), a=F32, b={**F32, "data_offsets": [12, 20]}), "leaves a gap after"),
        (header(bytes(7), a=F32), "cut short"),
        (header(bytes(9), a={**F32, "data_offsets": [0, 9]}), "contradicts itself"),
        (header(bytes(8), a={**F32, "shape": [-2]}), "not described"),
        (header(bytes(8), a={**F32, "dtype": "F4"}), "unknown dtype F4"),
        (header(bytes(8), a={**F32, "data_offsets": [-8, 0]}), "not described"),
        (struct.pack("<Q", 1 << 40) + b"{}", "not a safetensors file"),
    ],
)
def test_headers_are_checked_before_data_is_trusted(tmp_path, folder, content, text):
    write_tensors(folder, {}, 1)
    (folder / "model.safetensors").write_bytes(content)
    assert text in faults(folder)[0].what


# -- tensors


def test_missing_unknown_and_misshapen_tensors_are_told_together(folder):
    def change(tensors):
        del tensors["model.layers.1.self_attn.q_a_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.2.mlp.experts.3.gate_porj.weight"] = torch.zeros(2)
        tensors["model.layers.3.self_attn.q_b_proj.weight_scale_inv"] = torch.zeros(1, 1)

    change_tensors(folder, change)
    missing, unknown, misfit = faults(folder)
    assert missing.what.startswith("2 of ")
    assert "model.layers.1.self_attn.q_a_proj.weight" in str(missing)
    assert "model.norm.weight" in str(missing)
    assert unknown.what == "model.layers.2.mlp.experts.3.gate_porj.weight is unknown"
    assert unknown.try_ == "nearest known model.layers.2.mlp.experts.3.gate_proj.weight"
    assert misfit.what == "model.layers.3.self_attn.q_b_proj.weight_scale_inv does not fit config.json"
    assert (misfit.wanted, misfit.got) == ("float32 [2, 1]", "float32 [1, 1]")


def test_fp8_declared_bf16_stored_and_the_other_way(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", "r1", quantization_config=ABSENT)
    fp8 = make_checkpoint(tmp_path / "fp8", "r1")
    config = (plain / "config.json").read_text()
    (plain / "config.json").write_text((fp8 / "config.json").read_text())
    (fp8 / "config.json").write_text(config)
    wanted = {(fault.wanted, fault.got) for fault in faults(plain)}
    assert ("float8_e4m3fn [576, 256]", "bfloat16 [576, 256]") in wanted
    assert any("tensors are unknown" in fault.what and "_scale_inv" in str(fault) for fault in faults(fp8))


def test_rotary_frequencies_of_old_checkpoints_are_dropped_by_rule(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    checkpoint = open_(folder)
    assert checkpoint.dropped == {name: "rope frequencies: recomputed from config.json"}


def test_a_router_bias_that_lost_its_bits_is_told(folder):
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    [note] = open_(folder).notes
    assert note.startswith(f"{name} is stored as bfloat16")


# -- MTP: declared, found


def test_mtp_declared_and_found(folder):
    checkpoint = open_(folder)
    assert checkpoint.spec.num_mtp_layers == 1
    assert not checkpoint.notes


@pytest.mark.parametrize("declared", [0, ABSENT])
def test_mtp_found_but_undeclared_is_used_and_said(folder, declared):
    change_config(folder, num_nextn_predict_layers=declared)
    checkpoint = open_(folder)
    assert checkpoint.spec.num_mtp_layers == 1
    assert checkpoint.notes == ("config.json declares no MTP layer, model.layers.4 is one: it is used",)


def test_mtp_declared_and_missing_is_counted_unless_off(folder):
    expected = mtp_tensors(read_config(folder))
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in expected])
    [fault] = faults(folder)
    copies = sum(bool(entry.copy_of) for entry in expected.values())
    wanted = f"{len(expected) - copies} of its {len(expected)} tensors are missing"
    assert fault.what == f"config.json declares 1 MTP layer: {wanted}"
    assert fault.try_ == "mtp: {enabled: false} in the recipe"
    assert open_(folder, mtp=False).spec.num_mtp_layers == 0


@pytest.mark.parametrize("declared", [0, 1])
def test_mtp_partly_missing_is_counted_unless_off(folder, declared):
    change_config(folder, num_nextn_predict_layers=declared)
    gone = ["model.layers.4.eh_proj.weight", "model.layers.4.mlp.experts.7.up_proj.weight_scale_inv"]
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in gone])
    [fault] = faults(folder)
    assert f"2 of its {len(mtp_tensors(read_config(folder)))} tensors are missing" in fault.what
    assert all(name in str(fault) for name in gone)
    checkpoint = open_(folder, mtp=False)
    assert set(checkpoint.dropped.values()) == {DROPPED_MTP}
    assert len(checkpoint.dropped) == len(mtp_tensors(checkpoint.spec)) - 2


def test_mtp_without_its_copies_uses_the_main_models(folder):
    gone = ["model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"]
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in gone])
    assert open_(folder).notes == (f"{gone[0]}, {gone[1]}: not stored, the main model's is used",)


def test_a_second_mtp_layer_is_unknown(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.5.enorm.weight": torch.ones(256)}))
    assert [fault.what for fault in faults(folder)] == ["model.layers.5.enorm.weight is unknown"]


# -- tied embeddings


def test_tied_embeddings_with_and_without_a_stored_head(tmp_path):
    folder = make_checkpoint(tmp_path, "v2-lite", tie_word_embeddings=True)
    checkpoint = open_(folder)
    assert "lm_head.weight" not in checkpoint.names()
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert list(open_(folder).copies()) == [("lm_head.weight", "model.embed_tokens.weight")]


def test_untied_without_a_head_is_missing(tmp_path):
    folder = make_checkpoint(tmp_path, "v2-lite")
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    [fault] = faults(folder)
    assert "lm_head.weight" in str(fault)


# -- names


def test_fold_names():
    names = [f"model.layers.{i}.mlp.experts.{e}.up.weight" for i in (1, 2, 4) for e in (0, 1, 2, 5)]
    assert fold_names([*names, "model.norm.weight"]) == [
        "model.layers.{1-2,4}.mlp.experts.{0-2,5}.up.weight",
        "model.norm.weight",
    ]
    assert fold_names(["model.layers.3.mlp.experts.7.up.weight"]) == ["model.layers.3.mlp.experts.7.up.weight"]


def test_a_real_r1_has_the_released_number_of_tensors_and_bytes(folder):
    """models.md: 682.6 B parameters with MTP, 97.4 % of them routed experts, 685 GB as released."""
    spec = replace(
        read_config(folder), hidden_size=7168, num_layers=61, num_heads=128, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=18432, moe_intermediate_size=2048,
        num_experts=256, num_dense_layers=3, vocab_size=129280,
    )  # fmt: skip
    expected = expected_tensors(spec)
    counts = {name: torch.Size(entry.shape).numel() for name, entry in expected.items()}
    values = {n: c for n, c in counts.items() if not n.endswith("_scale_inv") and not expected[n].copy_of}
    experts = sum(count for name, count in values.items() if ".experts." in name)
    assert sum(values.values()) / 1e9 == pytest.approx(682.6, abs=0.1)
    assert experts / sum(values.values()) == pytest.approx(0.974, abs=5e-4)
    sizes = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
    total = sum(count * sizes[expected[name].dtypes[0]] for name, count in counts.items())
    assert total / 1e9 == pytest.approx(688.6, abs=0.1)  # with the copies that the MTP layer stores


def test_single_tensor_file_of_another_name(folder):
    """Without index or numbering, every safetensors file of the folder counts; one tensor in two files does not."""
    stored = read_tensors(folder)
    write_tensors(folder, stored, 1)
    save_file({"model.norm.weight": stored["model.norm.weight"]}, folder / "extra.safetensors")
    assert [f.what for f in faults(folder)] == [
        "tensor model.norm.weight is in extra.safetensors and in model.safetensors"
    ]
