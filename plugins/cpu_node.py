"""What a plugin's `cpu.py` is given: the node to bind, memory shared by all graphs, memory shared by one step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

import torch

from dsc.plugins.schema import Attribute, Type
from dsc.plugins.stored import StoredWeight

Made = TypeVar("Made")

# run(step, *operands): the schema's inputs that are no graph constants, in order. An absent optional one is None if its
# dims have a letter of the step, and left out if it would be a constant.
Run = Callable[..., tuple[torch.Tensor, ...]]


# By a dtype's name; half of what Tensor.to takes for a few rows.
CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": torch.Tensor.float,
    "bfloat16": torch.Tensor.bfloat16,
}


class StepMemo:
    """Values that one forward computes once for all its layers: ranges of the ragged batch, gathered table rows."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()` the first time `key` is asked for in this step, the same value afterwards."""
        if key not in self._made:
            self._made[key] = make()
        value: Made = self._made[key]
        return value


class Packs:
    """Weights packed for the machine, one for all graphs: what an engine keeps in memory."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()` the first time, the same object afterwards."""
        if key not in self._made:
            self._made[key] = make()
        value: Made = self._made[key]
        return value

    @property
    def resident_bytes(self) -> int:
        """Bytes of all tensors held, each counted once."""
        tensors = [tensor for value in self._made.values() for tensor in tensors_in(value)]
        # oneDNN's opaque tensors have no address, but are never views of each other.
        found = {id(t) if t.is_mkldnn else (t.data_ptr(), t.nbytes): t.nbytes for t in tensors}
        return sum(found.values())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a packed value: a tensor, or dataclasses, tuples and lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for part in fields(value):
            yield from tensors_in(getattr(value, part.name))


@dataclass(frozen=True)
class CpuNode:
    """A node of a program as `bind(node)` sees it.

    types         of the present operands, inputs and outputs; symbolic sizes are letters
    weights       quantizable operands as stored; read only to choose a kernel and inside `pack`
    constants     other operands that are graph constants
    tensor_names  of `weights` and `constants`, the rank's parts of stored tensors: packs are shared under them
    """

    name: str
    op: str
    attributes: Mapping[str, Attribute]
    types: Mapping[str, Type] = field(default_factory=dict)
    weights: Mapping[str, StoredWeight] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    packs: Packs = field(default_factory=Packs)

    def pack(self, operand: str | tuple[str, ...], make: Callable[..., Made], *arguments: Hashable) -> Made:
        """`make(weight, ..., *arguments)` of one weight or several, made once over all graphs of the engine.

        What a node keeps of a weight must come from here: the stored tensors are let go after binding, and
        `Packs.resident_bytes` counts what is left. `make` is a module-level function that returns a tensor, a
        StoredWeight, or dataclasses, tuples and lists of tensors.
        """
        operands = (operand,) if isinstance(operand, str) else operand
        names = tuple(self.tensor_names.get(name, f"{self.name}/{name}") for name in operands)
        return self.packs.get(
            (names, make, arguments), lambda: make(*(self.weights[name] for name in operands), *arguments)
        )


def keep(weight: StoredWeight) -> StoredWeight:
    """For `pack`: the weight as it is stored."""
    return weight
