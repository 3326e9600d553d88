"""`dsc compile --download`: what is fetched in which order, and what is refused before the weights. No test reaches the network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects
from support.builds import dsc, recipe, refusal
from support.engines import TINY_R1

from dsc.compiler import download
from dsc.compiler.config import read_config
from dsc.compiler.download import Need, check_room, download_checkpoint
from dsc.compiler.planning.weights import planned_weights
from dsc.compiler.recipe import load_recipe
from dsc.compiler.staging import Staging
from dsc.runtime.errors import DscError

NAME, COMMIT = "someone/tiny-r1", "a" * 40
SMALL = {
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
SOURCE_BYTES = json.loads((TINY_R1 / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
PLENTY = 1 << 40


class Usage(NamedTuple):
    """Of `shutil.disk_usage`, what is read."""

    free: int


class Hub:
    """Stands for the hub and huggingface_hub's cache: one repository, of which the files asked for are linked to the cache.

    files    the repository: a copy of tiny-r1 that a test may change
    fetched  new files of each call
    """

    def __init__(self, root: Path) -> None:
        self.files = Path(shutil.copytree(TINY_R1, root / "repository"))
        (self.files / "modeling_deepseek.py").write_text("raise SystemExit")
        self.cache = root / "models--someone--tiny-r1"
        self.commit = COMMIT
        self.fetched: list[set[str]] = []
        self.revisions: list[str | None] = []

    @property
    def folder(self) -> Path:
        return self.cache / "snapshots" / self.commit

    def snapshot_download(self, repository: str, *, revision: str | None, allow_patterns: Sequence[str]) -> str:
        assert repository == NAME
        self.folder.mkdir(parents=True, exist_ok=True)
        names = set(
            filter_repo_objects([path.name for path in self.files.iterdir()], allow_patterns=list(allow_patterns))
        )
        self.fetched.append({name for name in names if not (self.folder / name).exists()})
        self.revisions.append(revision)
        for name in self.fetched[-1]:
            (self.folder / name).symlink_to(self.files / name)
        return str(self.folder)

    def edit(self, file: str, change: dict[str, Any]) -> None:
        path = self.files / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return made


def free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free_bytes))


def refused(hub: Hub, *arguments: str) -> str:
    """What the command says after it fetched the small files alone and wrote nothing."""
    recipe_ = () if "--recipe" in arguments else ("--recipe", "tiny-r1-wint4")
    text = refusal("compile", *recipe_, "--model", NAME, "--download", *arguments)
    assert hub.fetched == [SMALL]
    return text


def test_small_files_come_first_then_the_shards_of_the_same_commit(hub: Hub, tmp_path: Path) -> None:
    assert dsc("compile", "--recipe", "tiny-r1-wint4", "--model", NAME, "--download").exit_code == 0
    assert hub.fetched == [SMALL, SHARDS]
    assert hub.revisions == [None, COMMIT]
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"tiny-r1-wint4.engine"}


def test_without_an_index_the_single_file_comes_second(hub: Hub, tmp_path: Path) -> None:
    """An MTP layer that config.json does not declare may be in it: only its header will tell."""
    for name in (*SHARDS, "model.safetensors.index.json"):
        (hub.files / name).unlink()
    for name in ("model.safetensors", "consolidated.safetensors"):
        (hub.files / name).touch()
    hub.edit("config.json", {"num_nextn_predict_layers": 0})
    folder = download_checkpoint(NAME, recipe=recipe(), output=tmp_path / "x.engine")
    assert folder == hub.folder
    assert hub.fetched == [SMALL - {"model.safetensors.index.json"}, {"model.safetensors"}]


def test_a_file_of_the_index_is_a_name_and_no_pattern(hub: Hub, tmp_path: Path) -> None:
    index = json.loads((hub.files / "model.safetensors.index.json").read_text())
    odd = dict.fromkeys(index["weight_map"], "*.safetensors")
    hub.edit("model.safetensors.index.json", {"weight_map": odd})
    download_checkpoint(NAME, recipe=recipe(), output=tmp_path / "x.engine")
    assert hub.fetched == [SMALL, set()]


def test_an_architecture_that_is_not_supported(hub: Hub) -> None:
    hub.edit("config.json", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    assert "Qwen3ForCausalLM (Qwen, also R1-Distill-Qwen) is refused" in refused(hub)


def test_a_recipe_that_does_not_fit(hub: Hub) -> None:
    hub.edit("config.json", {"max_position_embeddings": 1024})
    text = refused(hub)
    assert "limits.context_tokens is longer than the model's context" in text
    assert "wanted  at most 1024" in text


def test_ranks_that_cannot_share_the_weights(hub: Hub) -> None:
    assert "128 columns = 2 x 64, not in whole groups of 128" in refused(hub, "--ranks", "2")


def test_names_of_tensors(hub: Hub) -> None:
    index = json.loads((hub.files / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.normal.weight"] = index["weight_map"].pop("model.norm.weight")
    hub.edit("model.safetensors.index.json", index)
    text = refused(hub)
    assert "tensors are missing" in text
    assert "model.normal.weight is unknown" in text


def test_a_tokenizer_that_cannot_be_read(hub: Hub) -> None:
    (hub.files / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refused(hub)


def test_an_output_that_cannot_become_an_engine(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    assert "holds something else than an engine" in refused(hub, "--output", str(tmp_path / "mine"))


# -- disks


def engine_bytes() -> int:
    """What Staging asks for on a disk for a wint4 engine: weights and a spare for the rest."""
    weights = planned_weights(read_config(TINY_R1), load_recipe("tiny-r1-wint4"))
    return Staging(Path("nowhere.engine"), sum(weight.nbytes for weight in weights)).missing_bytes()


def test_a_disk_without_room_for_checkpoint_and_engine(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for either alone is not enough where both lie on one disk."""
    wanted = SOURCE_BYTES + engine_bytes()
    free(monkeypatch, wanted - 1)
    assert [line.split() for line in refused(hub).splitlines()] == [
        [f"{hub.folder}:", "not", "enough", "disk", "space"],
        ["checkpoint", f"{SOURCE_BYTES:,}", "bytes", "in", str(hub.folder)],
        ["engine", f"{engine_bytes():,}", "bytes", "in", str(Path.cwd())],
        ["wanted", f"{wanted:,}", "bytes"],
        ["got", f"{wanted - 1:,}", "bytes", "free"],
        ["try", "HF_HOME", "on", "another", "disk,", "or", "--output", "on", "another", "disk"],
    ]


def test_what_is_here_needs_no_room(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shard of an earlier commit is linked and not fetched again; of a build that was cut short, what it wrote is there."""
    first = min(SHARDS)
    hub.snapshot_download(NAME, revision=None, allow_patterns=[first])
    hub.commit = "b" * 40
    partial = tmp_path / "work" / ".tiny-r1-wint4.engine.partial"
    partial.mkdir()
    (partial / "weights").write_bytes(bytes(1 << 20))
    wanted = SOURCE_BYTES - (TINY_R1 / first).stat().st_size + engine_bytes() - (1 << 20)
    free(monkeypatch, wanted - 1)
    text = refusal("compile", "--recipe", "tiny-r1-wint4", "--model", NAME, "--download")
    assert hub.fetched[1:] == [SMALL]
    assert f"wanted      {wanted:,} bytes" in text


def test_each_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two disks, the second with room."""
    one, two = Need("checkpoint", tmp_path / "a", 30, "this"), Need("engine", tmp_path / "b", 20, "that")
    for need in (one, two):
        need.folder.mkdir()
    monkeypatch.setattr(download, "disk_of", lambda folder: folder.name)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage({"a": 29, "b": 20}[folder.name]))
    with pytest.raises(DscError) as caught:
        check_room([one, two])
    assert caught.value.where == str(one.folder)
    assert (caught.value.wanted, caught.value.got, caught.value.try_) == ("30 bytes", "29 bytes free", "this")
    check_room([two, one._replace(bytes=0)])


def test_what_is_here_already_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(19))
    with pytest.raises(DscError) as caught:
        check_room(
            [Need("checkpoint", tmp_path, 0, "this"), Need("engine", tmp_path / "not yet" / "there", 20, "that")]
        )
    assert caught.value.details == (("engine", f"20 bytes in {tmp_path / 'not yet' / 'there'}"),)
    assert caught.value.try_ == "that"
