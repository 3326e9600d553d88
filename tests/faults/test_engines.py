"""Engines that are not what they were, and requests that cannot be served: refused by name; the other requests go on."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.builds import dsc, refusal
from support.engines import compile_tiny

from dsc import runtime
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.engine import Engine
from dsc.runtime.errors import DscError

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
GENERATE = ("--prompt", "def ", "--max-tokens", "2")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny("tiny-r1-wint4", tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def copy(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that a test may change and must restore."""
    return shutil.copytree(built, tmp_path_factory.mktemp("changed") / "x.engine")


@pytest.fixture(scope="module")
def engine(built: Path) -> Engine:
    return runtime.load(built)


# -- engines


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def check(folder: Path) -> None:
    """What loading begins with."""
    EngineFolder.open(folder).verify_hashes()


def test_a_changed_byte_of_any_file_is_refused_and_the_file_named(copy: Path) -> None:
    files = _files(copy)
    assert len(files) > 12
    for name in files:
        path = copy / name
        content = path.read_bytes()
        for at, read in ((0, check), (len(content) // 2, runtime.load), (len(content) - 2, check)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(DscError) as caught:
                read(copy)
            assert name in caught.value.text(), (name, at)
        path.write_bytes(content)
    runtime.load(copy)


def test_a_missing_or_shorter_file_is_refused_and_named(copy: Path) -> None:
    for name in _files(copy):
        path = copy / name
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(DscError) as caught:
            check(copy)
        assert (name if name != "manifest.json" else "is no engine") in caught.value.text()
        path.write_bytes(content[:-2])  # the last byte of a JSON file is a line's end
        with pytest.raises(DscError) as caught:
            check(copy)
        assert name in caught.value.text()
        path.write_bytes(content)
    runtime.load(copy)


@contextmanager
def _edited_manifest(copy: Path, change: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    path = copy / "manifest.json"
    content = path.read_bytes()
    manifest = json.loads(content)
    change(manifest)
    path.write_text(json.dumps(manifest))
    try:
        yield
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.update(schema_version=0), "another schema version"),
        (lambda m: m.update(schema_version=99), "another schema version"),
        (lambda m: m.update(schema_version="1"), "schema"),
        (lambda m: m.pop("schema_version"), "schema"),
        (lambda m: m.update(ranks=2), "rank"),
        (lambda m: m["spec"].pop("num_heads"), "num_heads"),
    ],
)
def test_another_engine_than_this_program_reads_is_refused_by_every_command(
    change: Callable[[dict[str, Any]], object], told: str, copy: Path
) -> None:
    with _edited_manifest(copy, change):
        for command in (("inspect", copy), ("inspect", copy, "--json"), ("generate", copy, *GENERATE)):
            text = refusal(*command)
            assert "manifest.json" in text
            assert told in text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m["limits"].update(sequences=m["limits"]["sequences"] + 1), "not planned for the engine's limits"),
        (lambda m: m["limits"].update(context_tokens=1 << 20), "not planned for the engine's limits"),
        (lambda m: m["limits"].update(batch_tokens=10**30), "not planned for the engine's limits"),
        (lambda m: m["models"].pop("main"), "no graph for decode steps of model main"),
        (lambda m: m["models"]["mtp"]["phases"].pop("prefill"), "no graph for prefill steps of model mtp"),
        (lambda m: m["models"].pop("sample"), "no graph for any step of model sample"),
    ],
)
def test_an_engine_that_promises_more_than_it_holds_is_not_run(
    change: Callable[[dict[str, Any]], object], told: str, copy: Path
) -> None:
    """Limits above those that memory was planned for would let a step write beyond it."""
    with _edited_manifest(copy, change):
        assert told in refusal("generate", copy, *GENERATE)


def test_an_engine_for_another_target_can_be_looked_at_but_not_run(copy: Path) -> None:
    with _edited_manifest(copy, lambda manifest: manifest.update(target="tpu")):
        assert "tpu" in dsc("inspect", copy).output
        assert "tpu" in refusal("generate", copy, *GENERATE)


def test_files_of_different_builds_are_refused(copy: Path, tmp_path: Path) -> None:
    """A program and its graph from another recipe, with the hashes in the manifest to match."""
    other = compile_tiny("tiny-r1-bf16", tmp_path)
    theirs = json.loads((other / "manifest.json").read_text())
    name = "program/main.decode.rank0.json"
    content = (copy / name).read_bytes()

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = theirs["files"][name]

    shutil.copyfile(other / name, copy / name)
    with (
        _edited_manifest(copy, change),
        pytest.raises(DscError, match=r"does not belong to main\.decode\.rank0\.onnx: .* different builds, rank 0"),
    ):
        runtime.load(copy)
    (copy / name).write_bytes(content)
    runtime.load(copy)


@pytest.mark.parametrize("place", ["nowhere", "empty", "file", "checkpoint"])
def test_what_is_no_engine_is_told_by_every_command(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    if place == "empty":
        path.mkdir()
    elif place == "file":
        path.write_text("words")
    elif place == "checkpoint":
        path.mkdir()
        (path / "config.json").write_text("{}")
    for command in (("inspect", path), ("generate", path, *GENERATE)):
        assert str(path) in refusal(*command)


# -- requests

CONTEXT, VOCABULARY = 2048, 2048
BAD: dict[str, tuple[Any, str]] = {
    "empty text": ("", "the prompt is empty"),
    "no token": ([], "the prompt is empty"),
    "exactly the context": ([5] * CONTEXT, "longer than the engine's context"),
    "far longer than the context": ([5] * (9 * CONTEXT), "longer than the engine's context"),
    "a text far too long": ("word " * 20_000, "longer than the engine's context"),
    "an id above": ([5, VOCABULARY], "out of range"),
    "an id below": ([-1], "out of range"),
    "an id beyond int32": ([5, 1 << 40], "out of range"),
    "an id that is no number": ([5, "x"], "prompt"),
    "an id that is a fraction": ([5, 1.5], "prompt"),
    "text that is none": ("\ud800", "UTF-8"),
    "nothing": (None, "prompt"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_prompt_is_refused_alone(kind: str, engine: Engine) -> None:
    """A stream that is under way goes on as if nothing had been asked."""
    prompt, told = BAD[kind]
    (wanted,) = engine.generate(["import "], max_tokens=12, **GREEDY)
    stream = engine.stream("import ", max_tokens=12, **GREEDY)
    pieces = [next(stream)]
    with pytest.raises(DscError) as caught:
        engine.generate(["def ", prompt], max_tokens=3, **GREEDY)
    assert "prompt 1: " in caught.value.text()
    assert told in caught.value.text()
    with pytest.raises(DscError):
        engine.stream(prompt, max_tokens=3, **GREEDY)
    pieces += list(stream)
    assert "".join(pieces) == wanted.text
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def test_the_longest_prompt_that_fits_is_served(engine: Engine) -> None:
    (output,) = engine.generate([[5] * (CONTEXT - 1)], max_tokens=9, **GREEDY)
    assert (output.finish_reason, len(output.token_ids)) == ("length", 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_numbers_end_their_request_alone(value: float, built: Path) -> None:
    """In one batch and from other threads; a single -inf is a token that cannot be, all of them are a fault."""
    engine = runtime.load(built, prefix_reuse=False)
    prompts = ["import ", "class "]
    wanted = [o.token_ids for o in engine.generate(prompts, max_tokens=6, **GREEDY)]
    run = engine.models["main"].run

    def spoiled(batch: Any, phase: str = "") -> Any:
        logits, hidden = run(batch, phase)
        for row, at in enumerate(batch.logit_rows.tolist()):
            if int(batch.tokens[at]) == 7:
                logits[row] = value
        return logits, hidden

    engine.models["main"].run = spoiled  # type: ignore[method-assign]
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.extend(engine.generate(prompts[:1], max_tokens=6, **GREEDY)))
    other.start()
    bad, *good = engine.generate([[5, 6, 7], *prompts], max_tokens=6, **GREEDY)
    other.join()
    assert bad.finish_reason == "error"
    assert "not numbers" in bad.error
    assert [o.token_ids for o in good] == wanted
    assert found[0].token_ids == wanted[0]
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks
