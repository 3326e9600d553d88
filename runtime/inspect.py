"""What `dsc inspect` tells of an engine, as data: from its manifest, report and programs alone, without the compiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dsc.plugins.schema import SchemaError, load_op
from dsc.runtime import codec
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.inspect_kernels import describe_kernels, describe_steps
from dsc.runtime.program import Program, ProgramNode

if TYPE_CHECKING:
    from rich.console import Console


def describe(folder: EngineFolder, layer: int | None = None) -> dict[str, Any]:
    """The engine as a JSON object, the same keys for every engine.

    engine, model, limits, cache, graphs  facts; cache in bytes per token, rank_weight_bytes those of each rank
    fusion    one entry per pass and graph: expected and found sites, what the recipe allows to miss
    declined  sites a pass looked at and left, with its reason; notes: what the build told its user
    weights   totals by class and format; tensors: each weight with its error
    ledger    what became of the checkpoint's tensors; memory: bytes of each graph's plan; files: sizes and hashes
    kernels, steps  what the engine launches (dsc.runtime.inspect_kernels); empty for the CPU
    layer     with `layer`: its nodes in every graph; null otherwise. DscError for a layer that is not there
    """
    manifest, report = folder.manifest, folder.report
    programs = {name: folder.program(name) for name in _graph_names(folder)}
    return {
        "engine": {**_engine(folder), "rank_weight_bytes": rank_weight_bytes(programs.values())},
        "model": _model(folder),
        "limits": {
            "batch_tokens": manifest.limits.batch_tokens,
            "sequences": manifest.limits.sequences,
            "context_tokens": manifest.limits.context_tokens,
            "decode_buckets": list(manifest.decode_buckets),
        },
        "serving": asdict(manifest.serving) if manifest.serving else None,
        "cache": _cache(folder),
        "graphs": {name: _graph(program) for name, program in programs.items()},
        "fusion": [_fusion(pass_, run) for pass_ in report["passes"] for run in pass_["graphs"]],
        "declined": _declined(report),
        "notes": report["notes"],
        "weights": _weights_by_format(report),
        "tensors": report["weights"],
        "ledger": _ledger(report),
        "memory": {name: report["memory"][name] for name in programs},
        "files": [{"path": path, **codec.encode(entry)} for path, entry in sorted(manifest.files.items())],
        "kernels": describe_kernels(folder, programs),
        "steps": describe_steps(folder, programs),
        "layer": None if layer is None else _layer(folder, programs, layer),
    }


def show(folder: EngineFolder, layer: int | None = None, fusion: bool = False, console: Console | None = None) -> None:
    """Print tables of the engine; with `layer` that layer's nodes, with `fusion` the fusion report alone."""
    from dsc.runtime import inspect_tables

    inspect_tables.show(describe(folder, layer), fusion=fusion, console=console)


def show_kernels(folder: EngineFolder, console: Console | None = None) -> None:
    """Print the engine's kernels and what its steps launch. DscError where there are none."""
    from dsc.runtime import inspect_kernel_tables

    data = describe(folder)
    if not data["kernels"]:
        target = folder.manifest.target
        raise DscError(f"an engine for {target} has no kernels", where=str(folder.path), wanted="an engine for a GPU")
    inspect_kernel_tables.show_kernels(data["kernels"], data["steps"], console)


def _graph_names(folder: EngineFolder) -> list[str]:
    """Graphs as a step meets them: the main model first, prefill before decode."""
    models = sorted(folder.manifest.models.items(), key=lambda item: (item[0] != "main", item[0]))
    return [graph for _, model in models for _, graph in sorted(model.phases.items(), reverse=True)]


def _engine(folder: EngineFolder) -> dict[str, Any]:
    manifest = folder.manifest
    return {
        "name": folder.path.name,
        "schema_version": manifest.schema_version,
        "content_hash": folder.content_hash,
        "target": manifest.target,
        "ranks": manifest.ranks,
        "parallel": asdict(manifest.parallel),
        "recipe": manifest.recipe,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "weight_bytes": sum(tensor.bytes for tensor in manifest.tensors.values()),
        "toolchain": manifest.toolchain,
    }


def rank_weight_bytes(programs: Iterable[Program]) -> int:
    """Bytes of weights that each rank has of the stored ones, for these programs together."""
    operands = [operand for program in programs for operand in program.operands.values() if operand.role == "weight"]
    return sum({(operand.tensor, operand.cuts): operand.bytes for operand in operands}.values())


def _model(folder: EngineFolder) -> dict[str, Any]:
    spec = folder.spec
    models = {
        name: {"layers": list(model.layers), "phases": model.phases} for name, model in folder.manifest.models.items()
    }
    moe = sum(spec.is_moe(layer) for layer in range(spec.num_layers))
    derived = {"softmax_scale": spec.softmax_scale, "cache_width": spec.cache_width, "num_moe_layers": moe}
    return {"spec": {**spec.to_json(), **derived}, "models": models}


def _cache(folder: EngineFolder) -> dict[str, Any]:
    layout, models = folder.manifest.kv_cache, folder.manifest.models
    by_model = {name: layout.token_bytes * len(model.layers) for name, model in models.items() if model.layers}
    return {
        "dtype": layout.dtype,
        "block_tokens": layout.block_tokens,
        "latent": layout.latent,
        "rope": layout.rope,
        "rope_order": layout.rope_order,
        "token_bytes_per_layer": layout.token_bytes,
        "token_bytes": {**by_model, "total": sum(by_model.values())},
    }


def _graph(program: Program) -> dict[str, Any]:
    return {
        "nodes": len(program.nodes),
        "ops": dict(sorted(Counter(node.op for node in program.nodes).items())),
        "letters": program.letters,
    }


def _fusion(pass_: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    facts = {key: run[key] for key in ("graph", "model", "phase", "expected", "found")}
    return {"pass": pass_["name"], **facts, "allowed": pass_["allowed"]}


def _declined(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"pass": pass_["name"], "graph": run["graph"], **site}
        for pass_ in report["passes"]
        for run in pass_["graphs"]
        for site in run["declined"]
    ]


def _weights_by_format(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Totals by class and format. Errors are the worst weight's; `verdicts` counts how the weights came about."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in report["weights"]:
        groups.setdefault((record["weight_class"], record["format"]), []).append(record)
    return [
        {
            "weight_class": weight_class,
            "format": format_,
            "count": len(records),
            "bytes": sum(record["stored_bytes"] for record in records),
            "worst_relative_error": max(record["relative_error"] for record in records),
            "worst_row_error": max(record["worst_row_error"] for record in records),
            "saturated": sum(record["saturated"] for record in records),
            "zero_groups": sum(record["zero_groups"] for record in records),
            "verdicts": dict(sorted(Counter(record["verdict"] for record in records).items())),
        }
        for (weight_class, format_), records in sorted(groups.items())
    ]


def _ledger(report: dict[str, Any]) -> dict[str, Any]:
    """Counts and bytes by state; what was dropped by the rule that allows it."""
    totals = {state: {"count": part["count"], "bytes": part["bytes"]} for state, part in report["ledger"].items()}
    return {**totals, "rules": {rule: len(names) for rule, names in report["ledger"]["dropped"]["tensors"].items()}}


def _layer(folder: EngineFolder, programs: dict[str, Program], layer: int) -> dict[str, Any]:
    found = {
        name: [
            describe_node(program, node, folder) for node in program.nodes if node.name.startswith(f"layers.{layer}.")
        ]
        for name, program in programs.items()
    }
    found = {name: nodes for name, nodes in found.items() if nodes}
    if not found:
        layers = sorted(layer for model in folder.manifest.models.values() for layer in model.layers)
        wanted = ", ".join(map(str, layers))
        raise DscError(f"the engine has no layer {layer}", where=str(folder.path), wanted=wanted, got=str(layer))
    return {"layer": layer, "graphs": found}


def describe_node(program: Program, node: ProgramNode, folder: EngineFolder) -> dict[str, Any]:
    """A node with its operands, types and places."""
    try:
        op = load_op(node.op)
        slots, outs = op.slot_names(), [tensor.name for tensor in op.outputs]
    except SchemaError:  # an op that this version has no plugin for can still be looked at
        slots, outs = [f"input {i}" for i in range(len(node.inputs))], [f"output {i}" for i in range(len(node.outputs))]
    inputs = zip(slots, node.inputs, strict=False)
    return {
        "node": node.name,
        "op": f"dsc.{node.op}",
        "attributes": node.attributes,
        "inputs": [_operand(program, slot, name, folder) for slot, name in inputs if name],
        "outputs": [_operand(program, slot, name, folder) for slot, name in zip(outs, node.outputs, strict=False)],
        "variants": [variant.guard for variant in node.variants],
    }


def _operand(program: Program, slot: str, name: str, folder: EngineFolder) -> dict[str, Any]:
    operand = program.operands[name]
    entry = folder.manifest.tensors.get(operand.tensor)
    stored: dict[str, Any] = {"format": entry.format, "weight_class": entry.weight_class} if entry else {}
    facts = {"dtype": operand.dtype, "shape": list(operand.shape), "role": operand.role, "bytes": operand.bytes}
    if entry and operand.cuts:
        stored |= {"stored_shape": list(entry.shape), "cuts": codec.encode(operand.cuts)}
    return {"slot": slot, "name": name, **facts, "alias": operand.alias, "offset": operand.offset, **stored}
