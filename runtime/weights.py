"""What a rank keeps of its engine's weights in memory, once for all its programs."""

from __future__ import annotations

from typing import Protocol

import torch

from dsc.plugins.cpu_node import Packs
from dsc.runtime.program import Operand
from dsc.runtime.shards import ALONE, Place, take


class TensorSource(Protocol):
    """Where stored tensors come from: an EngineFolder, or a table in a test."""

    def tensor(self, name: str) -> torch.Tensor:
        """The stored tensor of a name, mapped."""
        ...


class Weights:
    """A rank's parts of stored tensors on their way to the nodes, and those that stay: packed weights and small constants.

    A quantizable weight is handed out as stored and forgotten; what a node keeps of it lies in `packs`.
    """

    def __init__(self, source: TensorSource, place: Place = ALONE) -> None:
        self._source, self._place = source, place
        self._constants: dict[str, torch.Tensor] = {}
        self.packs = Packs()

    def stored(self, operand: Operand) -> torch.Tensor:
        """The part of a weight as stored, not kept here."""
        whole = self._source.tensor(operand.tensor)
        return take(whole, operand.cuts, self._place).contiguous() if operand.cuts else whole

    def constant(self, operand: Operand) -> torch.Tensor:
        """The part of a tensor that nodes read as it is (norms, tables), kept."""
        name = part_name(operand)
        if name not in self._constants:
            self._constants[name] = self.stored(operand)
        return self._constants[name]

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights kept, packed and mapped."""
        return self.packs.resident_bytes + sum(tensor.nbytes for tensor in self._constants.values())


def part_name(operand: Operand) -> str:
    """What a rank's part of a weight is kept under: two cuts of one tensor are two parts."""
    cuts = [f"{cut.by} {cut.size} + {cut.kept} of axis {cut.axis}" for cut in operand.cuts]
    return ", ".join([operand.tensor, *cuts])
