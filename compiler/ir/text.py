"""Graphs as text, in ONNX's textual syntax (onnx.printer, onnx.parser): for dumps, tests and `dsc opt`.

    main.prefill (float[T,256] x) => (float[T,8] y)
       <float[8,256] "lm_head.weight", int64[2] shape =  {1,-1}>
    {
       ["lm_head"] y = dsc.Linear <w_format: string = "fp32"> (x, "lm_head.weight")
    }

A weight is a declaration without values: its expression is not told, nor which part of it a rank has, whose shape it is.
Small constants keep their values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from dsc.compiler.ir.graph import DOMAIN, IR_VERSION, OPSET, Graph, GraphInfo, dtype_of, weight
from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.weight import Source, part_shape
from dsc.runtime.errors import DscError, nearest

_HEADER = f'<ir_version: {IR_VERSION}, opset_import: ["" : {OPSET}, "{DOMAIN}" : 1]>\n'

# The class of a weight that text names, by the first pattern found in the name; any other is exact.
_CLASSES = (
    (r"\.mlp\.experts\.", "experts"),
    (r"\.mlp\.shared_experts\.", "shared_experts"),
    (r"\.mlp\.(gate|up|down)_proj\.", "dense_mlp"),
    (r"\.kv_b_proj\.", "kv_b"),
    (r"\.self_attn\.\w+_proj(_with_mqa)?\.", "attention"),
    (r"\.eh_proj\.", "eh_proj"),
    (r"embed_tokens\.", "embeddings"),
    (r"^lm_head\.", "lm_head"),
)

_FACTS: dict[str, Callable[[str], Any]] = {
    "model": str,
    "phase": str,
    "layers": lambda text: tuple(map(int, text.split())),
    "cache_dtype": str,
    "block_tokens": int,
    "done": lambda text: tuple(text.split()),
    "formats": lambda text: dict(pair.split("=") for pair in text.split()),
    "mesh": lambda text: Mesh(**{name: int(ranks) for name, ranks in (pair.split("=") for pair in text.split())}),
}


def class_of_name(name: str) -> str:
    """The weight class that a checkpoint's tensor of this name has."""
    return next((weight_class for pattern, weight_class in _CLASSES if re.search(pattern, name)), "exact")


def to_text(graph: Graph) -> str:
    """The graph's text; equal graphs give equal text."""
    proto = declare_weights(graph.to_onnx().graph)
    for node in proto.node:
        attributes = sorted(node.attribute, key=lambda a: a.name)
        del node.attribute[:]
        node.attribute.extend(attributes)
    lines = onnx.printer.to_text(proto).splitlines()
    # One declaration a line, so that dumps can be compared line by line.
    return (
        "\n".join(line.replace(", ", ",\n    ") if line.startswith("   <") else line.rstrip() for line in lines) + "\n"
    )


def header(info: GraphInfo) -> str:
    """The model's facts as comment lines before a graph's text, for `dsc opt` (the spec itself comes from a config.json)."""
    facts = {
        "model": info.model,
        "phase": info.phase,
        "layers": " ".join(map(str, info.layers)),
        "cache_dtype": info.cache_dtype,
        "block_tokens": info.block_tokens,
        "done": " ".join(info.done),
        "formats": " ".join(f"{name}={kind}" for name, kind in info.formats.items()),
        "mesh": f"tensor={info.mesh.tensor} expert={info.mesh.expert}",
    }
    return "".join(f"# {name}: {value}".rstrip() + "\n" for name, value in facts.items())


def read_header(text: str, info: GraphInfo) -> GraphInfo:
    """`info` with the facts that a text's header tells. DscError for one it cannot have."""
    facts: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        found = re.fullmatch(r"\s*# (\w+):\s*(.*)", line)
        if found is None:
            continue
        name, value = found.groups()
        if name not in _FACTS:
            where, wanted = f"line {number}", ", ".join(_FACTS)
            raise DscError(f"unknown fact {name}", where=where, wanted=wanted, try_=nearest(name, _FACTS))
        try:
            facts[name] = _FACTS[name](value)
        except (TypeError, ValueError) as error:
            raise DscError(f"{name} cannot be {value!r}", where=f"line {number}", got=str(error)) from error
    return replace(info, **facts)


def from_text(text: str, info: GraphInfo) -> Graph:
    """The graph of a text, with the facts of a model. Comment lines begin with `#`.

    What is declared, but neither an input nor made by a node, is a weight: a source tensor of its name.
    raises   DscError at the line of a syntax error, and for a tensor that nothing declares
    """
    body = "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#"))
    try:
        model = onnx.parser.parse_model(_HEADER + body)
    except onnx.parser.ParseError as error:
        raise DscError("this is not a graph", got=str(error.args[0].decode())) from error
    graph = Graph(model.graph.name, info)
    domains = graph.gs.import_domains
    graph.gs = gs.import_onnx(model)
    graph.gs.import_domains = domains
    _make_weights(graph.gs)
    for node in graph.gs.nodes:
        node.attrs.update({name: _shortest(value) for name, value in node.attrs.items()})
    return graph


def declare_weights(proto: onnx.GraphProto) -> onnx.GraphProto:
    """Turn initializers without data here into declarations, in place."""
    initializers = list(proto.initializer)
    del proto.initializer[:]
    for tensor in initializers:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            shape = part_shape(tensor)
            proto.value_info.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, shape))
        else:
            proto.initializer.append(tensor)
    return proto


def _make_weights(graph: gs.Graph) -> None:
    inputs = {tensor.name for tensor in graph.inputs}
    weights: dict[str, gs.Constant] = {}
    for node in graph.nodes:
        for index, tensor in enumerate(node.inputs):
            if isinstance(tensor, gs.Constant) or tensor.is_empty() or tensor.inputs or tensor.name in inputs:
                continue
            if tensor.dtype is None or not all(isinstance(size, int) for size in tensor.shape):
                raise DscError(
                    f"{tensor.name} is neither an input, nor a result, nor a weight",
                    where=str(node.name),
                    wanted=f'a declaration such as <float[8,4] "{tensor.name}">',
                    got=f"dtype {tensor.dtype}, shape {tensor.shape}",
                )
            if tensor.name not in weights:
                source = Source(tensor.name, dtype_of(tensor), tuple(tensor.shape))
                weights[tensor.name] = weight(tensor.name, source, class_of_name(tensor.name))
            node.inputs[index] = weights[tensor.name]


def _shortest(value: Any) -> Any:
    """The decimal that a float32 attribute was written as: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
