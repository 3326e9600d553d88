"""A compiled model: its prefill and decode programs over one cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsc.runtime.backends import Runner
from dsc.runtime.batch import Batch
from dsc.runtime.errors import DscError

PHASES = ("prefill", "decode")


class CompiledModel:
    """`main` or `mtp`. The decode program serves steps of few tokens a sequence, the prefill program any step."""

    def __init__(self, name: str, programs: Mapping[str, Runner]) -> None:
        self.name = name
        self.programs = dict(programs)
        decode = self.programs["decode"].program
        self._decode_queries = decode.letters.get("Q", 1)
        self._decode_tokens = decode.letters["T"]
        hidden = self.programs["decode"].program.operands.get("hidden") if name == "mtp" else None
        self._hidden_dtype: torch.dtype | None = getattr(torch, hidden.dtype) if hidden is not None else None

    def set_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """The tensors `cache.{layer}` that every step reads and writes."""
        for program in self.programs.values():
            program.set_state(caches)

    def phase_of(self, batch: Batch) -> str:
        """`decode` where every sequence has few query tokens, else `prefill`."""
        few = batch.longest_query <= self._decode_queries and len(batch.tokens) <= self._decode_tokens
        return "decode" if few else "prefill"

    def run(self, batch: Batch, phase: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        """One step: logits float32 [R, V] and hidden [T, D]. Writes the cache at `batch.slots`.

        phase    "prefill" or "decode"; "": by the batch
        raises   DscError for inputs that do not fit the programs
        """
        if phase and phase not in PHASES:
            raise DscError(f"unknown phase {phase}", wanted=" or ".join(PHASES), got=phase)
        inputs = batch.inputs()
        if self._hidden_dtype is not None:
            if batch.hidden is None:
                raise DscError("mtp needs the hidden rows that main gave", wanted="Batch.hidden [T, D]", got="none")
            inputs["hidden"] = batch.hidden.to(self._hidden_dtype)
        outputs = self.programs[phase or self.phase_of(batch)].run(inputs)
        # A graph that reads `hidden` gives its own rows under another name.
        return outputs["logits"], outputs["hidden" if self._hidden_dtype is None else "hidden.out"]
