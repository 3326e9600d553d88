"""What `dsc inspect --kernels` tells: every kernel of an engine with what it uses, and what each step launches.

From the report (what the build read of the cubins), the manifest and the programs alone: no Triton, nvcc or cuobjdump.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.expressions import evaluate, parse_guard
from dsc.runtime.program import Program, ProgramNode, layer_of
from dsc.runtime.steps import Kernel, Repeat, Step, kernels_in

SEQUENCES = (1, 16, 64, 256)  # of the decode steps that are told, and the most there can be
PROMPT_TOKENS = (256, 1024, 4096)  # of the prefill steps, in one sequence, likewise
# What the build reads of a cubin; null in engines of an older dsc, which did not look.
READ = ("registers", "stack_bytes", "static_shared_bytes", "tensor_cores", "fp8", "remedy", "allowed")

Data = dict[str, Any]


def describe_kernels(folder: EngineFolder, programs: Mapping[str, Program]) -> list[Data]:
    """One record a cubin, by name; none for an engine of the CPU.

    {cubin, entry, ops, registers, stack_bytes, static_shared_bytes, tensor_cores, fp8, remedy, allowed,
    dynamic_shared_bytes, threads, bytes, launches: {graph: {tokens: launches in that step}}}
    """
    read = {record["cubin"]: record for record in folder.report["kernels"]}
    users: dict[str, list[tuple[str, Kernel]]] = {}
    for program in programs.values():
        for node in program.nodes:
            for step in (step for variant in node.variants for step in kernels_in(variant.steps)):
                users.setdefault(step.cubin, []).append((node.op, step))
    launches = {graph: _launches(folder, program) for graph, program in programs.items()}
    return [
        {
            "cubin": cubin,
            "entry": used[0][1].entry,
            "ops": sorted({op for op, _ in used}),
            **{key: read.get(cubin, {}).get(key) for key in READ},
            "dynamic_shared_bytes": max(step.shared_bytes for _, step in used),
            "threads": max(math.prod(step.block) for _, step in used),
            "bytes": folder.manifest.files[cubin].bytes,
            "launches": {graph: {size: counts[cubin] for size, counts in of.items()} for graph, of in launches.items()},
        }
        for cubin, used in sorted(users.items(), key=lambda item: (item[1][0][1].entry, item[0]))
    ]


def describe_steps(folder: EngineFolder, programs: Mapping[str, Program]) -> list[Data]:
    """What steps of some sizes launch: [{graph, tokens, launches, kinds: {kernel, gemm, ...}, parts: {layers.0: launches}}].

    A gemm is one call of cuBLAS, a collective one exchange with the other ranks. Empty for an engine of the CPU.
    """
    steps = []
    for graph, program in programs.items():
        for size, letters in _sizes(folder, program):
            kinds: Counter[str] = Counter()
            parts: Counter[str] = Counter()
            for node, step, count in _launched(program, letters):
                kinds[step.kind] += count
                parts[layer_of(node.name)] += count
            if kinds:
                facts = {"graph": graph, "tokens": size, "launches": sum(kinds.values())}
                steps.append({**facts, "kinds": dict(kinds), "parts": dict(parts)})
    return steps


def _launches(folder: EngineFolder, program: Program) -> dict[str, Counter[str]]:
    """Launches of each cubin by the step's size."""
    found: dict[str, Counter[str]] = {}
    for size, letters in _sizes(folder, program):
        counts = found.setdefault(str(size), Counter())
        for _, step, count in _launched(program, letters):
            if isinstance(step, Kernel):
                counts[step.cubin] += count
    return found


def _sizes(folder: EngineFolder, program: Program) -> Iterator[tuple[int, dict[str, int]]]:
    """The steps that are told of a graph: tokens, and the letters of such a step."""
    phases = {graph: phase for model in folder.manifest.models.values() for phase, graph in model.phases.items()}
    whole = phases.get(program.name) == "prefill"  # one sequence with all tokens; else a token of each sequence
    sizes = PROMPT_TOKENS if whole else SEQUENCES
    most = program.letters["T" if whole else "R" if program.name == "sample" else "B"]
    for size in [*(size for size in sizes if size < most), most]:
        sequences, queries, rows = (1, size, 1) if whole else (size, 1, size)
        yield size, {**program.letters, "T": size, "B": sequences, "B1": sequences + 1, "Q": queries, "R": rows}


def _launched(program: Program, letters: Mapping[str, int]) -> Iterator[tuple[ProgramNode, Step, int]]:
    """Every launch of a step: its node, itself, and how often."""
    for node in program.nodes:
        variant = next((v for v in node.variants if parse_guard(v.guard).holds(letters)), None)
        if variant is not None:
            yield from ((node, step, count) for step, count in _counted(variant.steps, letters))


def _counted(steps: Sequence[Step], letters: Mapping[str, int]) -> Iterator[tuple[Step, int]]:
    for step in steps:
        if isinstance(step, Repeat):
            times = evaluate(step.count, letters)
            yield from ((inner, times * count) for inner, count in _counted(step.steps, letters))
        else:
            yield step, 1
