"""Requests and batches as the leader tells the other ranks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from dsc.runtime.batch import Batch
from dsc.runtime.detokenizer import Decode
from dsc.runtime.request import Request
from dsc.runtime.sampling import SamplingParams

_TENSORS = [f.name for f in fields(Batch) if f.name not in ("longest_query", "hidden")]


def request_words(request: Request) -> dict[str, Any]:
    """A request that has just come: all that its tokens follow from."""
    return {
        "number": request.number,
        "prompt": list(request.prompt),
        "params": {**asdict(request.params), "logit_bias": list(request.params.logit_bias.items())},
        "max_new": request.max_new,
        "ends": sorted(request.ends),
        "max_drafts": request.max_drafts,
        "seed": request.seed,
    }


def read_request(words: dict[str, Any], decode: Decode | None) -> Request:
    """The same request on another rank, where nobody reads its text: `decode` finds its stop strings."""
    given = words["params"]
    tuples = {name: tuple(given[name]) for name in ("stop", "stop_token_ids")}
    params = SamplingParams(**{**given, **tuples, "logit_bias": dict(given["logit_bias"]), "seed": words["seed"]})
    return Request(
        prompt=words["prompt"],
        params=params,
        max_new=words["max_new"],
        ends=frozenset(words["ends"]),
        decode=decode if params.stop else None,
        max_drafts=words["max_drafts"],
        number=words["number"],
    )


def batch_words(batch: Batch) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A batch as words and tensors."""
    hidden = [] if batch.hidden is None else [batch.hidden]
    return {"longest_query": batch.longest_query}, [*(getattr(batch, name) for name in _TENSORS), *hidden]


def read_batch(words: dict[str, Any], tensors: Sequence[torch.Tensor], device: torch.device) -> Batch:
    """The same batch on another rank."""
    named = dict(zip(_TENSORS, tensors, strict=False))
    hidden = tensors[len(_TENSORS)].to(device) if len(tensors) > len(_TENSORS) else None
    return Batch(**named, longest_query=words["longest_query"], hidden=hidden)
