"""Engines of several ranks say what the engine of one rank says, however they are asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from support.engines import Sequences
from support.ranks import compile_ranks, rank_processes, wait_until_gone
from support.tolerances import ENGINE_LOGIT_GAPS

from dsc import runtime
from dsc.compiler.cli import main
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.batch import Batch, Segment
from dsc.runtime.bench import measure
from dsc.runtime.bench_points import Plan
from dsc.runtime.diff import diff
from dsc.runtime.engine import Engine
from dsc.runtime.errors import DscError
from dsc.runtime.ranks.load import share_cores
from dsc.runtime.request import Output

PROMPTS = [
    "def __init__(self, name):\n", "The heapq module provides", "import os\nimport sys\n\nclass Reader:\n    def read(",
    ".. function:: open(", "x", "for i in range(10):\n    print(i)\n" * 3, "Return the number of",
    "try:\n    value = int(text)\nexcept ValueError:", "class A(B):", "    return self.", "#", "if x is not None:\n",
    "assert ", "The default is", "    \"\"\"", "with open(path) as f:\n",
]  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def two_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_ranks("fp32", 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def two(two_folder: Path) -> Iterator[Engine]:
    """tiny-r1 in float32 on two ranks."""
    torch.set_num_threads(1)
    with runtime.load(two_folder) as engine:
        yield engine
    wait_until_gone(rank_processes())


def said(outputs: list[Output]) -> list[tuple[Any, ...]]:
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.drafted, o.accepted) for o in outputs]


@pytest.mark.parametrize("drafts", [0, 1])
def test_greedy_texts_equal(fp32: Engine, two: Engine, drafts: int) -> None:
    wanted, got = (e.generate(PROMPTS, max_tokens=64, drafts=drafts, **GREEDY) for e in (fp32, two))
    assert said(got) == said(wanted)
    assert sum(o.accepted for o in got) > 200 or not drafts


def test_every_kind_of_request_at_once(fp32: Engine, two: Engine) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.9, "seed": 5},
        {"temperature": 1.0, "top_k": 7, "min_p": 0.05, "seed": 2**62 + 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.0, "logit_bias": {5: 3.0, 9: -100.0}, "drafts": 0},
        {"temperature": 0.0, "stop": ["-2", "rt os"], "min_tokens": 4},
        {"temperature": 0.7, "seed": 3, "stop_token_ids": [10, 12], "ignore_eos": True},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "min_tokens": 12, "max_tokens": 12},
    ]
    wanted, got = (
        engine.generate(PROMPTS, [engine.sampling(**{"max_tokens": 24, **kind}) for kind in kinds * 2])
        for engine in (fp32, two)
    )
    assert said(got) == said(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert [e.logprob for e in one.logprobs or []] == pytest.approx(
            [e.logprob for e in other.logprobs or []], abs=1e-4
        )
    assert len({o.finish_reason for o in got}) == 2


def test_a_drawn_seed_is_the_same_on_all_ranks(two: Engine) -> None:
    """Otherwise the ranks would disagree, and the engine would end."""
    first, second = (two.generate(PROMPTS[:2], temperature=1.0, max_tokens=16) for _ in range(2))
    assert said(first) != said(second)


def test_streams_side_by_side_and_let_go(fp32: Engine, two: Engine) -> None:
    free = two.cache.pool.num_free
    wanted = [o.text for o in fp32.generate(PROMPTS[:2], max_tokens=20, **GREEDY)]
    streams = [two.stream(prompt, max_tokens=20, **GREEDY) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    for i in [0, 1] * 24:
        texts[i] += next(streams[i], "")
    assert texts == wanted
    stream = two.stream(PROMPTS[2], **GREEDY)
    next(stream)
    del stream
    two.generate(["x"], max_tokens=1)
    assert two.cache.pool.num_free == free


def test_threads_share_steps(fp32: Engine, two: Engine) -> None:
    wanted = said(fp32.generate(PROMPTS[:6], max_tokens=24, **GREEDY))
    found: dict[int, Any] = {}

    def serve(i: int) -> None:
        for _ in range(3):
            found[i] = said(two.generate([PROMPTS[i]], max_tokens=24, **GREEDY))

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i][0] for i in range(6)] == wanted


def test_a_prompt_in_pieces_and_one_that_begins_like_it(fp32: Engine, two: Engine) -> None:
    text = (PROMPTS[2] + PROMPTS[1]) * 60
    tokens = two.tokenizer.encode(text)[:1200]
    assert len(tokens) > 2 * two.manifest.limits.batch_tokens
    for prompt in (tokens, [*tokens[:1000], 7, 8, 9]):
        wanted, got = (engine.generate([prompt, PROMPTS[0]], max_tokens=8, **GREEDY) for engine in (fp32, two))
        assert said(got) == said(wanted)


def test_forward_and_drafts(fp32: Engine, two: Engine) -> None:
    texts = [two.tokenizer.encode(prompt) for prompt in (PROMPTS[0], PROMPTS[5])]
    assert two.draft(texts) == fp32.draft(texts)
    results = []
    for engine in (fp32, two):
        count = [engine.cache.blocks_for(len(text)) for text in texts]
        taken = [engine.cache.pool.take(n) or [] for n in count]
        batch = Batch.of([Segment(t, 0, b) for t, b in zip(texts, taken, strict=True)], engine.cache.block_tokens)
        logits, hidden = engine.forward_with_hidden(batch)
        successors = torch.tensor([token for text in texts for token in [*text[1:], 5]], dtype=torch.int32)
        drafted = engine.forward(batch.for_mtp(successors, hidden, batch.logit_rows), model="mtp")
        results.append((logits.clone(), drafted.clone()))
        # Blocks that somebody holds are left alone on all ranks.
        assert said(engine.generate(PROMPTS[:1], max_tokens=4, **GREEDY))
        for blocks in taken:
            engine.cache.pool.give(blocks)
        assert engine.cache.pool.num_free == engine.cache.pool.num_blocks
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_told_to_the_others_is_refused_before_they_hear_of_it(two: Engine) -> None:
    pool = two.cache.pool
    taken = pool.take(np.int64(2))  # type: ignore[arg-type]
    assert taken is not None
    pool.give(torch.tensor(taken))  # type: ignore[arg-type]
    assert pool.num_free == pool.num_blocks
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        pool.take(1.5)  # type: ignore[arg-type]
    batch = Batch.of([Segment([1, 2], 0, [0])], two.cache.block_tokens)
    with pytest.raises(TypeError, match="not JSON serializable"):
        two.forward(batch, phase=b"decode")  # type: ignore[arg-type]
    assert two.generate(PROMPTS[:1], max_tokens=4, **GREEDY)


def test_what_all_ranks_refuse_leaves_them_in_step(fp32: Engine, two: Engine) -> None:
    batch = Batch.of([Segment([1, 2], 0, [0])], two.cache.block_tokens)
    with pytest.raises(DscError, match="mtp needs the hidden rows that main gave"):
        two.forward(batch, model="mtp")
    with pytest.raises(DscError, match="unknown phase"):
        two.forward(batch, phase="x")
    with pytest.raises(AssertionError, match="block 0 is free already"):
        two.cache.pool.give([0])
    with pytest.raises(DscError, match="the prompt is empty"):
        two.generate([[]])
    wanted, got = (engine.generate(PROMPTS[:2], max_tokens=8, **GREEDY) for engine in (fp32, two))
    assert said(got) == said(wanted)


def test_engines_for_different_numbers_of_ranks_differ_in_tables_alone(two_folder: Path, tmp_path: Path) -> None:
    four = compile_ranks("fp32", 4, tmp_path)
    (row,) = diff(EngineFolder.open(two_folder), EngineFolder.open(four))["tensors"]
    assert row == {"weight": "expert_map", "a": "int32", "b": "int32", "bytes_a": 128, "bytes_b": 256}
    shown = CliRunner().invoke(main, ["diff", str(two_folder), str(four)])
    assert shown.exit_code == 1
    assert "128 B / 256 B" in shown.output


def test_ranks_share_the_cores(two_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    try:
        for threads, ranks, wanted in ((8, 2, 4), (8, 4, 2), (8, 16, 1), (3, 4, 2), (2, 4, 2), (1, 4, 1)):
            torch.set_num_threads(threads)
            share_cores(ranks)
            assert torch.get_num_threads() == wanted, (threads, ranks)
        torch.set_num_threads(8)
        with runtime.load(two_folder):
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_rank_has_its_part_of_the_weights(fp32: Engine, two: Engine) -> None:
    stored = sum(entry.bytes for entry in two.manifest.tensors.values())
    assert 0.95 < fp32.resident_weight_bytes() / stored < 1.05
    cut = sum(o.bytes for o in _weights(two) if o.cuts)
    whole = sum(o.bytes for o in _weights(two) if not o.cuts)
    assert 0.95 < two.resident_weight_bytes() / (cut + whole) < 1.05
    assert cut + whole < 0.6 * stored


def _weights(engine: Engine) -> list[Any]:
    """Each part of a tensor once."""
    programs = [runner.program for runner in engine.programs.values()]
    return list({(o.tensor, o.cuts): o for p in programs for o in p.operands.values() if o.role == "weight"}.values())


def test_the_command_under_torchrun(fp32: Engine, two_folder: Path) -> None:
    """Standard input is the leader's, and so is the output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dsc.compiler.cli"]
    options = ["--json", "--temperature", "0", "--max-tokens", "8"]
    found = subprocess.run(
        [*command, "generate", str(two_folder), *options], input=b"def ", capture_output=True, check=False
    )
    assert found.returncode == 0, found.stderr.decode()
    (row,) = json.loads(found.stdout)
    (wanted,) = fp32.generate(["def "], temperature=0.0, max_tokens=8)
    assert (row["prompt"], row["token_ids"]) == ("def ", wanted.token_ids)


def test_four_ranks_with_little_cache_and_without_reuse(fp32: Engine, tmp_path: Path) -> None:
    folder = compile_ranks("fp32", 4, tmp_path)
    wanted = fp32.generate(PROMPTS[:8], max_tokens=48, **GREEDY)
    with runtime.load(folder, cache_tokens=256, prefix_reuse=False) as four:
        got = four.generate(PROMPTS[:8], max_tokens=48, **GREEDY)
        assert four.loop.scheduler.preempted > 0
        assert four.cache.pool.num_free == four.cache.pool.num_blocks == 4
        measured = measure(four, Plan([1, 2], [64], steps=2, nodes=True))
        assert [point["batch"] for point in measured["decode"]] == [1, 2]
        assert measured["weight_bytes"] == four.resident_weight_bytes()
        processes = rank_processes(folder=folder)
        assert len(processes) == 3
        threading.Timer(0.3, processes[-1].kill).start()
        with pytest.raises(DscError, match=r"rank 3 of the engine has ended\n  got  killed by SIGKILL"):
            four.generate(PROMPTS[:8], max_tokens=100, **GREEDY)
    wait_until_gone(processes)
    assert [o.token_ids for o in got] == [o.token_ids for o in wanted]


@pytest.mark.parametrize("recipe", ["wint4", "fp8"])
def test_quantized_engines_choose_as_well(recipe: str, tmp_path: Path) -> None:
    """Sums over ranks are rounded otherwise, so a near tie may turn."""
    whole = runtime.load(compile_ranks(recipe, 1, tmp_path))
    texts = [whole.tokenizer.encode(prompt) for prompt in PROMPTS[:4]]
    texts = [text + o.token_ids for text, o in zip(texts, whole.generate(texts, max_tokens=24, **GREEDY), strict=True)]
    with runtime.load(compile_ranks(recipe, 2, tmp_path)) as two:
        counts = [len(text) for text in texts]
        wanted, got = (torch.cat(Sequences(engine, texts).step(counts)) for engine in (whole, two))
        assert said(two.generate(texts, max_tokens=8, temperature=0))
    below = wanted.max(-1).values - wanted.gather(-1, got.argmax(-1, keepdim=True)).squeeze(-1)
    assert float(below.max()) <= ENGINE_LOGIT_GAPS[recipe]
    assert (wanted.argmax(-1) == got.argmax(-1)).float().mean() > 0.9
