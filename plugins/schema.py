"""Schemas of plugin ops. Dimension letters are the check, the shape rule, the message and the manual at once.

A leaf: imports only the standard library and `formats`.

Letters: T tokens, B sequences, Q longest query, P blocks per sequence, R logit rows, N cache blocks, S context tokens to
expand. Other names are a node's own widths (D hidden, H heads, E experts, K top-k, F intermediate, V vocabulary, ...).
A dimension is an integer expression over letters and integer attributes, for example `H*(nope+rope)`; a name alone
binds on first sight, an expression is checked against what is bound.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import operator
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsc.plugins.formats import Format, parse_format

FLOATS = ("float32", "bfloat16")
F32 = ("float32",)
I32 = ("int32",)

Dim = int | str  # a fixed size, or a symbol of the step such as "T"
Attribute = int | float | str


@dataclass(frozen=True)
class Type:
    """Dtype (torch's names) and shape of one tensor; symbolic sizes are strings."""

    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Tensor:
    """One operand. `like` ties its dtype to another operand's (or to a string attribute holding a dtype's name)."""

    name: str
    dims: str
    dtypes: tuple[str, ...]
    optional: bool = False
    like: str = ""
    alias: str = ""  # outputs: the input whose memory this output is
    when: str = ""  # outputs: the optional attribute of the nodes that make it, "" for all nodes

    @property
    def slots(self) -> int:
        """How many consecutive node inputs the operand takes."""
        return 1


@dataclass(frozen=True)
class Weight(Tensor):
    """A quantizable weight [..., N, K]: takes two node inputs, `name` (data) and `name.scales` (absent if unquantized).

    The string attribute `{name}_format` gives its storage format; `dims` are the logical ones.
    """

    dtypes: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        return 2

    @property
    def format_attribute(self) -> str:
        return f"{self.name}_format"


@dataclass(frozen=True)
class Cost:
    """What a node must at least do: floating-point operations, and bytes read and written once each."""

    flop: float
    bytes: float


class SchemaError(ValueError):
    """A node that breaks its op's schema; the text names the op, the operand and both values."""


@dataclass(frozen=True)
class Op:
    """A plugin op: operands in order, attributes with their Python types (`int`, `float`, `str`), cost.

    Nodes have all of `attributes`, to which formats of weights are added by themselves, and may have those of `optional`, each
    with one of its values or of its type. Outputs that only nodes with an optional attribute make come last.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, type] = field(default_factory=dict)
    optional: Mapping[str, tuple[str, ...] | type] = field(default_factory=dict)
    cost: Callable[[Any], Cost] = lambda d: Cost(0, 0)
    doc: str = ""

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(t for t in self.inputs if isinstance(t, Weight))

    def attribute_types(self) -> dict[str, type]:
        """All attributes that every node of this op has, formats of weights included."""
        return {**self.attributes, **{w.format_attribute: str for w in self.weights}}

    def outputs_of(self, attributes: Mapping[str, Attribute]) -> tuple[Tensor, ...]:
        """The outputs of a node with these attributes."""
        return tuple(t for t in self.outputs if not t.when or t.when in attributes)

    def slot_names(self) -> list[str]:
        """Names of the node inputs in order: operand names, a weight's followed by `name.scales`."""
        names: list[str] = []
        for tensor in self.inputs:
            names.append(tensor.name)
            if isinstance(tensor, Weight):
                names.append(f"{tensor.name}.scales")
        return names

    def slot(self, name: str) -> int:
        """Index of a node input by its slot name."""
        return self.slot_names().index(name)

    def check(
        self, inputs: Sequence[Type | None], attributes: Mapping[str, Attribute]
    ) -> tuple[list[Type], dict[str, Dim]]:
        """Check a node and infer its outputs.

        inputs      one type per slot (see `slot_names`), None where absent; trailing absent slots may be missing
        returns     output types in order, and the value bound to each letter
        raises      SchemaError
        """
        self._check_attributes(attributes)
        bound: dict[str, Dim] = {k: v for k, v in attributes.items() if isinstance(v, int)}
        dtypes: dict[str, str] = {k: v for k, v in attributes.items() if isinstance(v, str)}
        names = self.slot_names()
        if len(inputs) > len(names):
            raise SchemaError(f"dsc.{self.name}: takes {len(names)} inputs, got {len(inputs)}")
        padded = [*inputs, *[None] * (len(names) - len(inputs))]
        at = 0
        for tensor in self.inputs:
            given = padded[at : at + tensor.slots]
            at += tensor.slots
            if given[0] is None:
                if not tensor.optional:
                    raise SchemaError(f"dsc.{self.name}: input {tensor.name} is missing")
                continue
            if isinstance(tensor, Weight):
                self._bind_weight(tensor, given, attributes, bound)
            else:
                self._bind(tensor, given[0], bound, dtypes)
        return [self._output(tensor, bound, dtypes) for tensor in self.outputs_of(attributes)], bound

    def _check_attributes(self, attributes: Mapping[str, Attribute]) -> None:
        types = self.attribute_types()
        for name, type_ in types.items():
            if name not in attributes:
                raise SchemaError(f"dsc.{self.name}: attribute {name} is missing")
            value = attributes[name]
            if not isinstance(value, type_):
                raise SchemaError(f"dsc.{self.name}: attribute {name} is {value!r}, wanted {type_.__name__}")
        for name, value in attributes.items():
            if name not in types and name not in self.optional:
                known = ", ".join([*types, *self.optional])
                raise SchemaError(f"dsc.{self.name}: unknown attribute {name}, known: {known}")
            wanted = self.optional.get(name, ())
            if isinstance(wanted, type):
                fits, text = isinstance(value, wanted), wanted.__name__
            else:
                fits, text = not wanted or value in wanted, " or ".join(wanted)
            if not fits:
                raise SchemaError(f"dsc.{self.name}: attribute {name} is {value!r}, wanted {text}")

    def _bind(self, tensor: Tensor, given: Type, bound: dict[str, Dim], dtypes: dict[str, str]) -> None:
        wanted = (dtypes[tensor.like],) if tensor.like in dtypes else tensor.dtypes
        if given.dtype not in wanted:
            raise SchemaError(f"dsc.{self.name}: {tensor.name} is {given.dtype}, wanted {' or '.join(wanted)}")
        dtypes[tensor.name] = given.dtype
        self._bind_dims(tensor.name, tensor.dims, given.shape, bound)

    def _bind_weight(
        self, tensor: Weight, given: Sequence[Type | None], attributes: Mapping[str, Attribute], bound: dict[str, Dim]
    ) -> None:
        data, scales = given
        assert data is not None, tensor.name
        format_: Format = parse_format(str(attributes[tensor.format_attribute]))
        shape = format_.logical_shape([int(d) for d in data.shape])
        self._bind_dims(tensor.name, tensor.dims, shape, bound)
        try:
            parts = format_.parts(shape)
        except ValueError as error:
            raise SchemaError(f"dsc.{self.name}: {tensor.name} cannot be {format_}: {error}") from error
        for part, got in (("data", data), ("scales", scales)):
            want = Type(*parts[part]) if part in parts else None
            if want != got:
                raise SchemaError(f"dsc.{self.name}: {part} of {tensor.name} as {format_} is {got}, wanted {want}")

    def _bind_dims(self, name: str, dims: str, shape: Sequence[Dim], bound: dict[str, Dim]) -> None:
        wanted = dims.split()
        if len(wanted) != len(shape):
            got = ", ".join(map(str, shape))
            raise SchemaError(
                f"dsc.{self.name}: {name} has {len(shape)} dimensions [{got}], wanted [{', '.join(wanted)}]"
            )
        for text, size in zip(wanted, shape, strict=True):
            if text.isidentifier() and text not in bound:
                bound[text] = size
                continue
            expected = evaluate_dim(text, bound)
            if expected != size:
                raise SchemaError(f"dsc.{self.name}: {text} is {expected} before and {size} in {name}")

    def _output(self, tensor: Tensor, bound: Mapping[str, Dim], dtypes: Mapping[str, str]) -> Type:
        dtype = dtypes[tensor.like] if tensor.like else tensor.dtypes[0]
        return Type(dtype, tuple(evaluate_dim(text, bound) for text in tensor.dims.split()))


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def evaluate_dim(text: str, bound: Mapping[str, Dim]) -> Dim:
    """Evaluate a dimension over bound letters. An expression with a symbolic letter stays text, with values put in."""
    return _evaluate(ast.parse(text, mode="eval").body, bound, text)


def _evaluate(node: ast.expr, bound: Mapping[str, Dim], text: str) -> Dim:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in bound:
            raise SchemaError(f"dimension {node.id} of {text} is not bound")
        return bound[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left, bound, text), _evaluate(node.right, bound, text)
        if isinstance(left, int) and isinstance(right, int):
            return int(_OPERATORS[type(node.op)](left, right))
        symbol = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}[type(node.op)]
        return f"{left}{symbol}{right}"
    raise SchemaError(f"not a dimension: {text}")


def folder_of(op_name: str) -> str:
    """Plugin folder of an op: MlaAttention -> mla_attention."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in op_name).lstrip("_")


@functools.cache
def load_op(op_name: str) -> Op:
    """The schema of a plugin op by its name, read from its folder; SchemaError with the nearest known op otherwise."""
    folders = plugin_folders()
    if folder_of(op_name) not in folders:
        close = difflib.get_close_matches(folder_of(op_name), folders, n=1)
        hint = f", nearest: {close[0]}" if close else ""
        raise SchemaError(f"dsc.{op_name}: no plugin folder {folder_of(op_name)}{hint}")
    op = importlib.import_module(f"dsc.plugins.{folder_of(op_name)}.op").OP
    assert isinstance(op, Op), op_name
    if op.name != op_name:
        raise SchemaError(f"dsc.{op_name}: no plugin op, nearest: {op.name}")
    return op


def plugin_folders() -> list[str]:
    """Names of all plugin folders, sorted."""
    package = importlib.import_module("dsc.plugins")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
