"""Cut a program into what comes before its layers, each layer, and what comes after: each a program of its own.

A GPU's steps go with their nodes, and with them the scratch and the zeroed memory that they name. The arena keeps its size
and places.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsc.runtime.program import Program, ProgramNode
from dsc.runtime.steps import operands_in

HEAD_OPS = ("LmHead", "GatherLogits")


@dataclass(frozen=True)
class Segment:
    """A run of a program's nodes as a program.

    layer    the decoder layer it is, None outside the layers
    carried  inputs that other segments make: activations, by their names in the whole program
    gives    outputs that later segments or the caller read, caches left out
    """

    program: Program
    layer: int | None
    carried: tuple[str, ...]
    gives: tuple[str, ...]

    @property
    def is_head(self) -> bool:
        return any(node.op in HEAD_OPS for node in self.program.nodes)


def cut(program: Program) -> list[Segment]:
    """Segments in order. The head is one by itself, so that it can run on some rows at a time."""
    runs: list[tuple[object, list[ProgramNode]]] = []
    for node in program.nodes:
        found = re.match(r"layers\.(\d+)\.", node.name)
        kind: object = int(found[1]) if found else HEAD_OPS if node.op in HEAD_OPS else "outside"
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(node)
    layers = [kind for kind, _ in runs if isinstance(kind, int)]
    assert len(set(layers)) == len(layers), f"{program.name}: layers are not in one piece: {layers}"
    return [
        _segment(
            program, nodes, kind if isinstance(kind, int) else None, [n for _, rest in runs[i + 1 :] for n in rest]
        )
        for i, (kind, nodes) in enumerate(runs)
    ]


def _segment(
    program: Program, nodes: Sequence[ProgramNode], layer: int | None, later: Sequence[ProgramNode]
) -> Segment:
    made = {name for node in nodes for name in node.outputs}
    read = [name for node in nodes for name in node.inputs if name and name not in made]
    read = [name for name in dict.fromkeys(read) if program.operands[name].role != "weight"]
    wanted = {name for node in later for name in node.inputs} | set(program.outputs)
    gives = [name for node in nodes for name in node.outputs if name in wanted]
    used = dict.fromkeys((*read, *(name for node in nodes for name in (*node.inputs, *node.outputs) if name)))
    operands = {name: program.operands[name] for name in (*used, *_beside(program, nodes))}
    # Handed over by value: what had a place in the arena, or was another's memory, comes and goes by itself.
    for name in read:
        if operands[name].role != "state":
            operands[name] = replace(operands[name], role="input", offset=None, alias="")
    for name in gives:
        if operands[name].role == "activation":
            operands[name] = replace(operands[name], role="output", offset=None)
    name = f"{program.name}, layer {layer}" if layer is not None else program.name
    cut_out = replace(
        program, name=name, inputs=tuple(read), outputs=tuple(gives), operands=operands, nodes=tuple(nodes)
    )
    cut_out.check(name)
    return Segment(
        program=cut_out,
        layer=layer,
        carried=tuple(name for name in read if name not in program.inputs),
        gives=tuple(name for name in gives if program.operands[program.root(name)].role != "state"),
    )


def _beside(program: Program, nodes: Sequence[ProgramNode]) -> list[str]:
    """Memory that steps name and nodes do not: scratch, and what kernels leave zero."""
    touched = (name for node in nodes for variant in node.variants for name in operands_in(variant.steps))
    return [name for name in dict.fromkeys(touched) if program.operands[name].role in ("scratch", "zeroed")]
