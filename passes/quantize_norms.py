"""Let norms quantize their results, where fp8 weights multiply these next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from dsc.compiler.ir.graph import (
    Graph,
    GraphInfo,
    Node,
    is_plugin,
    op_name,
    operand,
    schema_of,
    type_of,
    variable,
)
from dsc.compiler.ir.rewrite import Pass, Report
from dsc.plugins.formats import parse_format

NORMS = ("dsc.AddRmsNorm", "dsc.RmsNorm")
READERS = {"dsc.Linear": ("w",), "dsc.Qkv": ("w", "w_kv"), "dsc.Moe": ("gate", "up", "shared_gate", "shared_up")}


@dataclass(frozen=True)
class QuantizeNorms(Pass):
    """AddRmsNorm -> Linear | Qkv | Moe with fp8 weights: the norm makes `codes` and `scales` too, which the reader takes.

    Norms are dsc.AddRmsNorm and dsc.RmsNorm. A site is a reader: it has no launch of its own to quantize x any more, and
    readers of one norm share its codes. The codes are those that the reader made, bit for bit. y stays for other readers.
    """

    def expected(self, info: GraphInfo) -> int:
        """Readers of norms whose weights the recipe has in fp8."""
        spec, fp8 = info.spec, {name for name, kind in info.formats.items() if kind == "fp8"}
        of_attention = 1
        if "fuse_qkv" not in info.done:  # q (or q_a) and kv_a, each by itself, and q_b behind its norm
            of_attention = 2 if spec.q_lora_rank is None else 3
        experts = "experts" in fp8 or ("shared_experts" in fp8 and spec.num_shared_experts > 0)
        sites = info.num_layers * of_attention if "attention" in fp8 else 0
        sites += info.num_layers if "kv_b" in fp8 and "insert_mla_attention" not in info.done else 0
        sites += 2 * info.num_dense_layers if "dense_mlp" in fp8 else 0  # gate and up
        return sites + (info.num_moe_layers if experts else 0)

    def run(self, graph: Graph) -> Report:
        report = Report()
        for norm, readers in _sites(graph, report):
            formats = {reader.name: _fp8_formats(reader) for reader in readers}
            found = sorted(set().union(*formats.values()))
            if len(found) > 1:
                for reader in readers:
                    told = ", ".join(f"{name} {' and '.join(sorted(f))}" for name, f in formats.items())
                    report.decline(reader, f"readers of {norm.name} want codes of two kinds", "one format", told)
                continue
            made = _make_codes(norm, found[0])
            for reader in readers:
                _take(reader, made)
                report.change(reader, f"x as {found[0]} codes of {norm.name}")
        return report


def _sites(graph: Graph, report: Report) -> Iterator[tuple[Node, list[Node]]]:
    """Norms with the readers that multiply their results in fp8; declines readers whose x something stands before."""
    readers: dict[int, tuple[Node, list[Node]]] = {}  # by identity: gs compares nodes by value
    for node in graph.nodes:
        formats = _fp8_formats(node)
        if not formats:
            continue
        x = node.inputs[0]
        maker = x.inputs[0] if x.inputs else None
        if maker is not None and op_name(maker) in NORMS and maker.outputs[0] is x:
            if op_name(node) not in READERS:
                report.decline(node, "quantizes only the rows that it takes", " or ".join(READERS), op_name(node))
            elif "quantize" in maker.attrs or operand(node, "x_codes") is not None:
                report.decline(node, "has codes already", "x alone", f"{op_name(maker)} {maker.name}")
            else:
                readers.setdefault(id(maker), (maker, []))[1].append(node)
        elif maker is None or not is_plugin(maker):
            got = f"{op_name(maker)} {maker.name}" if maker is not None else f"the input {x.name}"
            report.decline(node, "what it multiplies is no norm's result", " or ".join(NORMS), got)
    yield from readers.values()


def _fp8_formats(node: Node) -> set[str]:
    """Formats of the fp8 weights that multiply a node's first operand."""
    if not is_plugin(node):
        return set()
    names = READERS.get(op_name(node), ("w",) if op_name(node) == "dsc.LmHead" else ())
    present = [str(node.attrs[f"{name}_format"]) for name in names if operand(node, name) is not None]
    return {format_ for format_ in present if parse_format(format_).kind == "fp8"}


def _make_codes(norm: Node, format_: str) -> dict[str, gs.Variable]:
    """The outputs that a norm gets, by the names that its readers take them under."""
    norm.attrs["quantize"] = format_
    schema = schema_of(norm)
    types, _ = schema.check([type_of(tensor) for tensor in norm.inputs], norm.attrs)
    made = {}
    for output, type_ in list(zip(schema.outputs_of(norm.attrs), types, strict=True))[len(norm.outputs) :]:
        made[f"x_{output.name}"] = variable(f"{norm.name}.{output.name}", type_)
    norm.outputs.extend(made.values())
    return made


def _take(reader: Node, made: dict[str, gs.Variable]) -> None:
    """Give a reader the codes and their scales."""
    slots = schema_of(reader).slot_names()
    while len(reader.inputs) < len(slots):
        reader.inputs.append(gs.Variable.empty())
    for name, tensor in made.items():
        reader.inputs[slots.index(name)] = tensor
