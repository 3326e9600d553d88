"""From prompts and parameters to requests: everything is checked before any work, faults of all prompts told at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from operator import index
from pathlib import Path
from typing import Any

from dsc.runtime.detokenizer import Decode
from dsc.runtime.errors import DscError, DscErrors, raise_all
from dsc.runtime.request import Request
from dsc.runtime.sampling import SamplingParams
from dsc.runtime.tokenizer import Message, Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class PromptReader:
    """What an engine accepts.

    tokenizer_dir   folder of tokenizer.json; without that file prompts are token ids and outputs have no text
    tokenizer       the tokenizer, made when it is first needed
    defaults        parameters for requests that give none
    ends            tokens that end a text
    context_tokens  longest sequence; cache_tokens: what the cache holds
    max_drafts      drafts by default, and at most
    """

    tokenizer_dir: Path
    tokenizer: Callable[[], Tokenizer]
    defaults: SamplingParams
    ends: frozenset[int]
    vocab_size: int
    context_tokens: int
    cache_tokens: int
    max_drafts: int

    def requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: Mapping[str, Any],
        streamed: bool = False,
    ) -> list[Request]:
        """One request a prompt; raises DscError naming each prompt that cannot be served."""
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral | Mapping)):
            raise DscError("prompts is one prompt", wanted="a list of prompts", try_="[prompt]")
        each = self._params(len(prompts), params, options)
        requests: list[Request] = []
        faults: list[DscError] = []
        for place, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            try:
                one.check(self.vocab_size, self.max_drafts)
                requests.append(self._request(prompt, one, streamed))
            except DscError as error:
                faults += [_at_prompt(place, e) for e in (error.errors if isinstance(error, DscErrors) else [error])]
        raise_all("prompts", faults)
        return requests

    def _params(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None, options: Mapping[str, Any]
    ) -> list[SamplingParams]:
        """Parameters of each prompt."""
        if params is None or isinstance(params, SamplingParams):
            one = (params or self.defaults).with_options(options)
            one.check(self.vocab_size, self.max_drafts)
            return [one] * count
        if len(params) != count:
            raise DscError("not one set of parameters per prompt", wanted=str(count), got=str(len(params)))
        return [p.with_options(options) for p in params]

    def _request(self, prompt: Prompt, params: SamplingParams, streamed: bool) -> Request:
        tokens = self._encode(prompt)
        self._check_tokens(tokens)
        if self.decode is None and params.stop:
            raise DscError("stop strings need a tokenizer, and the engine has none", try_="stop_token_ids")
        room = min(self.context_tokens, self.cache_tokens) - len(tokens)
        return Request(
            prompt=tokens,
            params=params,
            max_new=room if params.max_tokens is None else min(params.max_tokens, room),
            ends=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.ends),
            decode=self.decode,
            max_drafts=self.max_drafts if params.drafts is None else params.drafts,
            streamed=streamed,
        )

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise DscError for tokens the model has not, for none, and for too many."""
        if not tokens:
            raise DscError("the prompt is empty", wanted="at least one token")
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise DscError("a token id is out of range", wanted=f"0 to {self.vocab_size - 1}", got=str(token))
        context = min(self.context_tokens, self.cache_tokens)
        if len(tokens) >= context:
            what = "the engine's context" if context == self.context_tokens else "the cache"
            raise DscError(
                f"the prompt is longer than {what}",
                wanted=f"up to {context - 1} tokens, to leave room for one more",
                got=f"{len(tokens)} tokens",
            )

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer().encode(prompt) if prompt else []
        try:
            items = list(prompt)
            if items and isinstance(items[0], Mapping):
                return self.tokenizer().encode_chat(items)  # type: ignore[arg-type]
            return [index(token) for token in items]  # type: ignore[arg-type]
        except TypeError as error:
            raise DscError("a prompt of another kind", wanted="text, token ids or messages", got=str(error)) from error

    @cached_property
    def decode(self) -> Decode | None:
        """Token ids to text; None where the engine has no tokenizer."""
        return self.tokenizer().decode if (self.tokenizer_dir / "tokenizer.json").is_file() else None


def _at_prompt(place: int, error: DscError) -> DscError:
    """The same fault, naming the prompt."""
    return DscError(
        error.what,
        where=f"prompt {place}",
        details=error.details,
        wanted=error.wanted,
        got=error.got,
        try_=error.try_,
    )
