"""fp32 engines of every family give transformers' logits, however a text is cut into steps."""

from pathlib import Path

import pytest
import torch
from support.engines import TINY_R1, Sequences, load_fp32, prompt_tokens
from support.families import make_checkpoint
from support.oracle import Oracle, worst_row_error

LIMIT = 1e-4
LENGTHS = (70, 64, 1, 23)  # more than a block, exactly one, a single token
MTP = {"tiny-r1": True, "v3": True, "v3.1": True, "v2-lite": False, "v2": False, "k2": False}


@pytest.fixture(scope="module", params=list(MTP))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """An engine, texts, and transformers' logits of them."""
    family, scratch = request.param, tmp_path_factory.mktemp("family")
    checkpoint = TINY_R1 if family == "tiny-r1" else make_checkpoint(scratch / family, family)
    oracle = Oracle(checkpoint, scratch / "dequantized")
    engine = load_fp32(checkpoint, scratch, MTP[family])
    texts = [text[:length] for text, length in zip(prompt_tokens(4, 70, engine.spec.vocab_size), LENGTHS, strict=True)]
    return engine, texts, [oracle.main(text)[0] for text in texts]


def worst(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    assert [len(g) for g in got] == [len(w) for w in wanted]
    return max(worst_row_error(g, w) for g, w in zip(got, wanted, strict=True))


def test_prefill_of_a_ragged_batch(case) -> None:
    engine, texts, wanted = case
    assert worst(Sequences(engine, texts).step([len(t) for t in texts], "prefill"), wanted) < LIMIT


def test_absorbed_equals_expanded(case) -> None:
    engine, texts, wanted = case
    short = [t[:2] for t in texts]
    counts = [len(t) for t in short]
    absorbed = Sequences(engine, short).step(counts, "decode")
    assert worst(absorbed, [w[:n] for w, n in zip(wanted, counts, strict=True)]) < LIMIT
    assert worst(absorbed, Sequences(engine, short).step(counts, "prefill")) < LIMIT


def test_decode_step_by_step(case) -> None:
    engine, texts, wanted = case
    steps = Sequences(engine, texts)
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for position in range(max(LENGTHS)):
        counts = [int(position < len(t)) for t in texts]
        for index, logits in enumerate(steps.step(counts, "decode")):
            rows[index].append(logits)
    assert worst([torch.cat(r) for r in rows], wanted) < LIMIT


def test_chunked_prefill_beside_decoding_sequences(case) -> None:
    engine, texts, wanted = case
    steps = Sequences(engine, texts)
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(done < len(text) for done, text in zip(steps.done, texts, strict=True)):
        counts = [min(n, len(t) - d) for n, t, d in zip((33, 1, 1, 7), texts, steps.done, strict=True)]
        for index, logits in enumerate(steps.step(counts)):
            rows[index].append(logits)
    assert worst([torch.cat(r) for r in rows], wanted) < LIMIT


def test_mtp_rows_equal_the_reference(case, tmp_path: Path) -> None:
    engine, texts, _ = case
    if not engine.max_drafts:
        pytest.skip("the family has no MTP layer")
    checkpoint = TINY_R1 if engine.spec.hidden_size == 256 and engine.spec.num_layers == 4 else None
    if checkpoint is None:
        pytest.skip("drafts of random models are compared at import")
    oracle = Oracle(checkpoint, tmp_path)
    draft = engine.draft([texts[0]])[0]
    logits, hidden = oracle.main(texts[0])
    assert draft.token == int(logits[-1].argmax())
    assert draft.drafts[0] == int(oracle.mtp([*texts[0][1:], draft.token], hidden)[0][-1].argmax())
