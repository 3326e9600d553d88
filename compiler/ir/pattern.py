"""Declarative patterns over graphs; `dsc.compiler.ir.match` matches them.

    gate, up = Any("gate"), Any("up")
    PATTERN = P("Mul", P("Mul", gate, P("Sigmoid", gate)), up)

Operand order is strict. One name, and one pattern object, stand for one tensor throughout a pattern. Values inside a
match have no reader outside it. Attributes that a pattern does not mention must have ONNX's default, so that a pattern
never takes a node that means something else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any as Value

import numpy as np

LONG_PATTERN = 80  # characters


class Pattern:
    """Base of all patterns. Patterns are compared by identity: the same object twice means the same tensor twice."""


class Any(Pattern):
    """Any tensor, bound to a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


class W(Any):
    """A weight constant, bound to a name; with `rank`, of that many dimensions."""

    def __init__(self, name: str, rank: int | None = None) -> None:
        super().__init__(name)
        self.rank = rank


class _Free:
    """The type of ANY."""

    def __repr__(self) -> str:
        return "any"


ANY = _Free()  # an attribute or a constant of any value


class C(Pattern):
    """A small constant by value (a number also matches one of shape [1]); C(ANY, "axes") binds one of any value."""

    def __init__(self, value: Value, name: str = "") -> None:
        self.value, self.name = value, name

    def __str__(self) -> str:
        return self.name or str(self.value)

    def accepts(self, values: np.ndarray) -> bool:
        """Whether a constant's values are the wanted ones, at the constant's own precision."""
        if self.value is ANY:
            return True
        wanted = np.asarray(self.value).astype(values.dtype)
        return bool(
            values.size == wanted.size
            and values.ndim <= max(wanted.ndim, 1)
            and (values.ravel() == wanted.ravel()).all()
        )


@dataclass(frozen=True)
class OneOf:
    """Allowed values of an attribute."""

    values: tuple[Value, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.values))


class P(Pattern):
    """A node: its op (`Add`, `dsc.Linear`), one pattern per operand, and its attributes by value, OneOf(...) or ANY.

    name    binds the node's first output
    shared  the node's outputs may have readers outside the match, and be graph outputs
    p[i]    output i of a node with several; plain `p` is output 0
    """

    def __init__(self, op: str, *inputs: Pattern, name: str = "", shared: bool = False, **attributes: Value) -> None:
        self.op, self.inputs, self.name, self.shared, self.attributes = op, inputs, name, shared, attributes

    def __getitem__(self, index: int) -> Output:
        return Output(self, index)

    def brief(self) -> str:
        """The pattern as text; a long one without what lies behind its operands."""
        text = str(self)
        if len(text) <= LONG_PATTERN:
            return text
        inputs = (re.sub(r"\(.*\)", "(...)", str(item)) for item in self.inputs)
        return f"{self.op}({', '.join(inputs)})"

    def __str__(self) -> str:
        attributes = ", ".join(f"{key}={value}" for key, value in self.attributes.items() if value is not ANY)
        return f"{self.op}{f'<{attributes}>' if attributes else ''}({', '.join(map(str, self.inputs))})"


class Output(Pattern):
    """One output of a node with several, made by `p[i]`."""

    def __init__(self, node: P, index: int) -> None:
        self.node, self.index = node, index

    def __str__(self) -> str:
        return f"{self.node}[{self.index}]"


class Either(Pattern):
    """The first of several patterns that matches; otherwise the faults of the nearest."""

    def __init__(self, *options: Pattern) -> None:
        self.options = options

    def __str__(self) -> str:
        return " or ".join(map(str, self.options))


def size(pattern: Pattern) -> tuple[int, int]:
    """Number of nodes and of constants in a pattern; of alternatives, those of the smallest."""
    return _size(pattern, set())


def _size(pattern: Pattern, seen: set[Pattern]) -> tuple[int, int]:
    if pattern in seen:
        return 0, 0
    seen.add(pattern)
    if isinstance(pattern, Output):
        return _size(pattern.node, seen)
    if isinstance(pattern, Either):
        return min(_size(option, set(seen)) for option in pattern.options)
    if isinstance(pattern, P):
        sizes = [_size(item, seen) for item in pattern.inputs]
        return 1 + sum(nodes for nodes, _ in sizes), sum(constants for _, constants in sizes)
    return 0, int(isinstance(pattern, (W, C)))
