"""`dsc explain`: one tensor or node of an engine: where it comes from, what was done to it and why, its error, its kernel."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsc.plugins.schema import SchemaError, folder_of, load_op
from dsc.runtime import certificate, codec
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.certificate import LayerErrors
from dsc.runtime.diff import EngineWeight, weights_of
from dsc.runtime.errors import DscError, nearest
from dsc.runtime.inspect import describe_node
from dsc.runtime.manifest import TensorEntry
from dsc.runtime.program import Program, ProgramNode
from dsc.runtime.shards import shard_shape
from dsc.runtime.steps import Kernel, Repeat, Step

Data = dict[str, Any]
Programs = Mapping[str, Program]
UNLESS_NAMED = ("embeddings", "lm_head", "eh_proj")  # classes that quantize_weights leaves unless the recipe names them


def explain(folder: EngineFolder, name: str) -> Data:
    """What is known of a name, as a JSON object whose `kind` is tensor, node or source.

    tensor  a weight or one of its stored tensors: `record` (what became of it), `chosen_by` (the recipe's entry for its
            class and why it got another format), `stored` (its bytes, and the part that a rank has), `readers`,
            `certificate`
    node    `graphs`: its operands, the passes that touched it with their notes, and its kernels in each graph
    source  a tensor of the checkpoint: `state` in the ledger, and the weight it went into
    raises  DscError with the nearest known name
    """
    weights = weights_of(folder)
    stored = {tensor: weight for weight, found in weights.items() for tensor in found.tensors.values()}
    programs = {graph: folder.program(graph) for graph in folder.manifest.graphs}
    if name in weights or name in stored:
        return _tensor(folder, programs, weights[name if name in weights else stored[name]])
    nodes = {node.name for program in programs.values() for node in program.nodes}
    if name in nodes:
        return _node(folder, programs, name)
    states = _states(folder)
    if name in states:
        return {"kind": "source", "name": name, "state": states[name], "weight": _weight_of(folder, name)}
    near = nearest(name, [*weights, *stored, *nodes]) or nearest(name, list(states)[:5000])
    raise DscError(f"the engine has no tensor and no node {name}", where=str(folder.path), try_=near)


# -- tensors


def _tensor(folder: EngineFolder, programs: Programs, weight: EngineWeight) -> Data:
    entries = {part: (tensor, folder.manifest.tensors[tensor]) for part, tensor in weight.tensors.items()}
    readers = [reader for tensor, _ in entries.values() for reader in _readers(folder, programs, tensor)]
    return {
        "kind": "tensor",
        "name": weight.name,
        "weight_class": weight.entry.weight_class,
        "format": weight.entry.format,
        "models": list(weight.entry.models),
        "record": next((r for r in folder.report["weights"] if r["name"] == weight.name), None),
        "chosen_by": _chosen_by(folder, weight),
        "notes": sorted({note for reader in readers for note in _notes(folder, reader)}),
        "stored": [
            {
                "tensor": tensor,
                "part": part,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "layout": entry.layout,
                "bytes": entry.bytes,
                "file": entry.file,
                "offset": entry.offset,
                "sha256": entry.sha256,
                **_part(programs, tensor, entry),
            }
            for part, (tensor, entry) in entries.items()
        ],
        "readers": readers,
        "certificate": _layer_errors(folder, weight.name),
    }


def _part(programs: Programs, tensor: str, entry: TensorEntry) -> Data:
    """The part of a stored tensor that a rank has: its shape, and the cuts that leave it, none for all of it."""
    operands = [operand for program in programs.values() for operand in program.operands.values()]
    cuts = next((operand.cuts for operand in operands if operand.tensor == tensor), ())
    return {"rank_shape": list(shard_shape(entry.shape, cuts)), "cuts": codec.encode(cuts)}


def _chosen_by(folder: EngineFolder, weight: EngineWeight) -> Data | None:
    """The entry of the recipe that a weight's class goes by, as quantize_weights reads it; None where it has no say."""
    recipe, weight_class = folder.manifest.recipe, weight.entry.weight_class
    options = next((e["quantize_weights"] for e in recipe["passes"] if "quantize_weights" in e), None)
    if options is None or weight_class == "exact":
        return None
    keys = [weight_class, *(("attention",) if weight_class == "kv_b" else ())]
    if weight_class not in UNLESS_NAMED:
        keys.append("default")
    of_mtp = recipe["mtp"].get("weights") or {}
    if weight.entry.models == ("mtp",):
        for key in keys:
            if of_mtp.get(key) is not None:
                return {"entry": f"mtp.weights: {key}", "value": of_mtp[key]}
    if weight_class in options.get("skip", ()):
        return {"entry": "skip", "value": list(options["skip"])}
    for key in keys:
        if options.get(key) is not None:
            return {"entry": key, "value": options[key]}
    return {"entry": "none", "value": None}


def _notes(folder: EngineFolder, reader: Data) -> Iterator[str]:
    """What quantize_weights noted at a node that reads a tensor, of the operand that the tensor is."""
    operand = reader["slot"].removesuffix(".scales")
    for entry in folder.report["passes"]:
        for run in entry["graphs"] if entry["name"] == "quantize_weights" else ():
            for change in run["changed"] if run["graph"] == reader["graph"] else ():
                if change["node"] == reader["node"] and change["note"].startswith(f"{operand} "):
                    yield change["note"]


def _readers(folder: EngineFolder, programs: Programs, tensor: str) -> list[Data]:
    return [
        {"graph": graph, "node": node.name, "op": f"dsc.{node.op}", "slot": slot, "kernels": kernels_of(node)}
        for graph, program in programs.items()
        for node in program.nodes
        for slot, operand in zip(_slots(node), node.inputs, strict=False)
        if operand and program.operands[operand].tensor == tensor
    ]


def _slots(node: ProgramNode) -> list[str]:
    try:
        return list(load_op(node.op).slot_names())
    except SchemaError:  # an op that this version has no plugin for
        return [f"input {i}" for i in range(len(node.inputs))]


# -- nodes


def _node(folder: EngineFolder, programs: Programs, name: str) -> Data:
    graphs = []
    for graph, program in programs.items():
        for position, node in enumerate(program.nodes):
            if node.name == name:
                touched = [
                    {"pass": entry["name"], "note": change["note"]}
                    for entry in folder.report["passes"]
                    for run in entry["graphs"]
                    for change in run["changed"]
                    if run["graph"] == graph and change["node"] == name
                ]
                facts = {"graph": graph, "position": position, "of": len(program.nodes)}
                described = describe_node(program, node, folder)
                graphs.append({**facts, **described, "passes": touched, "kernels": kernels_of(node)})
    declined = [
        {"pass": entry["name"], "graph": run["graph"], **site}
        for entry in folder.report["passes"]
        for run in entry["graphs"]
        for site in run["declined"]
        if site["node"] == name
    ]
    return {
        "kind": "node",
        "name": name,
        "graphs": graphs,
        "declined": declined,
        "certificate": _layer_errors(folder, name),
    }


def kernels_of(node: ProgramNode) -> list[str]:
    """What runs a node: its kernels with the sizes they serve; on the CPU the file that binds it when it is loaded."""
    if not node.variants:
        cpu = f"plugins/{folder_of(node.op)}/cpu.py"
        has_own = importlib.util.find_spec(f"dsc.plugins.{folder_of(node.op)}.cpu") is not None
        return [
            f"{cpu}, or reference.py where that binds nothing" if has_own else cpu.replace("cpu.py", "reference.py")
        ]
    return [
        f"{variant.guard or ('otherwise' if i else 'always')}: {', '.join(dict.fromkeys(_step_names(variant.steps)))}"
        for i, variant in enumerate(node.variants)
    ]


def _step_names(steps: tuple[Step, ...]) -> Iterator[str]:
    for step in steps:
        if isinstance(step, Repeat):
            yield from _step_names(step.steps)
        else:
            yield f"{step.entry} of {step.cubin}" if isinstance(step, Kernel) else step.kind


# -- around them


def _layer_errors(folder: EngineFolder, name: str) -> Data | None:
    """What the certificate says of the layer that a name lies in; None without either."""
    found = re.search(r"layers\.(\d+)\.", name)
    try:
        measured = certificate.read(folder)
    except DscError:  # of another engine: it says nothing of this one
        measured = None
    if found is None or measured is None:
        return None
    layers: list[LayerErrors] = [layer for layer in measured.layers if layer.layer == int(found[1])]
    if not layers:
        return None
    alone, reached = layers[0].alone, layers[0].reached
    return {
        "layer": layers[0].layer,
        "alone": alone.relative_error,
        "alone_worst_row": alone.worst_row_error,
        "reached": reached.relative_error,
        "reached_worst_row": reached.worst_row_error,
    }


def _states(folder: EngineFolder) -> dict[str, str]:
    """Every tensor of the checkpoint -> what became of it."""
    states: dict[str, str] = {}
    for state, part in folder.report["ledger"].items():
        if state == "dropped":
            states |= {name: f"dropped: {rule}" for rule, names in part["tensors"].items() for name in names}
        else:
            states |= dict.fromkeys(part["tensors"], state)
    return states


def _weight_of(folder: EngineFolder, source: str) -> str | None:
    """The engine's weight that a source tensor went into, by the report's record of its sources; None if it was dropped."""
    for record in folder.report["weights"]:
        if any(_matches(pattern, source) for pattern in record.get("sources", ())):
            return str(record["name"])
    return None


def _matches(folded: str, name: str) -> bool:
    """Whether a name is one of those that a folded name stands for: `experts.{0-15}.up_proj`."""
    pattern = re.sub(r"\\\{([\d,\-\\]+)\\\}", r"(\\d+)", re.escape(folded))
    found = re.fullmatch(pattern, name)
    ranges = re.findall(r"\{([\d,\-]+)\}", folded)
    return found is not None and all(_within(int(n), text) for n, text in zip(found.groups(), ranges, strict=True))


def _within(number: int, ranges: str) -> bool:
    bounds = [[int(end) for end in part.split("-")] for part in ranges.split(",")]
    return any(ends[0] <= number <= ends[-1] for ends in bounds)
