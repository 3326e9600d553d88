"""Sampling parameters: defaults from the model's files, every fault told with what was wanted."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from dsc.runtime.errors import DscError
from dsc.runtime.penalties import Penalties
from dsc.runtime.sampling import SamplingOptions, SamplingParams, end_tokens, model_defaults


def test_options_are_the_parameters():
    assert list(SamplingOptions.__annotations__) == [f.name for f in fields(SamplingParams)]


def test_defaults_of_the_model():
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 7], "num_beams": 4}
    defaults = model_defaults(config)
    assert defaults == SamplingParams(temperature=0.6, top_p=0.95)
    assert model_defaults({**config, "do_sample": False}).temperature == 0
    assert model_defaults({"max_new_tokens": 9, "repetition_penalty": 1.1, "top_k": -1}) == SamplingParams(
        max_tokens=9, repetition_penalty=1.1
    )
    assert end_tokens(config, (1,)) == {1, 7}
    assert end_tokens({"eos_token_id": 3}, (1,)) == {1, 3}
    assert end_tokens({}, (1,)) == {1}
    with pytest.raises(DscError, match=r"generation_config.json: top_p is out of its range"):
        model_defaults({"top_p": 7})


def test_options_change_what_is_given():
    params = SamplingParams(temperature=0.6, top_p=0.9).with_options(
        {"temperature": 0, "top_p": None, "stop": "END", "stop_token_ids": [3, 4], "top_k": -1}
    )
    assert params == SamplingParams(temperature=0, top_p=0.9, stop=("END",), stop_token_ids=(3, 4))
    assert params.with_options({"stop": ["a", "b"]}).stop == ("a", "b")
    with pytest.raises(DscError, match="unknown sampling parameter temprature") as caught:
        params.with_options({"temprature": 1})
    assert caught.value.try_ == "temperature"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_tokens", 0, "1 or more"),
        ("max_tokens", True, "1 or more"),
        ("temperature", -0.1, "0 (greedy) or more"),
        ("temperature", float("nan"), "0 (greedy) or more"),
        ("temperature", "hot", "0 (greedy) or more"),
        ("top_p", 0, "above 0, up to 1"),
        ("top_p", 1.1, "above 0, up to 1"),
        ("top_k", -2, "0 (off) or more"),
        ("top_k", 2.0, "0 (off) or more"),
        ("min_p", 2, "0 to 1"),
        ("presence_penalty", float("inf"), "-100 to 100"),
        ("frequency_penalty", 101, "-100 to 100"),
        ("repetition_penalty", 0, "above 0"),
        ("logit_bias", {40: 1.0}, "keys that are each a token id, 0 to 39"),
        ("logit_bias", {"4": 1.0}, "keys that are each a token id, 0 to 39"),
        ("logit_bias", {4: float("nan")}, "values from -10000 to 10000"),
        ("seed", -1, "0 to 2**63 - 1"),
        ("seed", 2**63, "0 to 2**63 - 1"),
        ("stop", "", "strings that are not empty"),
        ("stop", ["a", 3], "strings that are not empty"),
        ("stop_token_ids", [40], "each a token id, 0 to 39"),
        ("ignore_eos", 1, "True or False"),
        ("min_tokens", -1, "0 or more"),
        ("logprobs", 41, "None, or 0 to 40"),
        ("drafts", 3, "None, or 0 to 2, what the engine is compiled for"),
    ],
)
def test_faults(name, value, wanted):
    with pytest.raises(DscError) as caught:
        SamplingParams().with_options({name: value}).check(vocab_size=40, max_drafts=2)
    assert caught.value.what == f"{name} is out of its range"
    assert caught.value.wanted == wanted


def test_faults_are_told_together_and_limits_are_good():
    with pytest.raises(DscError, match="sampling parameters: 2 faults"):
        SamplingParams(temperature=-1, max_tokens=3, min_tokens=4).check(40, 0)
    SamplingParams(
        max_tokens=1,
        temperature=0,
        top_p=1,
        top_k=2**31 - 1,
        min_p=1,
        seed=2**63 - 1,
        min_tokens=1,
        logprobs=40,
        drafts=2,
    ).check(40, 2)
    SamplingParams(logit_bias={0: -100.0, 39: 100}, stop=("x",), stop_token_ids=(39,)).check(40, 0)


def dense_penalties(params, prompt, generated, logits):
    """The same over the whole vocabulary, as transformers and vLLM write it."""
    values = logits.astype(np.float64)
    counts = np.bincount(generated, minlength=len(values))
    seen = (counts + np.bincount(prompt, minlength=len(values))) > 0
    scaled = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values = np.where(seen, scaled, values) - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    return values


@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.8])
def test_penalties_equal_the_dense_formula(repetition):
    params = SamplingParams(
        presence_penalty=0.7, frequency_penalty=-0.3, repetition_penalty=repetition, logit_bias={5: 1.5, 39: -2.0}
    )
    rng = np.random.default_rng(3)
    prompt, generated = rng.integers(0, 300, 50).tolist(), []
    penalties = Penalties(params, prompt)
    for _ in range(200):  # more distinct tokens than the first room
        logits = rng.normal(size=300).astype(np.float32)
        row = torch.from_numpy(logits.copy())
        penalties.apply(row)
        np.testing.assert_allclose(row.numpy(), dense_penalties(params, prompt, generated, logits), atol=2e-6)
        token = int(rng.integers(0, 300))
        penalties.add(token)
        generated.append(token)


def test_rows_of_drafts_count_the_drafts_before_them():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.2)
    penalties = Penalties(params, [1, 2])
    for token in (3, 1):
        penalties.add(token)
    drafts = [7, 7, 3, 8]
    logits = np.random.default_rng(1).normal(size=(5, 10)).astype(np.float32)
    rows = torch.from_numpy(logits.copy())
    penalties.apply_rows(rows, drafts)
    for i in range(5):
        expected = dense_penalties(params, [1, 2], [3, 1, *drafts[:i]], logits[i])
        np.testing.assert_allclose(rows[i].numpy(), expected, atol=1e-6)
    row = torch.from_numpy(logits[0].copy())
    penalties.apply(row)
    np.testing.assert_allclose(row.numpy(), dense_penalties(params, [1, 2], [3, 1], logits[0]), atol=1e-6)
