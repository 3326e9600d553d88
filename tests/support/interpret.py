"""Runs a graph at any stage of the passes, node by node: standard ops in onnxruntime, plugin ops by their references.

    outputs = interpret(graph, read_tensors(folder), one_sequence(graph, tokens))

Slow and plain. What a pass does to a graph's meaning shows here without an executor, an engine or a cpu.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import torch
from torch import Tensor

from dsc.compiler.ir.graph import IR_VERSION, OPSET, Graph, Node, expression_of, is_plugin, is_weight, schema_of
from dsc.plugins.formats import parse_format
from dsc.plugins.schema import Weight, folder_of
from dsc.plugins.stored import StoredWeight
from dsc.runtime.shards import Place, take
from support.oracle import evaluate


def one_sequence(graph: Graph, tokens: Sequence[int], **more: Tensor) -> dict[str, Tensor]:
    """The inputs of one step that runs a whole sequence, its cache blocks in reverse order; logits of every token."""
    count, block = len(tokens), graph.info.block_tokens
    blocks = -(-count // block)
    table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)
    at = torch.arange(count, dtype=torch.int32)
    inputs = {
        "tokens": torch.tensor(list(tokens), dtype=torch.int32),
        "positions": at,
        "logit_rows": at,
        "slots": table[(at // block).long()] * block + at % block,
        "query_starts": torch.tensor([0, count], dtype=torch.int32),
        "sequence_lengths": torch.tensor([count], dtype=torch.int32),
        "block_table": table[None],
        **more,
    }
    for tensor in graph.gs.inputs:
        if tensor.name.startswith("cache."):
            inputs[tensor.name] = torch.zeros(blocks, tensor.shape[1], dtype=torch.uint8)
    return inputs


def interpret(
    graph: Graph, stored: Mapping[str, Tensor], inputs: Mapping[str, Tensor], place: Place | None = None
) -> dict[str, Tensor]:
    """The graph's outputs by name. `stored` has the checkpoint's tensors, `inputs` a value for every graph input.

    place  whose parts of weights a graph of several ranks reads
    """
    values: dict[str, Tensor] = dict(inputs)

    def value(tensor: gs.Variable | gs.Constant) -> Tensor:
        if is_weight(tensor) and tensor.name not in values:
            whole, cuts = evaluate(expression_of(tensor), stored), tensor._values.cuts
            assert not cuts or place is not None, tensor.name
            values[tensor.name] = whole if place is None else take(whole, cuts, place)
        elif isinstance(tensor, gs.Constant) and not is_weight(tensor):
            return torch.from_numpy(np.asarray(tensor.values).copy())
        return values[tensor.name]

    for node in graph.nodes:
        given = [None if tensor.is_empty() else value(tensor) for tensor in node.inputs]
        made = _plugin(node, given) if is_plugin(node) else _standard(node, given)
        for tensor, result in zip(node.outputs, made, strict=True):
            values[tensor.name] = result
    return {tensor.name: values[tensor.name] for tensor in graph.gs.outputs}


def _plugin(node: Node, given: list[Tensor | None]) -> Sequence[Tensor]:
    schema = schema_of(node)
    slots = dict(zip(schema.slot_names(), [*given, *[None] * len(schema.slot_names())], strict=False))
    operands: dict[str, Any] = {tensor.name: slots[tensor.name] for tensor in schema.inputs}
    for weight in schema.inputs:
        data = slots[weight.name]
        if isinstance(weight, Weight) and data is not None:
            format_ = parse_format(str(node.attrs[weight.format_attribute]))
            operands[weight.name] = StoredWeight(format_, data, slots[f"{weight.name}.scales"])
    attributes = {name: node.attrs[name] for name in schema.attributes}
    module = importlib.import_module(f"dsc.plugins.{folder_of(schema.name)}.reference")
    return module.reference(**operands, **attributes)


def _standard(node: Node, given: list[Tensor | None]) -> list[Tensor]:
    """One node as a model of its own."""
    names = ["" if value is None else f"i{i}" for i, value in enumerate(given)]
    results = [f"o{i}" for i in range(len(node.outputs))]
    proto = onnx.helper.make_node(node.op, names, results, **node.attrs)
    feeds = {name: value.numpy() for name, value in zip(names, given, strict=True) if value is not None}
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in results]
    graph = onnx.helper.make_graph([proto], "node", inputs, outputs)
    model = onnx.helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
    return [torch.from_numpy(array) for array in _session(model.SerializeToString()).run(None, feeds)]


@cache
def _session(model: bytes) -> onnxruntime.InferenceSession:
    """One session for all nodes alike: names are none of its business."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
