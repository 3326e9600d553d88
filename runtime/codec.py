"""Strict JSON for frozen dataclasses: a missing, unknown or mistyped key is a fault that names its place in the file.

A field with a default may be absent and is left out when it has it. Classes that stand in a union name themselves by a
class attribute `kind`. The file's faults are told all at once.
"""

from __future__ import annotations

import json
import math
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dsc.runtime.errors import DscError, nearest, raise_all

T = TypeVar("T")
_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "an object"}


def encode(value: Any) -> Any:
    """A dataclass, or lists and dicts of them, as JSON data."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        data = {f.name: encode(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != _default(f)}
        return {**kind, **data}
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def dump_json(data: Any) -> bytes:
    """JSON text whose bytes depend on the data alone."""
    text = json.dumps(data, sort_keys=True, indent=1, separators=(",", ": "), ensure_ascii=True, allow_nan=False)
    return (text + "\n").encode("ascii")


def read_json(path: Path, where: str) -> Any:
    """Parse a file; raises DscError naming `where` for a missing file, bad JSON, NaN or a key that stands twice."""
    try:
        content = path.read_bytes()
        return json.loads(content, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except OSError as error:
        raise DscError("cannot be read", where=where, got=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise DscError("is not valid JSON", where=where, got=str(error)) from error


def decode(type_: type[T], data: Any, where: str) -> T:
    """JSON data -> an instance of a dataclass; raises DscError with every fault, each naming `where` and its path."""
    decoder = _Decoder(where)
    value = decoder.decode(type_, data, "")
    raise_all(f"{where}: cannot be read", decoder.faults)
    return value  # type: ignore[no-any-return]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice in one object")
        found[key] = value
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number that can be kept")


def _finite(text: str) -> float:
    """Python reads 1e999 as infinity, which cannot be written again."""
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


@cache
def _hints(type_: type) -> dict[str, Any]:
    return get_type_hints(type_)


class _Decoder:
    """Walks data and types together, collecting faults; a value with a fault below it is None."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.faults: list[DscError] = []

    def fault(self, path: str, what: str, wanted: str = "", got: str = "", try_: str = "") -> None:
        self.faults.append(
            DscError(f"{path or 'the file'} {what}", where=self.where, wanted=wanted, got=got, try_=try_)
        )

    def mistyped(self, path: str, wanted: str, data: Any) -> None:
        shown = json.dumps(data)
        self.fault(path, "is of the wrong kind", wanted, shown if len(shown) <= 80 else shown[:77] + "...")

    def decode(self, type_: Any, data: Any, path: str) -> Any:
        origin = get_origin(type_)
        if type_ is Any:
            return data
        if is_dataclass(type_):
            return self.object(type_, data, path)
        if origin is Literal:
            return self.literal(get_args(type_), data, path)
        if origin in (Union, types.UnionType):
            return self.union(get_args(type_), data, path)
        if origin is tuple:
            return self.sequence(get_args(type_), data, path)
        if origin is dict:
            return self.mapping(get_args(type_)[1], data, path)
        return self.scalar(type_, data, path)

    def literal(self, options: tuple[Any, ...], data: Any, path: str) -> Any:
        if type(data) is type(options[0]) and data in options:
            return data
        return self.mistyped(path, " or ".join(map(str, options)), data)

    def scalar(self, type_: type, data: Any, path: str) -> Any:
        if type_ is float and isinstance(data, int | float) and not isinstance(data, bool):
            return float(data) if abs(data) < 1e300 and math.isfinite(data) else self.mistyped(path, "a number", data)
        if type(data) is type_:
            return data
        return self.mistyped(path, _NAMES.get(type_, "null"), data)

    def sequence(self, items: tuple[Any, ...], data: Any, path: str) -> Any:
        if not isinstance(data, list):
            return self.mistyped(path, "a list", data)
        if items[-1] is Ellipsis:
            return tuple(self.decode(items[0], item, f"{path}[{i}]") for i, item in enumerate(data))
        if len(items) != len(data):
            return self.mistyped(path, f"a list of {len(items)}", data)
        return tuple(self.decode(t, item, f"{path}[{i}]") for i, (t, item) in enumerate(zip(items, data, strict=True)))

    def mapping(self, item_type: Any, data: Any, path: str) -> Any:
        if not isinstance(data, dict):
            return self.mistyped(path, "an object", data)
        return {key: self.decode(item_type, item, f"{path}[{key!r}]") for key, item in data.items()}

    def union(self, options: tuple[Any, ...], data: Any, path: str) -> Any:
        if data is None and type(None) in options:
            return None
        options = tuple(option for option in options if option is not type(None))
        tagged = {option.kind: option for option in options if is_dataclass(option) and hasattr(option, "kind")}
        if tagged:
            kind = data.get("kind") if isinstance(data, dict) else None
            if not isinstance(kind, str) or kind not in tagged:
                return self.mistyped(path, f"an object whose kind is {' or '.join(tagged)}", data)
            return self.object(tagged[kind], data, path)
        if len(options) == 1:
            return self.decode(options[0], data, path)
        if type(data) in options:
            return data
        return self.mistyped(path, " or ".join(_NAMES[option] for option in options), data)

    def object(self, type_: Any, data: Any, path: str) -> Any:
        if not isinstance(data, dict):
            return self.mistyped(path, "an object", data)
        if hasattr(type_, "kind") and data.get("kind") == type_.kind:
            data = {key: value for key, value in data.items() if key != "kind"}
        known = {field.name: field for field in fields(type_)}
        before, dot = len(self.faults), f"{path}." if path else ""
        for key in sorted(data.keys() - known.keys()):
            self.fault(f"{dot}{key}", "is unknown", try_=nearest(key, known))
        values = {}
        for name, field in known.items():
            if name in data:
                values[name] = self.decode(_hints(type_)[name], data[name], f"{dot}{name}")
            elif _default(field) is MISSING:
                self.fault(f"{dot}{name}", "is missing")
        return type_(**values) if len(self.faults) == before else None
