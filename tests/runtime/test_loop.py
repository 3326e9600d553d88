"""Batching, chunks, preemption, shared prefixes and drafts change nothing in what is generated."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_loop import VOCAB, ToyEngine, greedy_text

from dsc.runtime.errors import DscError

PROMPTS = [[5], [7, 8, 9], list(range(2, 31)), [3] * 17, [11, 12] * 10]


def test_greedy_text_of_a_batch():
    engine = ToyEngine()
    assert engine.say(PROMPTS, max_new=20, ignore_eos=True) == [greedy_text(p, 20) for p in PROMPTS]
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=7),
    st.integers(1, 24),
    st.integers(14, 60),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 3),
    st.sampled_from([0, 2, 3]),
    st.booleans(),
)
def test_any_way_to_run_gives_the_same_text(
    prompts, batch_tokens, num_blocks, sequences, block_tokens, drafts, wrong_every, prefix_reuse
):
    """14 blocks hold only one request or two, so that requests are preempted all the time."""
    blocks = max(num_blocks * 4 // block_tokens, -(-52 // block_tokens))
    engine = ToyEngine(blocks, block_tokens, batch_tokens, sequences, drafts, wrong_every, prefix_reuse)
    assert engine.say(prompts, ignore_eos=True) == [greedy_text(p, 12) for p in prompts]
    assert engine.cache.pool.num_free == blocks
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting


def test_perfect_drafts_are_all_accepted():
    for drafts in (1, 2, 3):
        engine = ToyEngine(drafts=drafts, batch_tokens=32)
        (request,) = engine.run([engine.request([4, 5, 6], max_new=24, ignore_eos=True)])
        assert request.accepted == request.drafted > 0
        assert (engine.loop.drafted, engine.loop.accepted) == (request.drafted, request.accepted)
        steps = -(-24 // (1 + drafts))
        assert abs(request.drafted - (24 - 1 - steps)) <= 1  # every step but the first gives 1 + drafts tokens


def test_wrong_drafts_are_refused_and_counted():
    engine = ToyEngine(drafts=2, wrong_every=2)
    (request,) = engine.run([engine.request([4, 5, 6], max_new=40, ignore_eos=True)])
    assert request.tokens[3:] == greedy_text([4, 5, 6], 40)
    assert 0 < request.accepted < request.drafted


def test_requests_with_and_without_drafts_share_steps():
    engine = ToyEngine(drafts=2, wrong_every=3)
    requests = [
        engine.request(p, ignore_eos=True, drafts=d) for p, d in zip(PROMPTS * 2, [0, 2, 1, 0, 2] * 2, strict=True)
    ]
    for request in engine.run(requests):
        assert request.tokens[len(request.prompt) :] == greedy_text(request.prompt, 12)
        assert (request.drafted > 0) == (request.max_drafts > 0)


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_sampled_text_depends_on_the_seed_alone(drafts):
    options = {"temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
    alone = [ToyEngine(drafts=0).say([p], seed=i, **options)[0] for i, p in enumerate(PROMPTS)]
    engine = ToyEngine(drafts=drafts, wrong_every=3, batch_tokens=9)
    together = engine.run([engine.request(p, seed=i, **options) for i, p in enumerate(PROMPTS)])
    assert [r.tokens[len(r.prompt) :] for r in together] == alone
    again = ToyEngine().say([PROMPTS[2]], seed=77, **options)[0]
    assert again != alone[2]


@pytest.mark.parametrize("drafts", [0, 2])
def test_penalties_and_bias_with_drafts(drafts):
    """Rows of drafts see the drafts before them, so speculation changes nothing."""
    options = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": {9: 2.0}}
    plain = ToyEngine().say(PROMPTS, max_new=24, ignore_eos=True, **options)
    engine = ToyEngine(drafts=drafts, wrong_every=4)
    assert engine.say(PROMPTS, max_new=24, ignore_eos=True, **options) == plain
    assert plain != [greedy_text(p, 24) for p in PROMPTS]


def test_repetition_penalty_bars_repetition():
    (text,) = ToyEngine().say([[5, 6]], max_new=VOCAB - 2, ignore_eos=True, presence_penalty=100.0)
    assert sorted({*text}) == sorted(text)
    (biased,) = ToyEngine().say([[5, 6]], max_new=5, ignore_eos=True, logit_bias={13: 100.0})
    assert biased == [13] * 5


@pytest.mark.parametrize("drafts", [0, 2])
def test_end_tokens_and_min_tokens(drafts):
    text = greedy_text([4, 5], 30)
    end = text[6]
    first = text.index(end)
    engine = ToyEngine(drafts=drafts, wrong_every=5)
    request, late = engine.run([
        engine.request([4, 5], max_new=30, ignore_eos=True, stop_token_ids=[end]),
        engine.request([4, 5], max_new=30, ignore_eos=True, stop_token_ids=[end], min_tokens=first + 3),
    ])  # fmt: skip
    assert request.tokens[2:] == text[: first + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", end)
    generated = late.tokens[2:]
    assert end not in generated[: first + 3]
    assert generated[:first] == text[:first]
    assert len(generated) >= first + 3


def test_stop_strings_end_the_text_and_not_the_tokens():
    text = greedy_text([4, 5], 30)
    decode = lambda ids: "".join(f"<{i}>" for i in ids)  # noqa: E731
    stop = f"{text[4]}><{text[5]}"
    engine = ToyEngine(drafts=2)
    (request,) = engine.run([engine.request([4, 5], max_new=30, decode=decode, ignore_eos=True, stop=[stop])])
    output = request.output()
    assert output.text == decode(text[:4]) + "<"
    assert output.token_ids == text[:6]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_request_with_nan_fails_alone():
    victim = greedy_text([20, 21], 4)[3]
    engine = ToyEngine(broken_after=victim, prefix_reuse=True)
    prompts = [[20, 21], *(p for p in PROMPTS if victim not in [*p, *greedy_text(p, 12)])]
    assert len(prompts) > 2
    requests = engine.run([engine.request(p, ignore_eos=True) for p in prompts])
    assert requests[0].finish_reason == "error"
    assert "NaN" in requests[0].error
    assert requests[0].tokens[2:] == greedy_text([20, 21], 4)
    for request in requests[1:]:
        assert request.tokens[len(request.prompt) :] == greedy_text(request.prompt, 12)
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def test_a_failed_step_ends_its_requests_and_leaves_the_loop_whole():
    engine = ToyEngine()
    run, engine.main.run = engine.main.run, lambda batch: (_ for _ in ()).throw(MemoryError("no room"))
    request = engine.request([3, 4])
    engine.loop.submit(request)
    with pytest.raises(MemoryError):
        engine.loop.drive(request)
    assert request.finish_reason == "error"
    assert "no room" in request.error
    engine.main.run = run
    assert engine.say([[3, 4]], ignore_eos=True) == [greedy_text([3, 4], 12)]


def test_prefixes_are_computed_once():
    engine = ToyEngine(drafts=1, batch_tokens=32)
    shared = list(range(2, 26))
    engine.say([[*shared, 30]], ignore_eos=True)
    rows: list[int] = []
    run = engine.main.run
    engine.main.run = lambda batch: (rows.append(len(batch.tokens)), run(batch))[1]
    assert engine.say([[*shared, 31, 32]], ignore_eos=True) == [greedy_text([*shared, 31, 32], 12)]
    assert rows[0] == 6  # 26 tokens, of which five full blocks of 4 were there: the sixth ends before another token


def test_cancelled_requests_give_their_blocks_back():
    engine = ToyEngine()
    requests = [engine.request([i + 2] * 9, max_new=50, ignore_eos=True) for i in range(6)]
    for request in requests:
        engine.loop.submit(request)
    for _ in range(3):
        engine.loop.drive(requests[0])
    for request in requests:
        engine.loop.cancel(request)
    engine.loop.settle()
    assert {r.finish_reason for r in requests} == {"cancelled"}
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def test_blocks_held_outside_are_told():
    engine = ToyEngine(num_blocks=6)
    held = engine.cache.pool.take(5)
    (request,) = engine.run([engine.request([2] * 9)])
    assert (request.finish_reason, "5 are held outside" in request.error) == ("error", True)
    engine.cache.pool.give(held)
    assert engine.say([[2] * 9], ignore_eos=True) == [greedy_text([2] * 9, 12)]


def test_threads_share_the_loop():
    engine = ToyEngine(drafts=1, wrong_every=3)
    found: dict[int, list[list[int]]] = {}

    def serve(i: int) -> None:
        found[i] = engine.say(PROMPTS[i : i + 2], ignore_eos=True)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {i: [greedy_text(p, 12) for p in PROMPTS[i : i + 2]] for i in range(4)}


def test_logprobs_are_of_the_models_own_logits():
    from support.toy_loop import logits_of, text_hash

    engine = ToyEngine(drafts=2)
    options = {"ignore_eos": True, "logprobs": 3, "logit_bias": {13: 100.0}, "temperature": 0.7, "seed": 1}
    (request,) = engine.run([engine.request([4, 5], max_new=6, **options)])
    assert len(request.logprobs) == 6
    for i, entry in enumerate(request.logprobs):
        expected = torch.log_softmax(torch.from_numpy(logits_of(text_hash(request.tokens[: 2 + i]))), -1)
        assert entry.token_id == request.tokens[2 + i] == 13
        assert entry.logprob == pytest.approx(float(expected[13]), abs=1e-5)
        values, ids = expected.topk(3)
        assert [i for i, _ in entry.top] == ids.tolist()
        assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_a_request_that_leaves_while_another_thread_takes_requests_in():
    """It came before it left, so it is let go and not served."""
    engine = ToyEngine()
    request = engine.request([5, 6])
    engine.loop.submit(request)
    engine.loop.cancel(request)
    engine.loop.settle()
    assert request.finish_reason == "cancelled"
    assert engine.say([[7]], max_new=2)
    assert request.tokens == [5, 6]
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def test_a_closed_loop_serves_nobody():
    engine = ToyEngine()
    started, late = engine.request([5], max_new=9), engine.request([6])
    engine.loop.submit(started)
    engine.loop.drive(started)
    engine.loop.close()
    for serve in (lambda: engine.loop.drive(started), lambda: engine.loop.submit(late)):
        with pytest.raises(DscError, match="the engine is closed"):
            serve()
    engine.loop.cancel(started)
    engine.loop.settle()
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks
