"""Where a model is found, and what is said where it is not. No test reaches the network."""

import math
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from dsc.compiler import hub
from dsc.compiler.config import read_config
from dsc.compiler.hub import SIZES, SMALL_FILES, WEIGHTS, fetch, find_model
from dsc.compiler.tensor_names import expected_tensors
from dsc.runtime.errors import DscError
from dsc.runtime.spec import SourceFormat

R1 = "deepseek-ai/DeepSeek-R1"
TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny-r1"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache, and a working folder without models."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(folder), raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


def put(cache: Path, repository: str, file: str) -> Path:
    """A cached repository with one file, laid out as huggingface_hub does."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    (snapshot / file).write_text("{}")
    return snapshot


def test_a_folder_wins_over_the_cache(cache, tmp_path):
    put(cache, "examples/tiny-r1", "config.json")
    assert find_model(str(TINY)) == TINY
    (tmp_path / "examples" / "tiny-r1").mkdir(parents=True)
    assert find_model("examples/tiny-r1") == Path("examples/tiny-r1")


def test_a_recipes_relative_folder_may_start_beside_the_recipe(cache):
    assert find_model("tiny-r1", beside=[Path("nowhere"), TINY.parent]) == TINY


def test_the_packaged_recipes_example_is_found_from_any_folder(cache):
    assert find_model("examples/tiny-r1").resolve() == TINY


def test_the_cache_is_looked_up_without_network(cache):
    snapshot = put(cache, R1, "config.json")
    assert find_model(R1) == snapshot


def test_a_cached_repository_without_config_is_not_here(cache):
    put(cache, R1, "tokenizer.json")
    with pytest.raises(DscError, match="is not on this machine"):
        find_model(R1)


def test_not_here_is_one_error_with_the_command_and_the_bytes(cache):
    with pytest.raises(DscError) as caught:
        find_model(R1)
    assert str(caught.value).splitlines() == [
        "deepseek-ai/DeepSeek-R1 is not on this machine",
        "  folders  deepseek-ai/DeepSeek-R1",
        f"  cache    {cache}",
        "  size     about 688,600,000,000 bytes",
        "  try      hf download deepseek-ai/DeepSeek-R1    (or --download, or --model FOLDER)",
    ]


def test_neither_folder_nor_repository(cache):
    with pytest.raises(DscError, match=r"no model at \./missing") as caught:
        find_model("./missing")
    assert caught.value.wanted == "a folder, or owner/name on Hugging Face"


def must_not_download(model: str) -> Path:
    pytest.fail(f"downloaded {model}")


@pytest.mark.parametrize("download", [None, must_not_download])
def test_the_example_without_a_checkout_is_not_asked_of_the_hub(cache, monkeypatch, download):
    monkeypatch.setattr(hub, "_checkout", lambda: cache)
    with pytest.raises(DscError, match="no model at examples/tiny-r1") as caught:
        find_model("examples/tiny-r1", download=download)
    assert caught.value.try_ == "--model FOLDER"


def test_patterns_name_data_and_no_code():
    assert matching(SMALL_FILES) == {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert matching(WEIGHTS) == {"model-00001-of-000163.safetensors", "model.safetensors"}


def matching(patterns: tuple[str, ...]) -> set[str]:
    files = (
        "config.json", "model-00001-of-000163.safetensors", "model.safetensors", "tokenizer.json",
        "model.safetensors.index.json", "modeling_deepseek.py", "pytorch_model.bin",
    )  # fmt: skip
    return {file for file in files for pattern in patterns if fnmatch(file, pattern)}


def test_a_download_is_asked_for_a_repository_even_where_it_is_cached(cache, tmp_path):
    put(cache, R1, "config.json")
    assert find_model(R1, download=lambda model: tmp_path / model) == tmp_path / R1


def test_a_folder_is_taken_as_it_is(cache):
    assert find_model(str(TINY), download=must_not_download) == TINY


def test_a_failed_download_says_how_to_go_on(cache, monkeypatch):
    def snapshot_download(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(DscError) as caught:
        fetch(R1, SMALL_FILES)
    assert caught.value.got == "No space left on device"
    assert caught.value.try_.startswith("hf download deepseek-ai/DeepSeek-R1: run again")


def test_known_sizes_are_those_of_the_released_shapes():
    """models.md's rows, through expected_tensors: the table and the names agree to 0.1 GB and the headers."""
    r1 = replace(
        read_config(TINY), vocab_size=129280, hidden_size=7168, num_layers=61, num_heads=128, q_lora_rank=1536,
        intermediate_size=18432, moe_intermediate_size=2048, num_experts=256, num_dense_layers=3,
    )  # fmt: skip
    k2 = replace(r1, num_heads=64, num_experts=384, num_dense_layers=1, num_mtp_layers=0, vocab_size=163840)
    v2 = replace(
        r1, hidden_size=5120, num_layers=60, intermediate_size=12288, moe_intermediate_size=1536, num_experts=160,
        num_shared_experts=2, num_dense_layers=1, num_mtp_layers=0, vocab_size=102400, router_bias=False,
        source=SourceFormat("bf16"),
    )  # fmt: skip
    lite = replace(
        v2, hidden_size=2048, num_layers=27, num_heads=16, q_lora_rank=None, intermediate_size=10944,
        moe_intermediate_size=1408, num_experts=64,
    )  # fmt: skip
    names = [R1, "moonshotai/Kimi-K2-Instruct", "deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V2-Lite"]
    sizes = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
    for repository, spec in zip(names, (r1, k2, v2, lite), strict=True):
        total = sum(math.prod(e.shape) * sizes[e.dtypes[0]] for e in expected_tensors(spec).values())
        assert abs(SIZES[repository] - total) < 0.1e9, (repository, total)
