"""Seconds of a step's nodes, those that are alike together, with all that a table of kernels needs to know of them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dsc.runtime.bench_floor import Rates, StepFacts, dims_of, experts_of, step_floor
from dsc.runtime.bench_layers import Part, has_experts
from dsc.runtime.program import Program, ProgramNode, layer_of

MOE_LAYERS = 2  # that are timed node by node: layers of a kind do not differ
UNIT = Rates(memory=1.0, bf16=1.0, fp8=1.0)


@dataclass(frozen=True)
class NodeTime:
    """A node, or all that are alike: same op, widths, formats and place in a layer.

    name        `layers.*` for a layer's number
    count       nodes of the program that are alike; `seconds` is the mean of those that were timed, of one node
    floor       seconds, None where the target has no measured rates; bytes and flop are what it counts
    dims        letters and widths in this step
    attributes  formats, mode and dtypes
    experts     distinct experts that it reached, None for other ops than Moe
    """

    name: str
    op: str
    count: int
    seconds: float
    floor: float | None
    launches: int | None
    moe: bool
    bytes: int
    flop: float
    dims: dict[str, int]
    attributes: dict[str, str]
    experts: float | None


def timed_layers(program: Program) -> frozenset[str]:
    """The layers, and parts outside layers, whose nodes are timed: all up to the second with experts.

    None is left out before them, since the routers would choose from what another layer left behind.
    """
    names = list(dict.fromkeys(layer_of(node.name) for node in program.nodes))
    chosen, found = [], 0
    for name in names:
        if name.startswith("layers."):
            if found == MOE_LAYERS:
                continue
            found += has_experts(program, name)
        chosen.append(name)
    return frozenset(chosen)


def node_times(program: Program, facts: StepFacts, parts: Sequence[Part], rates: Rates | None) -> list[NodeTime]:
    """Timed nodes as kinds, in the program's order.

    parts  one a node; nodes that are alike may be missing but for one
    """
    timed = {part.name: part for part in parts}
    floors = {floor.node: floor for floor in step_floor(program, facts, rates or UNIT)}
    alike: dict[object, list[ProgramNode]] = {}
    for node in program.nodes:
        alike.setdefault(_kind(program, node, facts), []).append(node)
    found = []
    for nodes in alike.values():
        own = [timed[node.name] for node in nodes if node.name in timed]
        if not own:
            continue
        first = next(node for node in nodes if node.name in timed)
        floor = floors[first.name]
        found.append(
            NodeTime(
                name=_general(first.name),
                op=first.op,
                count=len(nodes),
                seconds=statistics.fmean(part.seconds for part in own),
                floor=floor.seconds if rates is not None else None,
                launches=own[0].launches,
                moe=has_experts(program, first.name),
                bytes=floor.bytes,
                flop=floor.flop,
                dims=_numbers(program, first, facts),
                attributes=_texts(first),
                experts=experts_of(program, first, facts),
            )
        )
    return found


def _kind(program: Program, node: ProgramNode, facts: StepFacts) -> object:
    dims, texts = _numbers(program, node, facts), _texts(node)
    return _general(node.name), node.op, tuple(dims.items()), tuple(texts.items())


def _general(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "layers.*.", name)


def _numbers(program: Program, node: ProgramNode, facts: StepFacts) -> dict[str, int]:
    return {k: v for k, v in sorted(vars(dims_of(program, node, facts)).items()) if isinstance(v, int)}


def _texts(node: ProgramNode) -> dict[str, str]:
    return {name: value for name, value in sorted(node.attributes.items()) if isinstance(value, str)}
