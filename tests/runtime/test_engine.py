"""Engines of a real checkpoint: text does not depend on how it was computed, and faults are told before any work."""

import gc
import json
import shutil
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines import Sequences

from dsc import runtime
from dsc.runtime.batch import Batch, Segment
from dsc.runtime.errors import DscError
from dsc.runtime.executor import Executor
from dsc.runtime.sampling import SamplingParams

PROMPTS = [
    "def __init__(self, name):\n",
    "The heapq module provides",
    "import os\nimport sys\n\nclass Reader:\n    def read(",
    ".. function:: open(",
    "x",
    "for i in range(10):\n    print(i)\n" * 3,
    "Return the number of",
    "try:\n    value = int(text)\nexcept ValueError:",
]
NEAR = 1e-3  # two best logits closer than this may swap when sums are taken in another order


def same_until_near(first, second):
    """Greedy outputs agree up to a place where the two best tokens were as good as equal."""
    assert len(first) == len(second)
    agreed = 0
    for one, other in zip(first, second, strict=True):
        for place, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
            if a != b:
                (_, best), (_, next_best) = one.logprobs[place].top[:2]
                assert best - next_best < NEAR, f"{one.text!r} and {other.text!r} part at token {place}"
                break
            agreed += 1
    assert agreed > 0.8 * sum(len(one.token_ids) for one in first)


def greedy(engine, prompts, **options):
    return engine.generate(prompts, temperature=0, **{"max_tokens": 32, "ignore_eos": True, "logprobs": 2, **options})


@pytest.fixture(scope="module")
def one_by_one(fp32):
    """Greedy texts, one request at a time, without speculation and without anything cached before."""
    return [greedy(fp32, [prompt], drafts=0)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("drafts", [0, 1])
def test_greedy_batch_equals_one_by_one(fp32, one_by_one, drafts):
    same_until_near(one_by_one, greedy(fp32, PROMPTS, drafts=drafts))


def test_speculation_accepts_most_of_a_trained_models_drafts(fp32):
    before = fp32.acceptance
    outputs = greedy(fp32, PROMPTS)
    drafted, accepted = (after - b for after, b in zip(fp32.acceptance, before, strict=True))
    assert (drafted, accepted) == (sum(o.drafted for o in outputs), sum(o.accepted for o in outputs))
    assert 0.5 < accepted / drafted < 1
    assert fp32.max_drafts == 1


def test_little_cache_changes_nothing(fp32_folder, one_by_one):
    """Four blocks of 64 tokens hold two or three of the eight requests, so that they wait and are preempted."""
    small = runtime.load(fp32_folder, cache_tokens=256)
    assert small.cache.capacity_tokens == 256
    outputs = greedy(small, PROMPTS, max_tokens=80)
    same_until_near(one_by_one, [replace(o, token_ids=o.token_ids[:32]) for o in outputs])
    assert small._loop.scheduler.preempted > 0
    assert small.cache.pool.num_free == small.cache.pool.num_blocks


def test_what_the_cache_held_before_is_never_read(fp32_folder, one_by_one):
    """Blocks full of NaN, as a failed request may leave them behind."""
    engine = runtime.load(fp32_folder, cache_tokens=2048)
    for tensor in engine.cache.tensors.values():
        tensor.fill_(0xFF)
    same_until_near(one_by_one, greedy(engine, PROMPTS))


def test_prompts_longer_than_a_step_are_computed_in_pieces(fp32):
    text = (PROMPTS[2] + PROMPTS[1]) * 60
    tokens = fp32.tokenizer.encode(text)[:1200]
    assert len(tokens) > 2 * fp32.manifest.limits.batch_tokens
    output, short = greedy(fp32, [tokens, PROMPTS[0]], max_tokens=8, drafts=0)
    whole = [*tokens, *output.token_ids]
    by_hand = Sequences(fp32, [whole])
    rows = torch.cat([by_hand.step([min(300, len(whole) - at)])[0] for at in range(0, len(whole), 300)])
    logprobs = torch.log_softmax(rows, -1)[len(tokens) - 1 : -1]
    assert [entry.logprob for entry in output.logprobs] == pytest.approx(
        logprobs[range(8), output.token_ids].tolist(), abs=1e-4
    )
    assert logprobs.argmax(-1).tolist() == output.token_ids
    assert short.token_ids == greedy(fp32, [PROMPTS[0]], max_tokens=8, drafts=0)[0].token_ids


def test_drafts_equal_the_mtp_model_run_by_hand(fp32):
    prompts = [fp32.tokenizer.encode(p) for p in (PROMPTS[0], PROMPTS[5])]
    for tokens, draft in zip(prompts, fp32.draft(prompts), strict=True):
        blocks = fp32.cache.pool.take(fp32.cache.blocks_for(len(tokens)))
        batch = Batch.of([Segment(tokens, 0, blocks)], fp32.cache.block_tokens)
        logits, hidden = fp32.forward_with_hidden(batch)
        token = int(logits[-1].argmax())
        successors = torch.tensor([*tokens[1:], token], dtype=torch.int32)
        drafted = fp32.forward(batch.for_mtp(successors, hidden, batch.logit_rows), model="mtp")
        assert (draft.token, draft.drafts) == (token, [int(drafted[-1].argmax())])
        fp32.cache.pool.give(blocks)


def test_sampled_text_depends_on_the_seed_alone(fp32):
    options = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 24, "ignore_eos": True}
    alone = [fp32.generate([p], seed=7, drafts=0, **options)[0].token_ids for p in PROMPTS]
    assert [o.token_ids for o in fp32.generate(PROMPTS, seed=7, **options)] == alone
    assert [o.token_ids for o in fp32.generate(PROMPTS, seed=8, **options)] != alone
    drawn = [fp32.generate(PROMPTS[:1], **options)[0].token_ids for _ in range(2)]
    assert drawn[0] != drawn[1]
    per_prompt = [fp32.sampling(seed=7, **options), fp32.sampling(temperature=0, max_tokens=3)]
    first, second = fp32.generate(PROMPTS[:2], per_prompt)
    assert first.token_ids == alone[0]
    assert len(second.token_ids) == 3


def test_defaults_are_the_models(wint4):
    assert wint4.defaults == SamplingParams(temperature=0.6, top_p=0.95)
    (output,) = wint4.generate([PROMPTS[0]], max_tokens=5)
    assert output.prompt_tokens == len(wint4.tokenizer.encode(PROMPTS[0]))
    assert (len(output.token_ids), output.finish_reason, output.logprobs) == (5, "length", None)


def test_stream_gives_the_text_of_generate(wint4):
    options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    (output,) = wint4.generate([PROMPTS[1]], **options)
    stream = wint4.stream(PROMPTS[1], **options)
    pieces = list(stream)
    assert len(pieces) > 5
    assert "".join(pieces) == output.text == stream.output.text
    stop = output.text[10:14]
    cut = "".join(wint4.stream(PROMPTS[1], stop=stop, **options))
    assert cut == output.text[: output.text.index(stop)]


def test_streams_side_by_side_and_let_go(wint4):
    free = wint4.cache.pool.num_free
    options = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    wanted = [o.text for o in wint4.generate(PROMPTS[:2], **options)]
    streams = [wint4.stream(p, **options) for p in PROMPTS[:2]]
    texts = ["", ""]
    for i in [0, 1] * 30:
        texts[i] += next(streams[i], "")
    assert texts == wanted
    stream = wint4.stream(PROMPTS[2], **options)
    next(stream)
    with pytest.raises(DscError, match="the stream has not ended"):
        _ = stream.output
    del stream
    wint4.generate(["x"], max_tokens=1)
    assert wint4.cache.pool.num_free == free


def test_threads_share_steps(fp32, one_by_one):
    found = {}

    def serve(i):
        found[i] = greedy(fp32, [PROMPTS[i]])[0]

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same_until_near(one_by_one[:4], [found[i] for i in range(4)])


def test_chat_goes_through_the_template(wint4):
    messages = [{"role": "user", "content": "Hello"}]
    tokens = wint4.tokenizer.encode_chat(messages)
    (chat,) = wint4.generate([messages], max_tokens=4, temperature=0)
    (plain,) = wint4.generate([tokens], max_tokens=4, temperature=0)
    assert chat.token_ids == plain.token_ids
    assert tokens.count(0) == 1


def test_faults_of_prompts_are_told_together_before_any_work(wint4):
    executed = wint4._loop.drafted
    with pytest.raises(DscError) as caught:
        wint4.generate(["fine", [], [5, 2048], "", [7] * 2048, [3, -1]], max_tokens=4)
    text = str(caught.value)
    assert text.startswith("prompts: 5 faults")
    assert "prompt 1: the prompt is empty" in text
    assert "prompt 2: a token id is out of range\n  wanted  0 to 2047\n  got     2048" in text
    assert "prompt 3: the prompt is empty" in text
    assert "prompt 4: the prompt is longer than the engine's context\n  wanted  up to 2047 tokens" in text
    assert "prompt 5: a token id is out of range" in text
    assert wint4._loop.drafted == executed
    assert wint4.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("one prompt", {}, r"prompts is one prompt\n  wanted  a list of prompts\n  try     \[prompt\]"),
        ([1, 2, 3], {}, "prompts is one prompt"),
        (["a"], {"temperature": -1}, "^temperature is out of its range"),
        (["a"], {"max_token": 3}, "unknown sampling parameter max_token"),
        (["a"], {"drafts": 2}, "^drafts is out of its range"),
        (["a"], {"stop_token_ids": [2048]}, "^stop_token_ids is out of its range"),
        ([3.5], {}, "prompt 0: a prompt of another kind"),
        (
            ["a"],
            {"params": [SamplingParams(top_p=2, min_p=2)]},
            "prompts: 2 faults\nprompt 0: top_p .*[^$]*\nprompt 0: min_p",
        ),
        (["a"], {"params": []}, "not one set of parameters per prompt"),
    ],
)
def test_faults_of_parameters(wint4, prompts, options, message):
    with pytest.raises(DscError, match=message):
        wint4.generate(prompts, **options)


def test_the_context_is_filled_and_no_further(wint4):
    (output,) = wint4.generate([[5] * 2030], temperature=0, ignore_eos=True)
    assert (output.finish_reason, len(output.token_ids)) == ("length", 18)


def test_logits_that_are_not_numbers_fail_their_request_alone(wint4_folder):
    """A weight turned into NaN for one token: whoever has it in its text fails, the others do not notice."""
    engine = runtime.load(wint4_folder, prefix_reuse=False)
    bad, good = [5, 6, 7], engine.tokenizer.encode(PROMPTS[1])
    wanted = greedy(engine, [good])[0].token_ids
    run = engine.models["main"].run

    def poisoned(batch, phase=""):
        logits, hidden = run(batch, phase)
        for i, row in enumerate(batch.logit_rows.tolist()):
            if int(batch.tokens[row]) == 7:
                logits[i, 100] = np.nan
        return logits, hidden

    engine.models["main"].run = poisoned
    failed, fine = greedy(engine, [bad, good])
    assert failed.finish_reason == "error"
    assert failed.error == "the model's logits are not numbers (NaN)"
    assert fine.token_ids == wanted
    with pytest.raises(DscError, match="not numbers"):
        list(engine.stream(bad))


def test_executed_nodes_are_the_reported_ones(fp32):
    greedy(fp32, [*PROMPTS, [9] * 600], max_tokens=3)
    assert all(fp32.executed.values())
    for graph, nodes in fp32.report["nodes"].items():
        assert list(fp32.executed[graph]) == [entry["node"] for entry in nodes], graph
    assert fp32.executed.keys() == fp32.report["nodes"].keys()


@pytest.mark.parametrize("engine", ["fp32", "wint4"])
def test_weights_in_memory_are_the_engines(engine, request):
    engine = request.getfixturevalue(engine)
    stored = sum(entry.bytes for entry in engine.manifest.tensors.values())
    assert 0.95 < engine.resident_weight_bytes() / stored < 1.05


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="only Linux tells")
def test_packed_weights_do_not_stay_in_memory_twice(wint4_folder, tmp_path):
    """After loading, no page of the weight files is held; those kept as stored are read when they are used."""
    copy = shutil.copytree(wint4_folder, tmp_path / "copy.engine")
    engine = runtime.load(copy)
    sizes, ours = {"Size:": 0, "Rss:": 0}, False
    for label, value, *rest in map(str.split, Path("/proc/self/smaps").read_text().splitlines()):
        if not label.endswith(":"):
            ours = bool(rest) and rest[-1].startswith(str(copy))
        elif ours and label in sizes:
            sizes[label] += int(value)
    stored = sum(entry.bytes for entry in engine.manifest.tensors.values()) / 1024
    assert sizes["Size:"] > 0.9 * stored
    assert sizes["Rss:"] < 0.1 * stored


@pytest.mark.parametrize("graph", ["main.prefill", "main.decode", "mtp.prefill", "mtp.decode"])
@pytest.mark.parametrize("engine", ["fp32", "wint4"])
def test_memory_plan_holds(engine, graph, request):
    """Every intermediate at its planned place, freed memory poisoned: the same bits come out."""
    engine = request.getfixturevalue(engine)
    program = engine.programs[graph].program
    generator = torch.Generator().manual_seed(3)
    queries = [5, 1, 30] if graph.endswith("prefill") else [2, 1, 2]
    vocab, blocks = engine.spec.vocab_size, iter(range(1, 10))
    segments = [
        Segment(torch.randint(0, vocab, (n,), generator=generator).tolist(), at, [next(blocks), next(blocks)])
        for n, at in zip(queries, [0, 70, 3], strict=True)
    ]
    batch = Batch.of(segments, engine.cache.block_tokens)
    inputs = batch.inputs()
    if "hidden" in program.inputs:
        dtype = getattr(torch, program.operands["hidden"].dtype)
        inputs["hidden"] = torch.randn(len(batch.tokens), engine.spec.hidden_size, generator=generator).to(dtype)
    results, caches = [], []
    for arena in (False, True):
        executor = Executor(program, engine._folder, arena=arena)
        state = {n: torch.zeros_like(t[:10]) for n, t in engine.cache.tensors.items() if n in program.operands}
        for fill in state.values():
            fill.random_(0, 60, generator=torch.Generator().manual_seed(5))  # small bytes: finite numbers in any dtype
        executor.set_state(state)
        outputs = executor.run(inputs)
        results.append({name: t.clone() for name, t in outputs.items()})
        caches.append(state)
    for name, value in results[0].items():
        assert value.dtype == torch.uint8 or value.isfinite().all(), name
        assert torch.equal(value.view(torch.uint8), results[1][name].view(torch.uint8)), name
    for name, value in caches[0].items():
        assert torch.equal(value, caches[1][name]), name


def test_forward_refuses_what_does_not_fit(fp32):
    batch = Batch.of([Segment([1, 2], 0, [0])], fp32.cache.block_tokens)
    with pytest.raises(DscError, match="no model mpt\n  wanted  main, mtp\n  try     mtp"):
        fp32.forward(batch, model="mpt")
    with pytest.raises(DscError, match="unknown phase verify"):
        fp32.forward(batch, phase="verify")
    with pytest.raises(DscError, match="mtp needs the hidden rows"):
        fp32.forward(batch, model="mtp")


def test_load_refuses(fp32_folder, tmp_path):
    with pytest.raises(DscError, match="no such engine"):
        runtime.load(tmp_path / "missing.engine")
    with pytest.raises(DscError, match="an engine for cpu cannot run on cuda"):
        runtime.load(fp32_folder, device="cuda")


def test_load_tells_a_changed_byte(fp32_folder, tmp_path):
    copy = tmp_path / "changed.engine"
    shutil.copytree(fp32_folder, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    name, entry = next((n, e) for n, e in manifest["tensors"].items() if n.startswith("model.layers.2.mlp.experts"))
    with open(copy / entry["file"], "r+b") as file:
        file.seek(entry["offset"] + 5)
        byte = file.read(1)
        file.seek(entry["offset"] + 5)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DscError, match=f"the bytes of {name} changed"):
        runtime.load(copy)
    assert runtime.load(copy, verify=False).spec.num_layers == 4


def test_a_deleted_engine_is_gone_at_once(fp32_folder):
    """Not when Python next looks for cycles: its memory is wanted by the next one."""
    engine = runtime.load(fp32_folder)
    engine.generate(PROMPTS[:2], max_tokens=3)
    engine.stream(PROMPTS[0], max_tokens=3).close()
    parts = [weakref.ref(part) for part in (engine, engine.backend, engine.cache, engine.programs["main.decode"])]
    gc.disable()
    try:
        del engine
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_without_a_tokenizer_token_ids_still_work(wint4_folder, tmp_path):
    copy = tmp_path / "bare.engine"
    shutil.copytree(wint4_folder, copy)
    engine = runtime.load(copy)
    (copy / "tokenizer" / "tokenizer.json").unlink()
    (output,) = engine.generate([[0, 5, 6]], max_tokens=3, temperature=0)
    assert (output.text, len(output.token_ids)) == ("", 3)
    with pytest.raises(DscError, match=r"no tokenizer\.json"):
        engine.generate(["text"])
    with pytest.raises(DscError, match="stop strings need a tokenizer"):
        engine.generate([[5]], stop="x")
    with pytest.raises(DscError, match="no text to stream"):
        engine.stream([5])


def test_import_is_fast_and_brings_no_compiler(fp32_folder):
    """In a process of its own, in seconds of the processor: torch takes over one, nothing else may add half of one."""
    code = (
        "import sys, time; import torch; t = time.process_time(); import dsc.runtime.engine; t = time.process_time() - t\n"
        "from dsc import runtime; e = runtime.load(sys.argv[1]); e.generate(['def f'], max_tokens=2)\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('onnx', 'onnx_graphsurgeon', 'transformers')"
        " or m.startswith(('dsc.compiler', 'dsc.passes'))]\n"
        "print(t, heavy)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(fp32_folder)], capture_output=True, text=True, check=True)
    seconds, heavy = out.stdout.split(" ", 1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 0.5
