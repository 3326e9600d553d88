"""Run one op by its reference or its cpu.py, as an executor would, and check what it returns against its schema."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsc.plugins.cpu_node import CpuNode, StepMemo
from dsc.plugins.schema import Attribute, Type, folder_of, load_op
from dsc.plugins.stored import StoredWeight
from dsc.runtime.expressions import LETTERS

IMPLEMENTATIONS = ("reference", "cpu")
Operand = torch.Tensor | StoredWeight | None


def type_of(tensor: torch.Tensor) -> Type:
    """A tensor's type in the schema's words."""
    return Type(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class CpuOp:
    """`CpuOp("cpu", "LmHead", {"hidden": x, "logit_rows": rows, "w": weight}, {})()` -> outputs by operand name.

    operands    by name; an absent optional one is left out; those in `constants` and all weights are graph constants
    """

    def __init__(
        self,
        implementation: str,
        op: str,
        operands: Mapping[str, Operand],
        attributes: Mapping[str, Attribute],
        constants: Sequence[str] = (),
    ) -> None:
        self.op, self.operands = load_op(op), dict(operands)
        formats = {f"{n}_format": str(w.format) for n, w in operands.items() if isinstance(w, StoredWeight)}
        absent = {w.format_attribute: "fp32" for w in self.op.weights if w.name not in operands}
        self.attributes = {**attributes, **formats, **absent}
        slots = [self._slot(name) for name in self.op.slot_names()]
        self.declared = self.op.check([None if t is None else type_of(t) for t in slots], self.attributes)[0]
        module = importlib.import_module(f"dsc.plugins.{folder_of(op)}.{implementation}")
        if implementation == "reference":
            plain = {n: v for n, v in self.attributes.items() if n not in {w.format_attribute for w in self.op.weights}}
            self._run = lambda step: module.reference(
                **{t.name: self.operands.get(t.name) for t in self.op.inputs}, **plain
            )
            return
        run = module.bind(self._node(constants))
        assert run is not None, f"{op}: no kernel for this node"
        held = {w.name for w in self.op.weights} | set(constants)
        # As in the executor: an absent operand is None if it would come with each step, an absent constant is left out.
        present = {t.name for t in self.op.inputs if t.name in operands or set(t.dims.split()) & LETTERS.keys()}
        names = [t.name for t in self.op.inputs if t.name in present - held]
        self._run = lambda step: run(step, *[self.operands.get(name) for name in names])

    def __call__(self, step: StepMemo | None = None, **changed: Any) -> dict[str, torch.Tensor]:
        """One run, some operands replaced by others of any size."""
        self.operands.update(changed)
        with torch.inference_mode():
            results = self._run(step or StepMemo())
        outputs = dict(zip([t.name for t in self.op.outputs_of(self.attributes)], results, strict=True))
        if not changed:
            assert [type_of(t) for t in results] == self.declared
        return outputs

    def _slot(self, name: str) -> torch.Tensor | None:
        value = self.operands.get(name.removesuffix(".scales"))
        if isinstance(value, StoredWeight):
            return value.scales if name.endswith(".scales") else value.data
        return value

    def _node(self, constants: Sequence[str]) -> CpuNode:
        slots = {name: tensor for name in self.op.slot_names() if (tensor := self._slot(name)) is not None}
        types = {name: type_of(tensor) for name, tensor in slots.items()}
        types.update(zip([t.name for t in self.op.outputs_of(self.attributes)], self.declared, strict=True))
        return CpuNode(
            name="node",
            op=self.op.name,
            attributes=self.attributes,
            types=types,
            weights={w.name: self.operands[w.name] for w in self.op.weights if w.name in self.operands},
            constants={name: self.operands[name] for name in constants},
        )
