"""Strict reading of YAML mappings: every value keeps its line, every fault is collected, an unknown key gets the nearest known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from dsc.runtime.errors import DscError, DscErrors, nearest

Parse = Callable[[Any], Any]  # a YAML node to a value; ValueError("wanted|got") where it does not fit
MAX_LETTERS, MAX_DEPTH = 1_000_000, 20  # far more than any recipe has: what is read needs time and stack by these
_MISSING = object()
_OPENING = (
    yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken, yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken,
)  # fmt: skip
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)


def read_yaml(content: str, where: str) -> yaml.Node:
    """The document's root mapping. Anchors, tags and duplicate keys are refused: a recipe says each thing once, in place."""
    if len(content) > MAX_LETTERS:
        raise DscError("the file is too long", where=where, wanted=f"{MAX_LETTERS} letters", got=str(len(content)))
    depth = 0
    try:
        for token in yaml.scan(content, Loader=yaml.SafeLoader):
            depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
            if depth > MAX_DEPTH:
                raise DscError("the file nests too deeply", where=where, wanted=f"{MAX_DEPTH} levels at most")
            if isinstance(token, yaml.AnchorToken | yaml.AliasToken | yaml.TagToken):
                line = token.start_mark.line + 1
                raise DscError("anchors, aliases and tags are not read", where=f"{where}:{line}", wanted="plain values")
        root = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{where}:{mark.line + 1}" if mark else where
        got = getattr(error, "problem", None) or str(error)
        raise DscError("this is not YAML", where=at, got=got) from error
    if not isinstance(root, yaml.MappingNode):
        raise DscError("the file is not a mapping", where=where, wanted="key: value lines")
    return root


class Fields:
    """The keys of one mapping, taken one by one; faults are appended to a list shared by the whole file."""

    def __init__(self, node: Any, where: str, faults: list[DscError], path: str = "") -> None:
        self.where, self.faults, self.path = where, faults, path
        self.line = node.start_mark.line + 1
        self._known: list[str] = []
        self._nodes: dict[str, Any] = {}
        if not isinstance(node, yaml.MappingNode):
            self.fault(self.line, DscError(f"{path or 'the value'} is not a mapping", wanted="key: value"))
            return
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.fault(key.start_mark.line + 1, DscError("a key is a list or a mapping", wanted="a word"))
                continue
            if key.value in self._nodes:
                self.fault(key.start_mark.line + 1, DscError(f"{self._name(key.value)} is given twice"))
            self._nodes[str(key.value)] = value

    def keys(self) -> list[str]:
        return list(self._nodes)

    def fault(self, line: int, error: DscError) -> None:
        """Record a fault at a line of the file; several under one headline are recorded one by one."""
        if isinstance(error, DscErrors):
            for each in error.errors:
                self.fault(line, each)
            return
        at = f"{self.where}:{line}"
        self.faults.append(
            DscError(error.what, where=at, details=error.details, wanted=error.wanted, got=error.got, try_=error.try_)
        )

    def take(self, key: str, parse: Parse, default: Any = _MISSING) -> Any:
        """A value by key; None after recording a fault where it is missing or does not fit."""
        self._known.append(key)
        node = self._nodes.get(key)
        if node is None:
            if default is _MISSING:
                self.fault(self.line, DscError(f"{self._name(key)} is missing"))
                return None
            return default
        try:
            return parse(node)
        except ValueError as error:
            wanted, _, got = str(error).partition("|")
            self.fault(node.start_mark.line + 1, DscError(f"{self._name(key)} does not fit", wanted=wanted, got=got))
            return None

    def mapping(self, key: str, optional: bool = False) -> Fields | None:
        """A nested mapping; None where it is missing."""
        node = self.take(key, lambda node: node, default=None if optional else _MISSING)
        return None if node is None else Fields(node, self.where, self.faults, self._name(key))

    def finish(self) -> None:
        """Record every key that nobody took."""
        for key, node in self._nodes.items():
            if key not in self._known:
                close = nearest(key, self._known)
                error = DscError(f"unknown key {self._name(key)}", wanted=", ".join(self._known), try_=close)
                self.fault(node.start_mark.line + 1, error)

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _scalar(node: Any, tag: str, wanted: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag != f"tag:yaml.org,2002:{tag}":
        raise ValueError(f"{wanted}|{getattr(node, 'value', node)!s}")
    return str(node.value)


def text(node: Any) -> str:
    """A non-empty string."""
    value = _scalar(node, "str", "text")
    if not value:
        raise ValueError("text|an empty string")
    return value


def boolean(node: Any) -> bool:
    """true or false."""
    value = _scalar(node, "bool", "true or false")
    if value not in ("true", "false"):
        raise ValueError(f"true or false|{value}")
    return value == "true"


def integer(least: int) -> Parse:
    """A whole number of at least `least`."""

    def parse(node: Any) -> int:
        value = _scalar(node, "int", f"a whole number, {least} or more")
        if not value.isdecimal() or int(value) < least:
            raise ValueError(f"a whole number, {least} or more|{value}")
        return int(value)

    return parse


def number(node: Any) -> float:
    """A number above zero."""
    if isinstance(node, yaml.ScalarNode):
        try:
            value = float(node.value)
        except ValueError:
            value = 0.0
        if 0 < value < float("inf"):
            return value
    raise ValueError(f"a number above 0|{node.value}")


def choice(known: tuple[str, ...]) -> Parse:
    """One of several words."""

    def parse(node: Any) -> str:
        value = str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        if value not in known:
            close = nearest(value, known)
            raise ValueError(f"{', '.join(known)}|{value}" + (f" (nearest: {close})" if close else ""))
        return value

    return parse


def listing(node: Any) -> list[Any]:
    """A list's nodes."""
    if not isinstance(node, yaml.SequenceNode):
        raise ValueError(f"a list|{getattr(node, 'value', node)!s}")
    return list(node.value)


def integers(node: Any) -> tuple[int, ...]:
    """A list of whole numbers of at least 1."""
    return tuple(integer(1)(item) for item in listing(node))
