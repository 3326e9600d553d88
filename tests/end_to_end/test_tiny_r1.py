"""The trained checkpoint through every tiny-r1 recipe, against transformers in float32."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.engines import TINY_R1, compile_tiny
from support.oracle import Oracle
from support.plain import PlainFp8
from support.quality import engine_logits, held_out, judge, nats_apart
from support.tolerances import LOGIT_GAPS

from dsc import runtime
from dsc.runtime.engine import Engine

FORMATS = ("fp32", "bf16", "fp8", "wint8", "wint4")
PROMPTS = (
    "def ", "import ", "class Fraction", "The statistics module", "    return", "for i in range(", ".. function:: ",
    "try:\n    ", "while True:\n", "print(", "@property\n", "This module provides", "raise ValueError", "# ", "x = [",
    "from collections import",
)  # fmt: skip


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(TINY_R1, tmp_path_factory.mktemp("dequantized"))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    folder = tmp_path_factory.mktemp("engines")
    return {name: runtime.load(compile_tiny(f"tiny-r1-{name}", folder)) for name in FORMATS}


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    return held_out(4)


@pytest.fixture(scope="module")
def reference(oracle: Oracle, windows: list[list[int]]):
    known = {tuple(window): oracle.main(window)[0] for window in windows}
    return lambda tokens: known[tuple(tokens)]


def test_64_greedy_tokens_of_16_prompts(engines: dict[str, Engine], oracle: Oracle) -> None:
    """Each token is transformers' best after the same beginning, so the texts are equal."""
    engine = engines["fp32"]
    prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    options = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    outputs = engine.generate(prompts, drafts=0, **options)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 64
        logits, _ = oracle.main([*prompt, *output.token_ids[:-1]])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == output.token_ids
    speculated = engine.generate(prompts, drafts=1, **options)
    assert [o.token_ids for o in speculated] == [o.token_ids for o in outputs]
    drafted, accepted = engine.acceptance
    assert drafted > 200
    assert accepted > 0.4 * drafted


def test_drafts_are_the_mtp_layers(engines: dict[str, Engine], oracle: Oracle) -> None:
    engine = engines["fp32"]
    prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    for prompt, draft in zip(prompts, engine.draft(prompts), strict=True):
        logits, hidden = oracle.main(prompt)
        assert draft.token == int(logits[-1].argmax())
        mtp_logits, _ = oracle.mtp([*prompt[1:], draft.token], hidden)
        assert draft.drafts == [int(mtp_logits[-1].argmax())]


# nats a token: how far an engine may be from the reference.
NATS = {"fp32": 1e-4, "bf16": 0.002, "wint8": 0.005, "wint4": 0.06, "fp8": 0.01}


@pytest.mark.parametrize("name", FORMATS)
def test_held_out_text(name: str, engines: dict[str, Engine], reference, windows: list[list[int]]) -> None:
    exact, quality = judge(reference, reference, windows), judge(engine_logits(engines[name]), reference, windows)
    print(
        f"{name}: {quality.nats:.4f} nats, KL {quality.kl:.5f}, top-1 {quality.top1:.2%}, gap {quality.worst_gap:.2f}"
    )
    assert quality.tokens == 4 * 511
    assert abs(quality.nats - exact.nats) < NATS[name]
    assert quality.worst_gap < LOGIT_GAPS[name]


def test_fp8_is_as_good_as_the_same_computation_in_plain_torch(
    engines: dict[str, Engine], oracle: Oracle, windows: list[list[int]]
) -> None:
    """A last bit tips values into the next e4m3 code, each of which tips more in the next layer: two such computations
    are equal op by op (tests/plugins), not in every logit, but equally good on a text."""
    plain = PlainFp8(oracle.config, oracle.tensors, torch.bfloat16)
    known = {tuple(window): plain.main(window) for window in windows}

    def same(tokens: list[int]) -> torch.Tensor:
        return known[tuple(tokens)]

    exact, quality = judge(same, same, windows), judge(engine_logits(engines["fp8"]), same, windows)
    assert quality.kl < 0.01
    assert abs(quality.nats - exact.nats) < nats_apart(quality.tokens, quality.kl)


@pytest.mark.parametrize("name", FORMATS)
def test_report_and_memory(name: str, engines: dict[str, Engine]) -> None:
    engine = engines[name]
    runs = [run for entry in engine.report["passes"] for run in entry["graphs"]]
    assert {run["graph"] for run in runs} == {"main.prefill", "main.decode", "mtp.prefill", "mtp.decode"}
    assert all(run["found"] == run["expected"] for run in runs if run["expected"] is not None)
    engine.generate([[5, 6, 7] * 30, [8]], max_tokens=6, temperature=0.0, ignore_eos=True)
    for graph, executed in engine.executed.items():
        assert executed == tuple(node["node"] for node in engine.report["nodes"][graph]), graph
    stored = sum(entry.bytes for entry in engine.manifest.tensors.values())
    assert engine.resident_weight_bytes() < 1.05 * stored


def test_two_builds_give_the_same_bytes(tmp_path: Path) -> None:
    builds = []
    for threads, folder in (("1", tmp_path / "a"), ("3", tmp_path / "some" / "where else")):
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "dsc.compiler.cli", "compile", "--recipe", "tiny-r1-wint4", "--model", TINY_R1]
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        subprocess.run([*command, "--output", "x.engine"], cwd=folder, env=environment, check=True, capture_output=True)
        files = sorted(path for path in (folder / "x.engine").rglob("*") if path.is_file())
        builds.append({p.relative_to(folder): hashlib.sha256(p.read_bytes()).hexdigest() for p in files})
    assert builds[0] == builds[1]
    assert len(builds[0]) > 12
