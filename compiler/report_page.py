"""`dsc report --html`: everything an engine says of itself as one page that needs nothing else, no network and no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from dsc.compiler.memory import lifetimes
from dsc.compiler.report_charts import COLORS, Box, lines, memory_map, treemap
from dsc.runtime import certificate, inspect
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.certificate import Certificate
from dsc.runtime.errors import DscError
from dsc.runtime.inspect_tables import ranks_text, size_text

Data = dict[str, Any]
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1080px; padding: 0 1rem; color: #222; }
h1 { margin-bottom: 0.2rem; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: 0.6rem 0; } td, th { padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } th { border-bottom: 1px solid #bbb; }
.good { color: #2a7d2a; } .bad { color: #b22; font-weight: 600; } svg text { font: 12px system-ui, sans-serif; }
code { word-break: break-all; } .scroll { overflow-x: auto; }
"""


def report_page(folder: EngineFolder) -> str:
    """The page's HTML. Same engine and certificate, same bytes."""
    data = inspect.describe(folder)
    title = escape(f"{data['engine']['name']}: {data['engine']['recipe'].get('name', '')}")
    parts = [
        f"<h1>{title}</h1>",
        _facts(data),
        "<h2>Fusion sites: found / expected</h2>",
        _fusion(data),
        "<h2>Bytes of weights</h2>",
        _bytes(data),
        "<h2>Error of each layer</h2>",
        _errors(folder),
        "<h2>Error of the weights</h2>",
        _weights(data),
        "<h2>Memory plan</h2>",
        _memory(folder, data),
        "<h2>Tensors of the checkpoint</h2>",
        _ledger(data),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _facts(data: Data) -> str:
    engine, spec, limits, cache = data["engine"], data["model"]["spec"], data["limits"], data["cache"]
    rows = [
        ("model", f"{spec['family']}, {spec['num_layers']} layers, hidden {spec['hidden_size']}"),
        ("recipe's model", str(engine["recipe"].get("model", ""))),
        ("target", f"{engine['target']}, {ranks_text(engine)}"),
        ("content hash", engine["content_hash"]),
        ("weights", f"{size_text(engine['weight_bytes'])} of {size_text(engine['bytes'])}"),
        ("cache a token", f"{cache['token_bytes']['total']:,} bytes, {cache['dtype']}"),
        ("largest step", f"{limits['batch_tokens']:,} tokens, {limits['sequences']} sequences"),
        ("context", f"{limits['context_tokens']:,} tokens"),
    ]
    return _table((), rows)


def _fusion(data: Data) -> str:
    graphs = list(dict.fromkeys(entry["graph"] for entry in data["fusion"]))
    cells = {(entry["pass"], entry["graph"]): entry for entry in data["fusion"]}
    rows = [
        f"<tr><td>{escape(name)}</td>{''.join(_site(cells.get((name, graph))) for graph in graphs)}</tr>"
        for name in dict.fromkeys(entry["pass"] for entry in data["fusion"])
    ]
    head = "".join(f'<th class="n">{escape(graph)}</th>' for graph in graphs)
    table = f'<div class="scroll"><table><tr><th>pass</th>{head}</tr>{"".join(rows)}</table></div>'
    declined = [(s["pass"], s["graph"], s["node"], s["reason"], s["wanted"], s["got"]) for s in data["declined"]]
    if declined:
        table += "<h3>Declined sites</h3>" + _table(("pass", "graph", "node", "reason", "wanted", "got"), declined)
    return table


def _site(entry: Data | None) -> str:
    if entry is None:
        return "<td></td>"
    if entry["expected"] is None:
        return f'<td class="n">{entry["found"]} / -</td>'
    kind = "good" if entry["found"] == entry["expected"] else "bad"
    return f'<td class="n {kind}">{entry["found"]} / {entry["expected"]}</td>'


def _bytes(data: Data) -> str:
    classes = list(dict.fromkeys(record["weight_class"] for record in data["tensors"]))
    color = {name: COLORS[number % len(COLORS)] for number, name in enumerate(sorted(classes))}
    boxes = [
        Box(
            label=record["name"].removeprefix("model."),
            title=f"{record['name']}: {record['weight_class']} as {record['format']}, {size_text(record['stored_bytes'])}",
            value=record["stored_bytes"],
            color=color[record["weight_class"]],
        )
        for record in data["tensors"]
    ]
    legend = " ".join(f'<span style="color:{color[name]}">&#9632; {escape(name)}</span>' for name in sorted(classes))
    rows = [(w["weight_class"], w["format"], f"{w['count']:,}", size_text(w["bytes"])) for w in data["weights"]]
    return f"<p>{legend}</p>{treemap(boxes)}" + _table(("class", "format", "weights", "bytes"), rows, numbers=(2, 3))


def _errors(folder: EngineFolder) -> str:
    try:
        found = certificate.read(folder)
    except DscError as error:
        return f'<p class="bad">{escape(error.text())}</p>'
    if found is None:
        return f"<p>Not measured: <code>dsc verify {escape(folder.path.name)}</code></p>"
    return _certificate(found)


def _certificate(found: Certificate) -> str:
    labels = [f"{layer.model} {layer.layer}" for layer in found.layers]
    relative = [
        ("the layer alone", [layer.alone.relative_error for layer in found.layers]),
        ("all layers so far", [layer.reached.relative_error for layer in found.layers]),
    ]
    worst = [
        ("worst row, alone", [layer.alone.worst_row_error for layer in found.layers]),
        ("worst row, so far", [layer.reached.worst_row_error for layer in found.layers]),
    ]
    end, mtp = found.end_to_end, found.mtp
    rows = [
        ("KL", f"{end.kl:.5f} nats a token, {end.worst_kl:.3f} at worst"),
        ("top-1 agreement", f"{end.top1:.2%} over {end.tokens:,} tokens"),
        ("nats a token", f"{end.nats:.4f}, unquantized {end.reference_nats:.4f}"),
        ("NaN, inf", f"{end.non_finite + sum(layer.reached.non_finite for layer in found.layers):,}"),
        ("MTP acceptance", f"{mtp.engine:.2%}, unquantized {mtp.reference:.2%}" if mtp else "no MTP"),
        ("text", f"{found.text.name}, {found.text.tokens:,} tokens"),
    ]
    about = "<p>Relative error of the residual stream against the unquantized model.</p>"
    return about + lines(relative, labels) + lines(worst, labels) + _table((), rows)


def _weights(data: Data) -> str:
    rows = [
        (
            w["weight_class"],
            w["format"],
            f"{w['worst_relative_error']:.3g}",
            f"{w['worst_row_error']:.3g}",
            f"{w['saturated']:,}",
            f"{w['zero_groups']:,}",
            ", ".join(f"{count} {verdict}" for verdict, count in w["verdicts"].items()),
        )
        for w in data["weights"]
    ]
    columns = ("class", "format", "worst error", "worst row", "saturated", "zero groups", "how")
    return _table(columns, rows, numbers=(2, 3, 4, 5))


def _memory(folder: EngineFolder, data: Data) -> str:
    parts = []
    for name, memory in data["memory"].items():
        program = folder.program(name)
        tensors = [(item.name, item.begin, item.end, item.first, item.last) for item in lifetimes(program)]
        facts = f"{size_text(memory['arena_bytes'])} for {len(tensors):,} tensors, {size_text(memory['live_bytes'])} needed at once"
        parts.append(f"<h3>{escape(name)}</h3><p>{facts}</p>")
        if tensors:
            parts.append(memory_map(tensors, len(program.nodes), program.arena_bytes))
    return "".join(parts)


def _ledger(data: Data) -> str:
    ledger = data["ledger"]
    rows = [
        (state, f"{ledger[state]['count']:,}", size_text(ledger[state]["bytes"]))
        for state in ("consumed", "derived", "dropped")
    ]
    rules = [("dropped: " + rule, f"{count:,}", "") for rule, count in ledger["rules"].items()]
    return _table(("", "tensors", "bytes"), [*rows, *rules], numbers=(1, 2))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="n"' if index in numbers else ""
        return f"<{tag}{kind}>{escape(str(text))}</{tag}>"

    head = "".join(cell("th", index, name) for index, name in enumerate(columns))
    body = "".join("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>{f"<tr>{head}</tr>" if columns else ""}{body}</table></div>'
