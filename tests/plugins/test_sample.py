"""Sample: the generator against its published vectors, distributions, masks, drafts, and rows that know nothing of others."""

import math

import pytest
import torch
from support.cpu_op import IMPLEMENTATIONS, CpuOp

from dsc.plugins.sample.philox import philox, uniform

V = 70  # three words of mask, the last one partial
WORDS = -(-V // 32)
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

# philox4x32 with 10 rounds, from Random123's kat_vectors: counter, key, result
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [torch.tensor([int(word, 16)]) for word in text.split()]


def sample(implementation, logits, **changed):
    """The op's outputs; a number stands for all rows. Default: temperature 1, no limits, no drafts."""
    rows = len(logits)
    dtypes = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int32, "drafts": torch.int32}
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seeds": 0, "positions": 0, "drafts": -1}
    operands = {"logits": logits.float()}
    for name, value in {**values, **{n: v for n, v in changed.items() if n != "token_mask"}}.items():
        operands[name] = torch.as_tensor(value, dtype=dtypes.get(name, torch.float32)).expand(rows).clone()
    operands["token_mask"] = changed.get(
        "token_mask", torch.full((rows, -(-logits.shape[1] // 32)), -1, dtype=torch.int32)
    )
    return CpuOp(implementation, "Sample", operands, {})()


def allow(tokens, rows=1):
    """A mask that allows `tokens` only."""
    bits = torch.zeros(WORDS * 32, dtype=torch.int64)
    bits[tokens] = 1
    packed = (bits.view(WORDS, 32) << torch.arange(32)).sum(-1)
    return packed.to(torch.int32).expand(rows, WORDS).clone()


def random_logits(rows, vocabulary=V, seed=0):
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_generator_gives_the_published_numbers(counter, key, result):
    assert [f"{int(word):08x}" for word in philox(words(counter), words(key))] == result.split()


def test_uniform_is_in_range_exact_and_even():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)]).repeat_interleave(4000)
    u = uniform(seeds, torch.arange(4000).repeat(5))
    assert u.dtype is torch.float32
    assert u.min() >= 0
    assert u.max() < 1
    assert torch.equal((u * 2**24).round(), u * 2**24)
    assert len(set(u.tolist())) > 0.998 * len(u)
    counts = torch.histc(u, 16, 0, 1)
    assert ((counts - 1250) ** 2 / 1250).sum() < 37.7  # chi-square, 15 degrees of freedom, p = 0.001


@each
def test_greedy_takes_the_largest_and_the_lower_index_on_ties(implementation):
    logits = random_logits(4)
    logits[1, [7, 40, 69]] = 50.0
    got = sample(implementation, logits, temperature=0.0)["tokens"]
    assert got.tolist() == [int(row.argmax()) if i != 1 else 7 for i, row in enumerate(logits)]


@each
def test_equal_logits_are_drawn_in_order_of_index(implementation):
    positions = torch.arange(200)
    u = uniform(torch.zeros(200, dtype=torch.int64), positions)
    got = sample(implementation, torch.zeros(200, 64), positions=positions)["tokens"]
    assert got.tolist() == (u.double() * 64).floor().int().tolist()


@each
@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, 6),
        ({"temperature": 0.5}, 6),
        ({"top_k": 3}, 3),
        ({"top_p": 0.75}, 3),  # 0.4 + 0.25 < 0.75
        ({"min_p": 0.3}, 4),  # 0.12 is 0.3 of 0.4
        ({"top_k": 4, "top_p": 0.75}, 3),  # 0.65 < 0.75 * 0.92
        ({"top_k": 3, "top_p": 0.75}, 2),  # 0.65 > 0.75 * 0.8
        ({"top_k": 1, "top_p": 0.0, "min_p": 1.0}, 1),
    ],
)
def test_draws_follow_the_limited_distribution(implementation, limits, kept):
    """Chi-square over 4000 positions of one seed, tokens in shuffled order."""
    place = torch.tensor([4, 2, 0, 5, 1, 3])
    p = torch.tensor([0.4, 0.25, 0.15, 0.1200001, 0.05, 0.0299999])
    logits = torch.empty(6)
    logits[place] = p.log()
    rows = 4000
    got = sample(implementation, logits.expand(rows, 6), positions=torch.arange(rows), seeds=11, **limits)["tokens"]
    counts = torch.bincount(got, minlength=6)[place].double()
    want = (p.double() ** (1 / limits.get("temperature", 1.0)))[:kept]
    want = rows * want / want.sum()
    assert not counts[kept:].any()
    statistic = ((counts[:kept] - want) ** 2 / want).sum()
    assert statistic < {1: 1e-9, 2: 10.8, 3: 13.8, 4: 16.3, 6: 20.5}[kept]  # p = 0.001


@each
def test_only_allowed_tokens_are_chosen(implementation):
    allowed = [3, 31, 32, 63, 64, 69]
    logits = random_logits(1).expand(500, V)
    got = sample(implementation, logits, positions=torch.arange(500), token_mask=allow(allowed, 500), temperature=2.0)
    assert set(got["tokens"].tolist()) == set(allowed)
    greedy = sample(implementation, logits[:1], temperature=0.0, token_mask=allow(allowed))["tokens"]
    assert int(greedy) == max(allowed, key=lambda token: float(logits[0, token]))
    one = sample(implementation, logits[:50], positions=torch.arange(50), token_mask=allow([68], 50))["tokens"]
    assert set(one.tolist()) == {68}


@each
def test_logprobs_are_of_the_raw_logits(implementation):
    logits = random_logits(6)
    got = sample(implementation, logits, temperature=0.3, top_k=5, token_mask=allow(list(range(0, V, 2)), 6))
    want = torch.log_softmax(logits.double(), -1).gather(1, got["tokens"].long().unsqueeze(1)).squeeze(1)
    assert torch.allclose(got["logprobs"].double(), want, rtol=0, atol=2e-6)


@each
def test_a_row_depends_on_itself_alone(implementation):
    generator = torch.Generator().manual_seed(5)
    rows = 40
    settings = {
        "temperature": torch.rand(rows, generator=generator) * (torch.arange(rows) % 3 > 0),
        "top_p": 0.5 + 0.5 * torch.rand(rows, generator=generator),
        "top_k": torch.randint(0, 12, (rows,), generator=generator),
        "min_p": 0.1 * torch.rand(rows, generator=generator),
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        "positions": torch.randint(0, 9999, (rows,), generator=generator),
        "token_mask": torch.randint(-(2**31), 2**31, (rows, WORDS), generator=generator).int(),
    }
    logits = random_logits(rows)
    together = sample(implementation, logits, **settings)
    backwards = sample(implementation, logits.flip(0), **{name: value.flip(0) for name, value in settings.items()})
    assert torch.equal(backwards["tokens"].flip(0), together["tokens"])
    for row in range(rows):
        alone = sample(implementation, logits[row : row + 1], **{n: v[row : row + 1] for n, v in settings.items()})
        assert int(alone["tokens"]) == int(together["tokens"][row])
    assert len(set(together["tokens"].tolist())) > 10


def test_cpu_equals_the_reference():
    generator = torch.Generator().manual_seed(6)
    rows, vocabulary = 200, 300
    settings = {
        "temperature": 2 * torch.rand(rows, generator=generator) * (torch.arange(rows) % 4 > 0),
        "top_p": torch.rand(rows, generator=generator),
        "top_k": torch.randint(0, 400, (rows,), generator=generator),
        "min_p": 0.2 * torch.rand(rows, generator=generator),
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        "positions": torch.arange(rows),
        "token_mask": torch.randint(-(2**31), 2**31, (rows, 10), generator=generator).int(),
        "drafts": torch.randint(-1, 3, (rows,), generator=generator),
    }
    logits = random_logits(rows, vocabulary)
    logits[:, :3] += 6
    logits[17, 5] = torch.nan
    want, got = (sample(implementation, logits, **settings) for implementation in IMPLEMENTATIONS)
    assert torch.equal(got["tokens"], want["tokens"])
    assert torch.equal(got["accepted"], want["accepted"])
    assert torch.allclose(got["logprobs"], want["logprobs"], rtol=0, atol=2e-6, equal_nan=True)
    assert want["accepted"].sum() > 5


@each
def test_drafts_are_accepted_up_to_the_first_refused_of_a_sequence(implementation):
    logits = torch.full((9, V), -1.0)
    chosen = torch.tensor([5, 6, 7, 8, 9, 10, 11, 12, 13])
    logits[torch.arange(9), chosen] = 4.0
    #        two accepted, end | refused, then right, end | end | right, refused
    drafts = torch.tensor([5, 6, -1, 9, 9, -1, -1, 12, 1])
    got = sample(implementation, logits, temperature=0.0, drafts=drafts)
    assert got["tokens"].tolist() == chosen.tolist()
    assert got["accepted"].tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 0]


@each
def test_rows_that_cannot_be_sampled_give_minus_one_and_the_others_go_on(implementation):
    logits = random_logits(6)
    clean = sample(implementation, logits, positions=torch.arange(6))
    logits[1, 9] = torch.nan
    logits[2, 9] = torch.inf
    logits[3] = -torch.inf
    mask = torch.full((6, WORDS), -1, dtype=torch.int32)
    mask[4] = 0
    for temperature in (1.0, 0.0):
        drafts = torch.tensor([-1, -1, -1, -1, 3, -1])
        got = sample(
            implementation, logits, positions=torch.arange(6), temperature=temperature, token_mask=mask, drafts=drafts
        )
        assert (got["tokens"] == -1).tolist() == [False, True, True, True, True, False]
        assert got["logprobs"].isnan().tolist() == [False, True, True, True, True, False]
        assert not got["accepted"].any()
        if temperature:
            assert got["tokens"][[0, 5]].tolist() == clean["tokens"][[0, 5]].tolist()


@each
def test_extreme_settings(implementation):
    logits = random_logits(2)
    logits[:, V // 2 :] = -torch.inf  # a padded vocabulary
    best = logits.argmax(-1).tolist()
    assert sample(implementation, logits, temperature=1e-30)["tokens"].tolist() == best
    hot = sample(implementation, logits[:1].expand(300, V), temperature=1e6, positions=torch.arange(300))["tokens"]
    assert int(hot.max()) < V // 2
    assert len(set(hot.tolist())) > V // 4
    assert sample(implementation, logits, top_k=2**31 - 1)["tokens"].min() >= 0
    empty = sample(implementation, logits[:0])
    assert [len(empty[name]) for name in ("tokens", "accepted", "logprobs")] == [0, 0, 0]
    assert not math.isnan(float(sample(implementation, logits)["logprobs"][0]))
