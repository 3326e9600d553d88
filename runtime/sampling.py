"""Sampling parameters: what a request may ask for, the model's defaults, and their check."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from dsc.runtime.errors import DscError, nearest, raise_all

SEED_END = 2**63  # seeds are int64 and not negative
GENERATION_CONFIG = "tokenizer/generation_config.json"


class SamplingOptions(TypedDict, total=False):
    """Keywords of `generate` and `stream`; one left out or None takes the model's default. See SamplingParams."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_tokens: int | None
    logprobs: int | None
    drafts: int | None


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen.

    max_tokens          tokens to generate; None: until the context is full
    temperature         0: greedy
    top_p, top_k, min_p as in dsc.Sample; top_k 0: off
    presence_penalty    taken from the logit of each token generated so far, frequency_penalty times its count
    repetition_penalty  divides positive and multiplies negative logits of tokens in the prompt or generated (CTRL)
    logit_bias          token id -> added to its logit
    seed                None: drawn for the request. Randomness depends on seed and position alone, never on the batch;
                        but bfloat16 logits are rounded otherwise in another batch, and then a near tie may turn
    stop                strings that end the text; they are not part of it
    stop_token_ids      tokens that end it besides the model's end-of-text, which ignore_eos turns off
    min_tokens          before so many nothing but max_tokens ends it
    logprobs            None: none; n: of each chosen token and of the n likeliest, from the model's own logits
    drafts              tokens to draft ahead with the MTP layer; None: the engine's number, 0: none
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    drafts: int | None = None

    def with_options(self, options: Mapping[str, Any]) -> SamplingParams:
        """These parameters with some changed; None changes nothing. Raises DscError on an unknown name."""
        known = [f.name for f in fields(self)]
        for name in options:
            if name not in known:
                raise DscError(f"unknown sampling parameter {name}", wanted=", ".join(known), try_=nearest(name, known))
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        for name in ("stop", "stop_token_ids"):
            if isinstance(given.get(name), list | set | range):
                given[name] = tuple(given[name])
        if given.get("top_k") == -1:  # how transformers and vLLM write "off"
            given["top_k"] = 0
        return replace(self, **given)

    def check(self, vocab_size: int, max_drafts: int) -> None:
        """Raise DscError with every parameter out of its range."""
        raise_all("sampling parameters", [_fault(*row) for row in self._rows(vocab_size, max_drafts) if not row[0]])

    def _rows(self, vocab_size: int, max_drafts: int) -> list[tuple[bool, str, str, object]]:
        """(good, name, what is wanted, value) of each parameter."""
        bias = self.logit_bias
        token = f"a token id, 0 to {vocab_size - 1}"
        rows: list[tuple[bool, str, str, object]] = [
            (self.max_tokens is None or _integer(self.max_tokens, 1), "max_tokens", "1 or more", self.max_tokens),
            (_number(self.temperature, 0, 1e4), "temperature", "0 (greedy) or more", self.temperature),
            (_number(self.top_p, 0, 1) and self.top_p > 0, "top_p", "above 0, up to 1", self.top_p),
            (_integer(self.top_k, 0, 2**31 - 1), "top_k", "0 (off) or more", self.top_k),
            (_number(self.min_p, 0, 1), "min_p", "0 to 1", self.min_p),
            (_number(self.presence_penalty, -100, 100), "presence_penalty", "-100 to 100", self.presence_penalty),
            (_number(self.frequency_penalty, -100, 100), "frequency_penalty", "-100 to 100", self.frequency_penalty),
            (_number(self.repetition_penalty, 1e-3, 1e3), "repetition_penalty", "above 0", self.repetition_penalty),
            (self.seed is None or _integer(self.seed, 0, SEED_END - 1), "seed", "0 to 2**63 - 1", self.seed),
            (isinstance(self.ignore_eos, bool), "ignore_eos", "True or False", self.ignore_eos),
            (_integer(self.min_tokens, 0), "min_tokens", "0 or more", self.min_tokens),
            (
                self.logprobs is None or _integer(self.logprobs, 0, vocab_size),
                "logprobs",
                f"None, or 0 to {vocab_size}",
                self.logprobs,
            ),
            (
                self.drafts is None or _integer(self.drafts, 0, max_drafts),
                "drafts",
                f"None, or 0 to {max_drafts}, what the engine is compiled for",
                self.drafts,
            ),
            (
                isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
                "stop",
                "strings that are not empty",
                self.stop,
            ),
            (
                isinstance(self.stop_token_ids, tuple)
                and all(_integer(t, 0, vocab_size - 1) for t in self.stop_token_ids),
                "stop_token_ids",
                f"each {token}",
                self.stop_token_ids,
            ),
            (
                isinstance(bias, Mapping) and all(_integer(t, 0, vocab_size - 1) for t in bias),
                "logit_bias",
                f"keys that are each {token}",
                bias,
            ),
            (
                isinstance(bias, Mapping) and all(_number(v, -1e4, 1e4) for v in bias.values()),
                "logit_bias",
                "values from -10000 to 10000",
                bias,
            ),
        ]
        if _integer(self.max_tokens, 1) and _integer(self.min_tokens, 0) and self.min_tokens > (self.max_tokens or 0):
            rows.append((False, "min_tokens", f"at most max_tokens {self.max_tokens}", self.min_tokens))
        return rows

    @property
    def penalized(self) -> bool:
        """Whether logits are changed before sampling."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.logit_bias
        )


def _integer(value: object, low: int, high: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high)


def _number(value: object, low: float, high: float) -> bool:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return good and low <= value <= high  # type: ignore[operator]


def _fault(_good: bool, name: str, wanted: str, got: object) -> DscError:
    return DscError(f"{name} is out of its range", wanted=wanted, got=repr(got))


def model_defaults(config: Mapping[str, Any]) -> SamplingParams:
    """Defaults from the model's generation_config.json; `do_sample: false` means greedy.

    Keys of other generation methods (beams, assistants) have no meaning here and are left. Raises DscError.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("max_new_tokens") is not None:
        given["max_tokens"] = config["max_new_tokens"]
    if config.get("do_sample") is False:
        given["temperature"] = 0.0
    defaults = SamplingParams().with_options(given)
    try:
        defaults.check(vocab_size=1, max_drafts=0)
    except DscError as error:
        raise DscError(str(error), where=GENERATION_CONFIG) from error
    return defaults


def end_tokens(config: Mapping[str, Any], of_model: Sequence[int]) -> frozenset[int]:
    """End-of-text tokens: config.json's and those of generation_config.json, which may add some."""
    more = config.get("eos_token_id")
    listed = more if isinstance(more, list) else [] if more is None else [more]
    return frozenset({*of_model, *listed})
