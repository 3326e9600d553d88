"""What `dsc inspect` prints: the data of `dsc.runtime.inspect.describe` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsc.runtime.explain_text import cuts_text

Data = dict[str, Any]
PIPE_COLUMNS = 160


def show(data: Data, fusion: bool = False, console: Console | None = None) -> None:
    """Print what `data` holds: one layer if it has one, the fusion report alone if asked, else everything."""
    console = console or _console()
    if data["layer"] is not None:
        for line in layer_lines(data["layer"]):
            console.print(line, soft_wrap=True, highlight=False)
        return
    if not fusion:
        for table in (facts_table(data), weights_table(data), memory_table(data)):
            console.print(table)
    console.print(fusion_table(data))
    console.print(fusion_summary(data))
    if data["declined"]:
        console.print(declined_table(data))
    for note in data["notes"]:
        console.print(f"note: {note}", markup=False, highlight=False)
    if not fusion:
        console.print(ledger_table(data))
        console.print(files_table(data))


def _console() -> Console:
    """The terminal; into a pipe or file, lines as wide as the tables want."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def facts_table(data: Data) -> Table:
    """Engine, model, limits and cache, one fact a line."""
    engine, spec, limits, cache = data["engine"], data["model"]["spec"], data["limits"], data["cache"]
    experts = f"{spec['num_experts']} + {spec['num_shared_experts']} shared, {spec['experts_per_token']} a token"
    layers = f"{spec['num_layers']}, {spec['num_moe_layers']} of them MoE"
    mtp = data["model"]["models"].get("mtp")
    phases = ", ".join(graph for model in data["model"]["models"].values() for graph in model["phases"].values())
    per_token = " + ".join(f"{count:,} {name}" for name, count in cache["token_bytes"].items() if name != "total")
    rows = [
        ("recipe", f"{engine['recipe'].get('name', '')} of {engine['recipe'].get('model', '')}"),
        ("target", f"{engine['target']}, {ranks_text(engine)}, schema version {engine['schema_version']}"),
        ("content hash", engine["content_hash"]),
        ("model", f"{spec['family']}, hidden {spec['hidden_size']}, vocabulary {spec['vocab_size']}"),
        ("layers", f"{layers}, MTP layer {', '.join(map(str, mtp['layers']))}" if mtp else f"{layers}, no MTP"),
        (
            "heads",
            f"{spec['num_heads']} of {spec['qk_nope_head_dim']} + {spec['qk_rope_head_dim']}, {spec['v_head_dim']}",
        ),
        ("experts", experts if spec["num_experts"] else "none"),
        ("softmax scale", f"{spec['softmax_scale']:.6f}"),
        ("graphs", phases),
        ("largest step", f"{limits['batch_tokens']:,} tokens, {limits['sequences']} sequences"),
        ("context", f"{limits['context_tokens']:,} tokens"),
        ("decode buckets", ", ".join(map(str, limits["decode_buckets"])) or "none"),
        ("serves with", _serving(data["serving"])),
        ("cache", f"{cache['dtype']}, blocks of {cache['block_tokens']} tokens, rope {cache['rope_order']}"),
        ("cache a token", f"{cache['token_bytes']['total']:,} bytes = {per_token}"),
        ("weights", f"{size_text(engine['weight_bytes'])} of {size_text(engine['bytes'])}"),
    ]
    if engine["ranks"] > 1:
        rows.append(("weights of a rank", size_text(engine["rank_weight_bytes"])))
    return make_table(engine["name"], ("", ""), rows, header=False)


def ranks_text(engine: Data) -> str:
    """`8 ranks: tensor 8, expert 8, pipeline 1`."""
    axes = ", ".join(f"{axis} {ranks}" for axis, ranks in engine["parallel"].items())
    return _count(engine["ranks"], "rank") + (f": {axes}" if engine["ranks"] > 1 else "")


def _serving(serving: Data | None) -> str:
    if serving is None:
        return "what its server is told"
    blocks, step = f"{serving['cache_blocks']:,} cache blocks", f"{serving['batch_tokens']:,} tokens a step"
    return f"{serving['sequences']} sequences, {blocks}, {step} on {serving['gpu']}"


def fusion_table(data: Data) -> Table:
    """Found and expected sites, a row per pass and a column per graph."""
    graphs = list(dict.fromkeys(entry["graph"] for entry in data["fusion"]))
    cells = {(entry["pass"], entry["graph"]): entry for entry in data["fusion"]}
    rows = []
    for name in dict.fromkeys(entry["pass"] for entry in data["fusion"]):
        entries = [cells[name, graph] for graph in graphs]
        allowed = entries[0]["allowed"]
        note = f"{allowed['count']} may be missed: {allowed['reason']}" if allowed else ""
        rows.append((name, *map(_sites, entries), note))
    columns = ("pass", *(graph.replace(".", "\n") for graph in graphs), "")
    return make_table("fusion sites: found / expected", columns, rows, right=range(1, len(graphs) + 1))


def fusion_summary(data: Data) -> str:
    """One line: whether every pass found what it must."""
    promised = [entry for entry in data["fusion"] if entry["expected"] is not None]
    found, expected = (sum(entry[key] for entry in promised) for key in ("found", "expected"))
    left = f", {_count(len(data['declined']), 'site')} declined" if data["declined"] else ""
    passes = _count(len({entry["pass"] for entry in promised}), "pass", "passes")
    return f"{found} of {expected} sites found in {passes}{left}"


def declined_table(data: Data) -> Table:
    """Sites that were looked at and left, each with the reason."""
    rows = [(site["pass"], site["graph"], site["node"], _reason(site)) for site in data["declined"]]
    return make_table("declined sites", ("pass", "graph", "node", "reason"), rows)


def weights_table(data: Data) -> Table:
    """Weights by class and format, with the worst error of each."""
    rows = [
        (
            entry["weight_class"],
            entry["format"],
            f"{entry['count']:,}",
            size_text(entry["bytes"]),
            _error(entry["worst_relative_error"]),
            _error(entry["worst_row_error"]),
            _how(entry),
        )
        for entry in data["weights"]
    ]
    columns = ("class", "format", "weights", "bytes", "worst\nerror", "worst\nrow", "how")
    return make_table("weights", columns, rows, right=range(2, 6))


def _how(entry: Data) -> str:
    verdicts = entry["verdicts"]
    parts = [next(iter(verdicts))] if len(verdicts) == 1 else [f"{verdict}: {n}" for verdict, n in verdicts.items()]
    parts += [f"{entry[key]:,} {key.replace('_', ' ')}" for key in ("saturated", "zero_groups") if entry[key]]
    return ", ".join(parts)


def memory_table(data: Data) -> Table:
    """Memory of each graph at its largest step."""
    rows = [
        (
            name,
            str(data["graphs"][name]["nodes"]),
            size_text(memory["arena_bytes"]),
            size_text(memory["live_bytes"]),
            f"{memory['arena_bytes'] / memory['live_bytes'] - 1:.1%}" if memory["live_bytes"] else "",
            size_text(memory["input_bytes"] + memory["output_bytes"]),
        )
        for name, memory in data["memory"].items()
    ]
    columns = ("graph", "nodes", "arena", "needed\nat once", "above it", "inputs,\noutputs")
    return make_table("memory plan, largest step", columns, rows, right=range(1, 6))


def ledger_table(data: Data) -> Table:
    """What became of the checkpoint's tensors."""
    ledger = data["ledger"]
    how = {"dropped": ", ".join(f"{rule}: {count}" for rule, count in ledger["rules"].items())}
    rows = [
        (state, f"{ledger[state]['count']:,}", size_text(ledger[state]["bytes"]), how.get(state, ""))
        for state in ("consumed", "derived", "dropped")
    ]
    return make_table("tensors of the checkpoint", ("", "tensors", "bytes", "rule"), rows, right=(1, 2))


def files_table(data: Data) -> Table:
    """Files with sizes and the first digits of their hashes, of which one by parts is no sha256 of the file."""
    rows = [
        (
            file["path"],
            f"{file['bytes']:,}",
            file["sha256"][:16] if "sha256" in file else f"parts {file['parts_sha256'][:16]}",
        )
        for file in data["files"]
    ]
    return make_table("files", ("path", "bytes", "sha256"), rows, right=(1,))


def layer_lines(layer: Data) -> Iterable[str]:
    """The nodes of a layer with their operands, graph by graph. `<` is read, `>` is written."""
    for graph, nodes in layer["graphs"].items():
        yield f"[bold]layer {layer['layer']} in {graph}[/bold]"
        for node in nodes:
            yield f"\n{node['op']}  {node['node']}"
            if node["attributes"]:
                yield "    " + escape(", ".join(f"{key} {value}" for key, value in node["attributes"].items()))
            rows = [("<", o) for o in node["inputs"]] + [(">", o) for o in node["outputs"]]
            slots, types = (max(len(text(o)) for _, o in rows) for text in (_slot, _type))
            for arrow, operand in rows:
                type_ = escape(_type(operand).ljust(types))
                yield f"    {arrow} {_slot(operand).ljust(slots)}  {type_}  {escape(_what(operand))}"
        yield ""


def _slot(operand: Data) -> str:
    return str(operand["slot"])


def _type(operand: Data) -> str:
    return f"{operand['dtype']} [{', '.join(map(str, operand['shape']))}]"


def _what(operand: Data) -> str:
    if "format" in operand:
        part = f" of {operand['stored_shape']} {cuts_text(operand['cuts'])}" if "cuts" in operand else ""
        return f"{operand['name']}: {operand['weight_class']} as {operand['format']}, {operand['bytes']:,} bytes{part}"
    where = f" at {operand['offset']:,}" if operand["offset"] is not None else ""
    alias = f", the memory of {operand['alias']}" if operand["alias"] else ""
    return f"{operand['name']}: {operand['role']}{where}{alias}"


def _sites(entry: Data) -> str:
    if entry["expected"] is None:
        return f"{entry['found']} / -"
    color = "green" if entry["found"] == entry["expected"] else "red"
    return f"[{color}]{entry['found']} / {entry['expected']}[/{color}]"


def _reason(site: Data) -> str:
    parts = [site["reason"], *(f"{label} {site[label]}" for label in ("wanted", "got") if site[label])]
    return ", ".join(parts)


def _error(value: float) -> str:
    return f"{value:.3g}" if value else "0"


def size_text(num_bytes: int) -> str:
    """Bytes in decimal units, as file sizes are told elsewhere."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.2f} {unit}"
    return f"{num_bytes} B"


def _count(number: int, noun: str, nouns: str = "") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {nouns or noun + 's'}"


def make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = (), header: bool = True
) -> Table:
    """A table; the columns of `right` hold numbers. Cells of found sites hold our markup, all others are escaped, for names
    may hold brackets.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=header)
    aligned = set(right)
    for i, column in enumerate(columns):
        whole = i in aligned or (i == 0 and header)  # numbers and names stay on one line
        table.add_column(column, justify="right" if i in aligned else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(cell if cell.startswith(("[green]", "[red]")) else escape(cell) for cell in row))
    return table
