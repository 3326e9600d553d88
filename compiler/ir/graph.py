"""Graph: a thin layer over onnx-graphsurgeon that knows plugin ops, dtypes by torch's names, weights and one model's facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from dsc.compiler.ir.mesh import ONE_RANK, Mesh
from dsc.compiler.ir.weight import ONNX_DTYPES, Expression, WeightValues
from dsc.plugins.schema import Attribute, Dim, Op, SchemaError, Type, Weight, load_op
from dsc.runtime.shards import Cut
from dsc.runtime.spec import ModelSpec

OPSET = 23
IR_VERSION = 11
DOMAIN = "dsc"
_NAMES: dict[int, str] = {int(onnx_dtype): name for name, onnx_dtype in ONNX_DTYPES.items()}

# graphsurgeon warns on stdout about dtypes numpy lacks and an absent color module; what matters, `verify` tells.
G_LOGGER.severity = G_LOGGER.ERROR

Node: TypeAlias = gs.Node
Tensor: TypeAlias = gs.Variable | gs.Constant


@dataclass(frozen=True)
class GraphInfo:
    """What a pass may know besides the nodes: `expected` reads only this.

    model   "main", "mtp" or "sample"; phase "prefill", "decode" or "" (as imported)
    layers  decoder layer indices in this graph (main: 0..L-1; mtp: the MTP layer's index)
    bounds  largest value of each letter, for planning
    done    passes already run, in order
    formats kind of format by weight class, as the recipe chose them; {} before weights are stored in formats
    apart   layers whose q and kv_a fuse_qkv left two weights
    mesh    ranks that the graph is for; before the pass shard a graph is that of all of them
    """

    spec: ModelSpec
    model: str
    phase: str = ""
    layers: tuple[int, ...] = ()
    bounds: Mapping[str, int] = field(default_factory=dict)
    cache_dtype: str = "float32"
    block_tokens: int = 64
    done: tuple[str, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    apart: int = 0
    mesh: Mesh = ONE_RANK

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_moe_layers(self) -> int:
        return sum(self.spec.is_moe(layer) for layer in self.layers)

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_moe_layers


class Graph:
    """One graph of one model. `gs` is the onnx-graphsurgeon graph and may be edited directly.

    memory_plan is filled by the pass plan_memory: variable name -> byte offset in the arena.
    """

    def __init__(self, name: str, info: GraphInfo) -> None:
        self.gs = gs.Graph(name=name, opset=OPSET, ir_version=IR_VERSION)
        self.gs.import_domains = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
        self.info = info
        self.memory_plan: dict[str, int] = {}

    # -- look

    @property
    def name(self) -> str:
        return str(self.gs.name)

    @property
    def nodes(self) -> list[Node]:
        return list(self.gs.nodes)

    def find(self, op: str) -> list[Node]:
        """Nodes of an op in graph order; plugin ops are written `dsc.Name`."""
        return [node for node in self.gs.nodes if op_name(node) == op]

    def is_output(self, tensor: Tensor) -> bool:
        return any(tensor is output for output in self.gs.outputs)

    def input(self, name: str) -> gs.Variable:
        """A graph input by name."""
        for tensor in self.gs.inputs:
            if tensor.name == name:
                return tensor
        raise KeyError(f"{self.name}: no input {name}, there are {[t.name for t in self.gs.inputs]}")

    def weights(self) -> dict[str, gs.Constant]:
        """Every constant that holds a weight expression, by name, in order of first use."""
        found: dict[str, gs.Constant] = {}
        for node in self.gs.nodes:
            for tensor in node.inputs:
                if is_weight(tensor):
                    known = found.setdefault(tensor.name, tensor)
                    assert known._values.same(tensor._values), tensor.name
        return found

    # -- build

    def add_input(self, name: str, dtype: str, shape: Sequence[Dim]) -> gs.Variable:
        """A new graph input."""
        tensor = variable(name, Type(dtype, tuple(shape)))
        self.gs.inputs.append(tensor)
        return tensor

    def add_output(self, tensor: gs.Variable, name: str = "") -> gs.Variable:
        """Make a tensor a graph output, renamed if a name is given."""
        if name:
            tensor.name = name
        self.gs.outputs.append(tensor)
        return tensor

    def add(
        self, op: str, inputs: Sequence[Tensor], outputs: Sequence[gs.Variable], name: str, **attributes: Any
    ) -> Node:
        """A node of a standard op with given outputs."""
        node = gs.Node(op=op, name=name, inputs=list(inputs), outputs=list(outputs), attrs=attributes)
        self.gs.nodes.append(node)
        return node

    def plugin(
        self,
        op: str,
        inputs: Mapping[str, Tensor | None],
        attributes: Mapping[str, Attribute],
        name: str,
        outputs: Mapping[str, gs.Variable | str],
    ) -> Node:
        """A plugin node, checked against its schema.

        inputs   by slot name (`x`, `w`, `w.scales`); absent optional ones left out or None
        outputs  by operand name: a variable to take over (its producer is detached) or the name of a new one;
                 outputs left out exist under the name `{node}.{operand}`
        raises   SchemaError, which names the node; the graph is then as before
        """
        schema = load_op(op)
        slots: list[Tensor | None] = [None] * len(schema.slot_names())
        for slot, tensor in inputs.items():
            slots[schema.slot(slot)] = tensor
        for operand in reversed(schema.inputs):  # optional ones at the end are left out, a weight's slots are not
            if slots[-1] is not None or not operand.optional or isinstance(operand, Weight):
                break
            slots.pop()
        try:
            types, _ = schema.check([type_of(t) if t is not None else None for t in slots], attributes)
        except SchemaError as error:
            raise SchemaError(f"{name}: {error}") from error
        made = []
        for operand, type_ in zip(schema.outputs_of(attributes), types, strict=True):
            given = outputs.get(operand.name, f"{name}.{operand.name}")
            if isinstance(given, str):
                given = variable(given, type_)
            else:
                given.inputs.clear()
                set_type(given, type_)
            made.append(given)
        node = gs.Node(
            op=op,
            name=name,
            domain=DOMAIN,
            attrs=dict(attributes),
            inputs=[gs.Variable.empty() if t is None else t for t in slots],
            outputs=made,
        )
        self.gs.nodes.append(node)
        return node

    def remove(self, nodes: Iterable[Node]) -> None:
        """Detach nodes and drop them; outputs already taken over by another node are left alone."""
        gone = {id(node) for node in nodes}
        for node in self.gs.nodes:
            if id(node) in gone:
                node.inputs.clear()
                node.outputs.clear()
        self.gs.nodes = [node for node in self.gs.nodes if id(node) not in gone]

    def tidy(self) -> None:
        """Drop nodes that no graph output needs; then sort: nodes keep their order, save that a producer comes before
        its first reader. Graph inputs stay.

        graphsurgeon's own `toposort` recurses (a graph of 61 layers is too deep for it) and orders by depth, which
        spreads a layer over the list and lengthens lifetimes.
        """
        for tensor in self.gs.inputs:
            tensor.inputs.clear()
        needed = _order([node for tensor in self.gs.outputs for node in tensor.inputs])
        kept = {id(node) for node in needed}
        self.remove([node for node in self.gs.nodes if id(node) not in kept])
        self.gs.nodes = _order(self.gs.nodes)

    def copy(self, name: str, **info: Any) -> Graph:
        """An independent copy under another name, with some facts changed."""
        other = Graph(name, replace(self.info, **info))
        other.gs = self.gs.copy()
        other.gs.name = name
        other.memory_plan = dict(self.memory_plan)
        return other

    def to_onnx(self) -> onnx.ModelProto:
        """The model as ONNX; weights are external data at their placement."""
        model: onnx.ModelProto = gs.export_onnx(self.gs, do_type_check=False)
        return model


def _order(nodes: Iterable[Node]) -> list[Node]:
    """The nodes and all that they read, producers first, otherwise in the given order."""
    order: list[Node] = []
    state: dict[int, bool] = {}  # False: entered, True: placed
    for first in nodes:
        stack = [first]
        while stack:
            node = stack[-1]
            if id(node) in state:
                stack.pop()
                if not state[id(node)]:
                    state[id(node)] = True
                    order.append(node)
                continue
            state[id(node)] = False
            makers = [maker for tensor in node.inputs for maker in tensor.inputs]
            for maker in reversed(makers):
                assert state.get(id(maker), True), f"a cycle through {node.name} and {maker.name}"
                if id(maker) not in state:
                    stack.append(maker)
    return order


def op_name(node: Node) -> str:
    """`Add` for standard ops, `dsc.Linear` for plugin ops."""
    return f"{node.domain}.{node.op}" if node.domain else str(node.op)


def is_plugin(node: Node) -> bool:
    return bool(node.domain == DOMAIN)


def variable(name: str, type_: Type) -> gs.Variable:
    """A variable of a type."""
    return gs.Variable(name, dtype=ONNX_DTYPES[type_.dtype], shape=list(type_.shape))


def weight(name: str, expression: Expression, weight_class: str = "exact", cuts: tuple[Cut, ...] = ()) -> gs.Constant:
    """A constant whose values are a weight expression, or with `cuts` a rank's part of it."""
    return gs.Constant(name, WeightValues(name, expression, weight_class, cuts))


def constant(name: str, values: Any, dtype: str) -> gs.Constant:
    """A small constant held by value (shapes, axes, scalars)."""
    return gs.Constant(name, np.asarray(values, dtype=dtype))


def is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, gs.Constant) and isinstance(tensor._values, WeightValues)


def expression_of(tensor: Tensor) -> Expression:
    """The expression of a weight constant: all of it, also where a rank has a part."""
    assert is_weight(tensor), tensor.name
    expression: Expression = tensor._values.expression
    return expression


def weight_class_of(tensor: Tensor) -> str:
    """The class by which recipes choose the weight's format."""
    assert is_weight(tensor), tensor.name
    return str(tensor._values.weight_class)


def dtype_of(tensor: Tensor) -> str:
    """Dtype by torch's name."""
    dtype = tensor.dtype
    return _NAMES[dtype if isinstance(dtype, int) else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))]


def type_of(tensor: Tensor) -> Type | None:
    """Type of a tensor; None for an absent one."""
    if tensor.is_empty():
        return None
    return Type(dtype_of(tensor), tuple(tensor.shape))


def set_type(tensor: gs.Variable, type_: Type) -> None:
    tensor.dtype, tensor.shape = ONNX_DTYPES[type_.dtype], list(type_.shape)


def schema_of(node: Node) -> Op:
    """The schema of a plugin node."""
    return load_op(str(node.op))


def operand(node: Node, slot: str) -> Tensor | None:
    """An input of a plugin node by slot name; None where absent."""
    at = schema_of(node).slot(slot)
    if at >= len(node.inputs) or node.inputs[at].is_empty():
        return None
    return node.inputs[at]


def operands(node: Node) -> Iterator[tuple[str, Tensor]]:
    """Present inputs of a plugin node with their slot names."""
    for slot, tensor in zip(schema_of(node).slot_names(), node.inputs, strict=False):
        if not tensor.is_empty():
            yield slot, tensor
