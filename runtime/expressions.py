"""Integer expressions over the letters of a step: sizes, grids and kernel arguments, evaluated when a program is bound.

    sum     := product (("+" | "-") product)*
    product := atom (("*" | "//") atom)*
    atom    := integer | letter | SMS | "(" sum ")" | "-" atom | (ceil_div | min | max) "(" sum "," sum ")"

Integers are exact; `//` rounds down, ceil_div up. A guard is comparisons joined by `and`: `T <= 64 and B < 8`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

LETTERS = {
    "T": "tokens in the step",
    "B": "sequences",
    "B1": "sequences + 1",
    "Q": "longest query",
    "P": "blocks per sequence",
    "R": "logit rows",
    "N": "cache blocks",
    "S": "context tokens to expand",
    "G": "tokens over all ranks",
}
DEVICE_CONSTANTS = {"SMS": "streaming multiprocessors of the device"}
LOOP_LETTERS = ("I", "J")  # counters of `repeat` steps
MAX_LENGTH, MAX_DEPTH = 400, 20  # characters, and brackets in brackets: a damaged file cannot exhaust the stack

_FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "ceil_div": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
}
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_TOKEN = re.compile(r"[ ]*([0-9]+|[A-Za-z_][A-Za-z_0-9]*|//|[-+*(),])", re.ASCII)
_COMPARE = re.compile("(<=|>=|==|<|>)")


class ExpressionError(ValueError):
    """Text that is no expression, a letter without a value, or a division by zero; the message quotes the expression."""


# A parsed expression: an integer, a name, or (operator or function, left, right).
Tree = int | str | tuple[str, "Tree", "Tree"]


@dataclass(frozen=True)
class Expression:
    """A parsed expression; `str()` gives the text it was read from."""

    text: str
    tree: Tree

    def __str__(self) -> str:
        return self.text

    def names(self) -> set[str]:
        """Letters, counters and device constants the expression reads."""
        return _names(self.tree)

    def grows(self) -> bool:
        """Whether more of any letter never makes the value smaller: the sizes that one memory plan can serve."""
        return _grows(self.tree)

    def evaluate(self, values: Mapping[str, int]) -> int:
        """The value under `values`; raises ExpressionError on a missing name or a division by zero."""
        try:
            return _evaluate(self.tree, values)
        except KeyError as error:
            raise ExpressionError(f"{self.text}: {error.args[0]} has no value") from None
        except ZeroDivisionError:
            raise ExpressionError(f"{self.text}: division by zero at {_shown(values, self.names())}") from None


@dataclass(frozen=True)
class Guard:
    """When a variant applies: all comparisons hold; none means always."""

    text: str
    comparisons: tuple[tuple[Expression, str, Expression], ...]

    def names(self) -> set[str]:
        """Letters and constants the guard reads."""
        return {name for left, _, right in self.comparisons for name in left.names() | right.names()}

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether the guard holds under `values`."""
        return all(
            _COMPARISONS[sign](left.evaluate(values), right.evaluate(values)) for left, sign, right in self.comparisons
        )


@cache
def parse(text: str) -> Expression:
    """Text -> Expression; raises ExpressionError."""
    return Expression(text, _Parser(text).parse())


@cache
def parse_guard(text: str) -> Guard:
    """Text -> Guard; "" always holds. Raises ExpressionError."""
    comparisons = []
    for part in text.split(" and ") if text else []:
        pieces = _COMPARE.split(part)
        if len(pieces) != 3:
            raise ExpressionError(f"{text!r} is no guard: wanted one comparison in {part!r}")
        comparisons.append((parse(pieces[0].strip()), pieces[1], parse(pieces[2].strip())))
    return Guard(text, tuple(comparisons))


def evaluate(size: int | str, values: Mapping[str, int]) -> int:
    """The value of a size: an integer, or the text of an expression."""
    return size if isinstance(size, int) else parse(size).evaluate(values)


def names_of(size: int | str) -> set[str]:
    """Letters a size reads."""
    return set() if isinstance(size, int) else parse(size).names()


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._tokenize(text)
        self.at = self.depth = 0

    def _tokenize(self, text: str) -> list[str]:
        if len(text) > MAX_LENGTH:
            raise ExpressionError(f"an expression of {len(text)} characters, at most {MAX_LENGTH} are read")
        tokens, at, end = [], 0, len(text.rstrip(" "))
        while at < end:
            match = _TOKEN.match(text, at, end)
            if match is None:
                raise ExpressionError(f"{text!r} is no expression: unexpected {text[at:].strip()[:1]!r}")
            tokens.append(match[1])
            at = match.end()
        return tokens

    def parse(self) -> Tree:
        tree = self._sum()
        if self._peek():
            raise self._unexpected("an operator")
        return tree

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self, wanted: str) -> None:
        if self._peek() != wanted:
            raise self._unexpected(wanted)
        self.at += 1

    def _unexpected(self, wanted: str) -> ExpressionError:
        got = repr(self._peek()) if self._peek() else "the end"
        return ExpressionError(f"{self.text!r} is no expression: wanted {wanted}, got {got}")

    def _chain(self, signs: tuple[str, str], part: Callable[[], Tree]) -> Tree:
        tree = part()
        while self._peek() in signs:
            sign = self._peek()
            self.at += 1
            tree = (sign, tree, part())
        return tree

    def _sum(self) -> Tree:
        return self._chain(("+", "-"), self._product)

    def _product(self) -> Tree:
        return self._chain(("*", "//"), self._atom)

    def _atom(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ExpressionError(f"{self.text!r} is nested deeper than {MAX_DEPTH}")
        tree = self._inner()
        self.depth -= 1
        return tree

    def _inner(self) -> Tree:
        token = self._peek()
        if token == "-":
            self.at += 1
            return ("-", 0, self._atom())
        if token == "(":
            self.at += 1
            tree = self._sum()
            self._take(")")
            return tree
        if not token or not (token[0].isalnum() or token[0] == "_"):
            raise self._unexpected("a number or a letter")
        self.at += 1
        if token[0].isdigit():
            return int(token)
        if token in _FUNCTIONS:
            self._take("(")
            left = self._sum()
            self._take(",")
            right = self._sum()
            self._take(")")
            return (token, left, right)
        if token not in LETTERS and token not in DEVICE_CONSTANTS and token not in LOOP_LETTERS:
            known = ", ".join([*LETTERS, *LOOP_LETTERS, *DEVICE_CONSTANTS])
            raise ExpressionError(f"{self.text!r}: unknown letter {token}, known: {known}")
        return token


def _evaluate(tree: Tree, values: Mapping[str, int]) -> int:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return values[tree]
    function = _OPERATORS.get(tree[0]) or _FUNCTIONS[tree[0]]
    return function(_evaluate(tree[1], values), _evaluate(tree[2], values))


def _names(tree: Tree) -> set[str]:
    if isinstance(tree, int):
        return set()
    return {tree} if isinstance(tree, str) else _names(tree[1]) | _names(tree[2])


def _grows(tree: Tree) -> bool:
    """Letters are counts, so only subtracting or dividing by one can shrink a value (and a negative factor)."""
    if not isinstance(tree, tuple):
        return True
    function, left, right = tree
    if function in ("-", "//", "ceil_div"):
        return _grows(left) and isinstance(right, int) and (function == "-" or right > 0)
    if function == "*":
        return all(_grows(part) and not _subtracts(part) for part in (left, right))
    return _grows(left) and _grows(right)


def _subtracts(tree: Tree) -> bool:
    return isinstance(tree, tuple) and (tree[0] == "-" or _subtracts(tree[1]) or _subtracts(tree[2]))


def _shown(values: Mapping[str, int], names: set[str]) -> str:
    return ", ".join(f"{name} = {values[name]}" for name in sorted(names) if name in values) or "any step"
