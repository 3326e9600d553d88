"""What `dsc explain` prints: the data of `dsc.runtime.explain.explain`, a fact a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Data = dict[str, Any]
SHOWN_SOURCES = 8


def text(data: Data) -> str:
    """The lines of a tensor, a node or a source."""
    lines = {"tensor": _tensor, "node": _node, "source": _source}[data["kind"]](data)
    return "\n".join(lines)


def cuts_text(cuts: Sequence[Data]) -> str:
    """Which part of a stored tensor a rank has: "by expert along axis 0, by width along axis 1"."""
    kept = [f" with the last {cut['kept']}" if "kept" in cut else "" for cut in cuts]
    return ", ".join(f"by {cut['by']} along axis {cut['axis']}{rest}" for cut, rest in zip(cuts, kept, strict=True))


def _source(data: Data) -> Iterator[str]:
    yield f"{data['name']}    a tensor of the checkpoint"
    yield f"  became   {data['state']}"
    if data["weight"]:
        yield f"  went to  {data['weight']}"


def _tensor(data: Data) -> Iterator[str]:
    record = data["record"]
    yield f"{data['name']}    {data['weight_class']} as {data['format']}, of {', '.join(data['models'])}"
    if record:
        sources = record.get("sources", [])
        more = [f"and {len(sources) - SHOWN_SOURCES} more"] if len(sources) > SHOWN_SOURCES else []
        for label, source in zip(("from", *[""] * len(sources)), [*sources[:SHOWN_SOURCES], *more], strict=False):
            yield f"  {label:8} {source}"
        if not sources:
            yield "  from     a table computed from config.json"
        yield f"  became   {record['verdict']}: {_cost(record)}"
    if data["chosen_by"]:
        yield f"  chosen   by {data['chosen_by']['entry']} of quantize_weights: {data['chosen_by']['value']}"
    for note in data["notes"]:
        yield f"  note     {note}"
    for part in data["stored"]:
        yield f"  {part['part']:8} {part['tensor']} {part['dtype']} {part['shape']}, {part['bytes']:,} bytes"
        yield f"           {part['file']} from byte {part['offset']:,}, {part['layout']}, sha256 {part['sha256'][:16]}"
        if part["cuts"]:
            yield f"           a rank has {part['rank_shape']} of it, {cuts_text(part['cuts'])}"
    yield from _certificate(data["certificate"])
    for reader in data["readers"]:
        yield f"  read by  {reader['op']} {reader['node']} of {reader['graph']} as {reader['slot']}"
        yield from (f"             {kernel}" for kernel in reader["kernels"])


def _cost(record: Data) -> str:
    cost = f"relative error {record['relative_error']:.3g}, worst row {record['worst_row_error']:.3g}"
    counts = [
        f"{record[key]:,} {what}"
        for key, what in (("saturated", "saturated codes"), ("zero_groups", "groups of zeros"))
    ]
    grids = [f"{count:,} matrices with codes {grid}" for grid, count in record["grids"].items()]
    return ", ".join([cost, *counts, *grids])  # fmt: skip


def _node(data: Data) -> Iterator[str]:
    for graph in data["graphs"]:
        yield f"{data['name']}    {graph['op']}, node {graph['position'] + 1} of {graph['of']} in {graph['graph']}"
        for touched in graph["passes"]:
            yield f"  {touched['pass']:22} {touched['note'] or 'made it'}"
        for key, value in graph["attributes"].items():
            yield f"  {key:22} {value}"
        for arrow, operand in [("<", o) for o in graph["inputs"]] + [(">", o) for o in graph["outputs"]]:
            shape = ", ".join(map(str, operand["shape"]))
            kind = operand.get("format", operand["role"])
            part = f" of {operand['stored_shape']}" if "cuts" in operand else ""
            yield f"  {arrow} {operand['slot']:20} {operand['name']}: {operand['dtype']} [{shape}]{part}, {kind}"
        yield from (f"  kernel                 {kernel}" for kernel in graph["kernels"])
        yield ""
    for site in data["declined"]:
        yield f"  declined by {site['pass']} in {site['graph']}: {site['reason']}"
    yield from _certificate(data["certificate"])


def _certificate(found: Data | None) -> Iterator[str]:
    if found:
        alone = f"{found['alone']:.3g} alone (worst row {found['alone_worst_row']:.3g})"
        reached = f"{found['reached']:.3g} reached (worst row {found['reached_worst_row']:.3g})"
        yield f"  layer {found['layer']}  error {alone}, {reached}"
