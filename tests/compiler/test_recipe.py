"""Recipes: read strictly, every fault at once with its line, the nearest known name at hand."""

import contextlib
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.compiler.recipe import load_recipe, packaged_recipes, parse_recipe, recipe_from_json
from dsc.runtime.errors import DscError

GOOD = """\
model: examples/tiny-r1
target: cpu
parallel: {tensor: 1, expert: 1, pipeline: 1}
limits: {batch_tokens: 512, sequences: 16, context_tokens: 2048}
decode_buckets: [1, 2, 4]
kv_cache: {dtype: bf16, block_tokens: 64}
mtp: {enabled: true, drafts: 1}
passes:
  - fuse_qkv
  - set_dtype: {activations: bf16}
allow: {fuse_qkv: {count: 1, reason: a test}}
"""


def errors_of(text: str) -> str:
    with pytest.raises(DscError) as caught:
        parse_recipe(text, where="mine.yaml", name="mine")
    return str(caught.value)


def test_reads_a_complete_recipe() -> None:
    recipe = parse_recipe(GOOD, where="mine.yaml", name="mine")
    assert recipe.limits.context_tokens == 2048
    assert recipe.kv_cache.dtype == "bfloat16"
    assert [(entry.name, entry.options, entry.line) for entry in recipe.passes] == [
        ("fuse_qkv", {}, 9),
        ("set_dtype", {"activations": "bf16"}, 10),
    ]
    assert recipe.allow["fuse_qkv"].reason == "a test"
    assert recipe.parallel.num_ranks == 1


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("target: cpu", "target: cpux", 2, "nearest: cpu"),
        ("target: cpu", "targt: cpu", 2, "try     target"),
        ("target: cpu", "target: sm_90a\ngpu: h20o", 3, "nearest: h20)"),
        ("sequences: 16", "sequences: true", 4, "wanted  a whole number, 1 or more"),
        ("sequences: 16", "sequences: 0x10", 4, "wanted  a whole number, 1 or more"),
        ("sequences: 16", "sequences: 16, sequences: 17", 4, "limits.sequences is given twice"),
        ("context_tokens: 2048", "context: 2048", 4, "try     context_tokens"),
        ("enabled: true", "enabled: yes", 7, "wanted  true or false"),
        ("- fuse_qkv\n", "- fuse_qvk\n", 9, "try     fuse_qkv"),
        ("{activations: bf16}", "{activation: bf16}", 10, "try     activations"),
        ("- fuse_qkv\n", "- [fuse_qkv]\n", 9, "not a pass"),
        ("model: examples/tiny-r1", "model: &m examples/tiny-r1", 1, "anchors, aliases and tags are not read"),
        ("model: examples/tiny-r1", "model: !!python/object:os.system x", 1, "anchors, aliases and tags are not read"),
        ("model: examples/tiny-r1", "model: [", 3, "this is not YAML"),
    ],
)
def test_a_fault_names_its_line_and_what_to_do(old: str, new: str, line: int, said: str) -> None:
    assert old in GOOD
    text = errors_of(GOOD.replace(old, new, 1))
    assert f"mine.yaml:{line}:" in text
    assert said in text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[1, 2, 4]", "[2, 1]", "decode_buckets are not ascending"),
        ("[1, 2, 4]", "[1, 32]", "32 above limits.sequences 16"),
        ("sequences: 16", "sequences: 1024", "limits.sequences exceeds limits.batch_tokens"),
        ("enabled: true", "enabled: false", "mtp is off but drafts tokens"),
        ("drafts: 1", "drafts: 0", "mtp is enabled with no drafts"),
        ("target: cpu", "target: sm_80\ngpu: h200", "wanted  gpu: a100, a100-40, a800"),
        ("  - set_dtype", "  - fuse_qkv\n  - set_dtype", "pass fuse_qkv is listed twice"),
        ("allow: {fuse_qkv", "allow: {fuse_moe", "allow names fuse_moe, which does not run"),
        ("  - set_dtype", "  - quantize_norms\n  - set_dtype", "wanted  quantize_weights before it"),
        (
            "  - set_dtype",
            "  - quantize_norms\n  - quantize_weights\n  - set_dtype",
            "got     fuse_qkv, quantize_norms, quantize_weights, set_dtype",
        ),
    ],
)
def test_keys_that_contradict_each_other(old: str, new: str, said: str) -> None:
    assert old in GOOD
    assert said in errors_of(GOOD.replace(old, new, 1))


def test_the_gpu_that_an_engine_is_meant_for() -> None:
    text = GOOD.replace("target: cpu", "target: sm_90a\ngpu: h100")
    recipe = parse_recipe(text, where="mine.yaml", name="mine")
    assert (recipe.gpu, parse_recipe(GOOD, where="mine.yaml", name="mine").gpu) == ("h100", None)
    assert recipe_from_json(recipe.to_json(), "manifest.json").gpu == "h100"
    assert (recipe.override("sm_90a").gpu, recipe.override("sm_80").gpu) == ("h100", None)


def test_all_faults_at_once() -> None:
    text = errors_of(
        GOOD.replace("target: cpu", "target: x").replace("drafts: 1", "drafts: -1").replace("fuse_qkv\n", "q\n")
    )
    assert text.startswith("mine.yaml: 3 faults")
    assert [part.split(":")[1] for part in text.splitlines() if part.startswith("mine.yaml:")][1:] == ["2", "7", "9"]


def test_packaged_recipes_are_found_by_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("r1-wint4").name == load_recipe("r1-wint4.yaml").name == "r1-wint4"
    with pytest.raises(DscError, match="try     r1-wint4"):
        load_recipe("r1-wnt4")


def test_every_packaged_recipe_reads_and_is_complete() -> None:
    names = packaged_recipes()
    assert len(names) >= 11
    for name in names:
        recipe = load_recipe(name)
        assert recipe.passes[-1].name == "plan_memory", name
        options = next(str(entry.options) for entry in recipe.passes if entry.name == "quantize_weights")
        assert any(entry.name == "quantize_norms" for entry in recipe.passes) == ("fp8" in options), name
        assert None not in [
            getattr(recipe, f.name) for f in dataclasses.fields(recipe) if f.name not in ("verify", "gpu")
        ], name


def test_override() -> None:
    recipe = load_recipe("r1-wint4").override("cpu", 1)
    assert (recipe.target, recipe.parallel.num_ranks) == ("cpu", 1)
    with pytest.raises(DscError, match="unknown target gpu"):
        recipe.override("gpu")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_recipes_end_in_one_clear_error(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(GOOD)))
    piece = data.draw(st.text(max_size=4) | st.sampled_from(["{", "}", "- ", "\n  ", ": ", "[", "null", "1e9", "*a"]))
    text = GOOD[:at] + piece + GOOD[at + data.draw(st.integers(0, 6)) :]
    with contextlib.suppress(DscError):  # anything else is a crash
        parse_recipe(text, where="mine.yaml", name="mine")
