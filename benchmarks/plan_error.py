"""How far predicted steps are from measured ones that the prediction has not seen.

    python benchmarks/plan_error.py [h200]

Every engine of the table is predicted twice: from the tables of all other engines, and from its own table without the very step
(its batch between measured neighbours, its context from others). A step is its graph with sampling, without the host's part.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from dsc.compiler.planning.gpus import find_gpu
from dsc.compiler.planning.measured import Estimate, Source, Table, load_table, scaled_words
from dsc.compiler.planning.ops import PlannedOp
from dsc.compiler.planning.work import Step
from dsc.runtime.bench_floor import RATES


def main(gpu: str) -> None:
    """Print a table of errors in percent, and what was scaled from what."""
    table = load_table(gpu, RATES[find_gpu(gpu).target])
    assert table is not None, gpu
    print("| engine | step | measured ms | from the other engines | from its own other steps |")
    print("|---|---|---|---|---|")
    told: dict[str, list[str]] = {}
    for source in table.sources:
        others = replace(table, sources=tuple(s for s in table.sources if s is not source))
        found: list[tuple[PlannedOp, Estimate]] = []
        for step, us in source.steps.items():
            own = replace(table, sources=(source.without(step),))
            columns = [error(others, source, step, us, found), error(own, source, step, us, [])]
            name = f"{step.phase} {step.sequences} x {step.queries}, context {step.context:,}"
            print(f"| {source.engine} | {name} | {us / 1e3:.3f} | {' | '.join(columns)} |")
        told[source.engine] = list(scaled_words(found))
    for engine, words in told.items():
        print(f"\n{engine} from the others: " + "; ".join(words))


def error(table: Table, source: Source, step: Step, measured: float, found: list[tuple[PlannedOp, Estimate]]) -> str:
    """A prediction's error, or which op it has no time of."""
    total = 0.0
    for entry in source.entries:
        if step not in entry.points:
            continue
        estimate = table.estimate(entry.op, step)
        if estimate is None:
            return f"no {entry.op.op}"
        found.append((entry.op, estimate))
        total += entry.op.count * estimate.us
    return f"{total / measured - 1:+.1%}"


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "h200")
