"""What an engine keeps of its weights in memory, once for all its programs."""

from __future__ import annotations

from typing import Protocol

import torch

from dsc.plugins.cpu_node import Packs


class TensorSource(Protocol):
    """Where stored tensors come from: an EngineFolder, or a table in a test."""

    def tensor(self, name: str) -> torch.Tensor:
        """The stored tensor of a name, mapped."""
        ...


class Weights:
    """Stored tensors on their way to the nodes, and those that stay: packed weights and small constants.

    A quantizable weight is handed out as stored and forgotten; what a node keeps of it lies in `packs`.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._constants: dict[str, torch.Tensor] = {}
        self.packs = Packs()

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as stored, not kept here."""
        return self._source.tensor(name)

    def constant(self, name: str) -> torch.Tensor:
        """A tensor that nodes read as it is (norms, tables), kept."""
        if name not in self._constants:
            self._constants[name] = self._source.tensor(name)
        return self._constants[name]

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights kept, packed and mapped."""
        return self.packs.resident_bytes + sum(tensor.nbytes for tensor in self._constants.values())
