"""Make a table of measured kernels for `dsc plan` from what `dsc bench --nodes --json` printed.

    python benchmarks/kernel_tables.py h200 BENCH.json ... > compiler/planning/kernel_times/h200.json

Each file is one engine. A node is timed right behind itself, so what it reads may lie in the chip's L2; times are scaled by one
factor a step, so that all nodes together take what the whole step's graph takes (`scale` in the table). Same files, same bytes.

    sources  one an engine: engine, model, date, driver, toolchain, command
      steps    phase, sequences, queries (tokens of each), context; step_us: the graph without sampling, or the prefill as the
               host sees it; gap_us: what the host adds to a decode step; experts: distinct ones hit, the mean over layers
      ops      name, op, count (nodes that are alike), widths, formats; us: by step, null where a step does not run it
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Letters that are the step's, and widths that follow from others.
OF_STEP = ("B", "B1", "N", "P", "Q", "R", "T", "block_bytes", "block_tokens", "context")


def main(gpu: str, files: Sequence[str]) -> None:
    """Print the table as JSON, one op a line."""
    data = {"gpu": gpu, "sources": [source(json.loads(Path(name).read_text(encoding="utf-8"))) for name in files]}
    print(text(data), end="")


def source(bench: dict[str, Any]) -> dict[str, Any]:
    """One engine's part of the table."""
    steps = list(steps_of(bench))
    kinds: dict[str, dict[str, Any]] = {}
    for number, (step, nodes) in enumerate(steps):
        for node in nodes:
            entry = entry_of(node)
            held = kinds.setdefault(json.dumps(entry, sort_keys=True), {**entry, "us": [None] * len(steps)})
            held["us"][number] = round(node["seconds"] * 1e6 * step["scale"], 2)
    decode = bench["decode"]
    batches, contexts = (",".join(map(str, dict.fromkeys(p[key] for p in decode))) for key in ("batch", "context"))
    return {
        "engine": bench["engine"],
        "model": bench["model"],
        "device": bench["device"],
        "date": bench["date"],
        "driver": bench["driver"],
        "toolchain": bench["toolchain"],
        "command": f"dsc bench {bench['engine']} --batch {batches} --context {contexts} --nodes --json",
        "steps": [step for step, _ in steps],
        "ops": list(kinds.values()),
    }


def entry_of(node: dict[str, Any]) -> dict[str, Any]:
    """What tells a kind of node from others."""
    widths = {name: size for name, size in node["dims"].items() if name not in OF_STEP}
    return {
        "name": node["name"],
        "op": node["op"],
        "count": node["count"],
        "widths": widths,
        "formats": node["attributes"],
    }


def steps_of(bench: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Every step with its nodes, sampling among them; what has no figures is told on standard error."""
    for point in bench["decode"]:
        where = f"{bench['engine']}: decode, batch {point['batch']}, context {point['context']}"
        if not point["nodes"]:
            print(f"{where}: left out, it has no nodes", file=sys.stderr)
            continue
        step_us = (point["device_seconds"] - point["sample_seconds"]) * 1e6
        step = {"phase": "decode", "sequences": point["batch"], "queries": 1, "context": point["context"]}
        step |= facts(point["nodes"], step_us, point["experts"])
        step["gap_us"] = round(max(0.0, point["seconds"] - point["device_seconds"]) * 1e6, 2)
        yield step, [*point["nodes"], sample(point, step["scale"])]
    for point in {p["context"]: p for p in sorted(bench["prefill"], key=lambda p: p["prompts"])}.values():
        where = f"{bench['engine']}: prefill of {point['prompts']} x {point['context']} at once"
        if not point["nodes"]:
            print(f"{where}: left out, it has no nodes", file=sys.stderr)
            continue
        whole = next(held for held in point["nodes"] if held["prompts"] == point["prompts"])
        if whole["tokens"] != point["context"]:
            print(f"{where}: left out, it takes several steps", file=sys.stderr)
            continue
        scale = point["seconds_at_once"] * 1e6 / total_us(whole["nodes"])
        for held in point["nodes"]:
            step = {
                "phase": "prefill",
                "sequences": held["prompts"],
                "queries": held["tokens"],
                "context": held["tokens"],
            }
            yield step | facts(held["nodes"], scale * total_us(held["nodes"]), point["experts"]), held["nodes"]


def facts(nodes: Sequence[dict[str, Any]], step_us: float, experts: dict[str, float]) -> dict[str, Any]:
    """What a step took, and by what its nodes' times are scaled to come to that."""
    hit = round(statistics.fmean(experts.values()), 1) if experts else None
    return {"experts": hit, "step_us": round(step_us, 2), "scale": round(step_us / total_us(nodes), 4)}


def sample(point: dict[str, Any], scale: float) -> dict[str, Any]:
    """Sampling as a node: its graph was timed as it runs, so the step's scale is taken off again."""
    # Of several ranks, a head gives its part of the logits, and all of them are sampled.
    heads = {node["op"]: node["dims"] for node in point["nodes"] if node["op"] in ("LmHead", "GatherLogits")}
    seconds = point["sample_seconds"] / scale
    dims = {"V": heads["GatherLogits"]["vocabulary"] if "GatherLogits" in heads else heads["LmHead"]["V"]}
    return {"name": "sample", "op": "Sample", "count": 1, "dims": dims, "attributes": {}, "seconds": seconds}


def total_us(nodes: Sequence[dict[str, Any]]) -> float:
    """Microseconds of all nodes of a program."""
    return float(sum(node["count"] * node["seconds"] for node in nodes)) * 1e6


def text(data: dict[str, Any]) -> str:
    """JSON with one step and one op a line: changes can be read."""
    lines = ["{", f' "gpu": {json.dumps(data["gpu"])},', ' "sources": [']
    for number, item in enumerate(data["sources"]):
        lines.append("  {")
        lines += [f"   {json.dumps(key)}: {json.dumps(item[key])}," for key in item if key not in ("steps", "ops")]
        for key, end in (("steps", ","), ("ops", "")):
            rows = ",\n".join(f"    {json.dumps(row)}" for row in item[key])
            lines.append(f'   "{key}": [\n{rows}\n   ]{end}')
        lines.append("  }" + ("," if number + 1 < len(data["sources"]) else ""))
    return "\n".join([*lines, " ]", "}", ""])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
