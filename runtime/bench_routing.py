"""Experts that a step hits: its program once more, with the routers' choices among its outputs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from dsc.runtime.backends import Backend
from dsc.runtime.program import Program

LEAST_SHARE = 0.9  # of what independent routing hits: where a layer is below it, a figure about experts would flatter


def router_outputs(program: Program) -> dict[str, str]:
    """The operand that holds the chosen experts, by router node."""
    return {node.name: node.outputs[0] for node in program.nodes if node.op == "Router"}


def exposing(program: Program, names: list[str]) -> Program:
    """A copy of the program whose step also gives some of its intermediates."""
    operands = dict(program.operands)
    for name in names:
        operands[name] = replace(operands[name], role="output", offset=None)
    return replace(program, operands=operands, outputs=(*program.outputs, *names))


def experts_hit(
    backend: Backend,
    program: Program,
    caches: Mapping[str, torch.Tensor],
    steps: Iterable[Mapping[str, torch.Tensor]],
) -> dict[str, float]:
    """Distinct experts that a step's tokens reach, by router node in the order of the layers: the mean over some steps."""
    ids = router_outputs(program)
    if not ids:
        return {}
    runner = backend.bind(exposing(program, list(ids.values())))
    runner.set_state(caches)
    counts: dict[str, list[int]] = {node: [] for node in ids}
    for inputs in steps:
        outputs = runner.run(inputs)
        for node, name in ids.items():
            chosen = outputs[name]
            counts[node].append(len(torch.unique(chosen[chosen >= 0])))
    return {node: statistics.fmean(found) for node, found in counts.items()}


def spreads(hits: Mapping[str, float], independent: float) -> bool:
    """Whether every layer hits nearly as many experts as independent routing would."""
    return min(hits.values(), default=independent) >= LEAST_SHARE * independent
