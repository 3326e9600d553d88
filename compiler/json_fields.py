"""Strict reading of a JSON object: every value is asked for by key and kind, every fault is collected as one line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dsc.runtime.errors import DscError, nearest

T = TypeVar("T")
REQUIRED: Any = object()


class JsonFields:
    """The keys of one JSON object. A value that does not fit becomes a fault and reads as None, so reading goes on.

    faults  shared by all objects of the file; one DscError of one line each
    """

    def __init__(self, data: Mapping[str, Any], where: str, faults: list[DscError], path: str = "") -> None:
        self._data, self._where, self.path = data, where, path
        self.faults = faults
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._data.get(key) is not None

    def fault(self, sentence: str) -> None:
        """Record one fault of this file."""
        self.faults.append(DscError(sentence, where=self._where))

    def equals(self, key: str, value: Any, meaning: str) -> None:
        """A redundant key: absent, or what other keys make it (None: they have a fault of their own)."""
        found = self.raw(key)
        if found is not None and value is not None and (type(found) is bool or found != value):
            self.fault(f"{self.name(key)} {show(found)} contradicts {meaning} {show(value)}")

    def keys(self) -> list[str]:
        """The keys that are there, null or not."""
        return list(self._data)

    def has_key(self, key: str) -> bool:
        """Whether the key is there, null or not."""
        return key in self._data

    def raw(self, key: str) -> Any:
        """A value of any kind, None where absent."""
        self._asked.add(key)
        return self._data.get(key)

    def integer(self, key: str, default: Any = REQUIRED, least: int = 1) -> Any:
        """A whole number of at least `least`; `default` where the key is absent or null."""
        wanted = f"a whole number, {least} or more"
        return self._take(key, default, wanted, lambda v: type(v) is int and v >= least)

    def number(self, key: str, default: Any = REQUIRED, least: float = 0.0, above: bool = True) -> Any:
        """A finite number above `least` (or `least` itself too, with above=False)."""

        def fits(value: Any) -> bool:
            finite = type(value) in (int, float) and math.isfinite(value)
            return finite and (value > least if above else value >= least)

        value = self._take(key, default, f"a number {'above' if above else 'of at least'} {least:g}", fits)
        return float(value) if type(value) is int else value

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        """true or false."""
        return self._take(key, default, "true or false", lambda v: type(v) is bool)

    def choice(self, key: str, known: Sequence[Any], default: Any = REQUIRED) -> Any:
        """One of the known values; the nearest is named where a word is unknown."""
        wanted = " or ".join(show(value) for value in known)
        return self._take(key, default, wanted, lambda v: any(type(v) is type(k) and v == k for k in known), known)

    def object(self, key: str) -> JsonFields | None:
        """A nested object, None where it is absent or null."""
        value = self._take(key, None, "an object", lambda v: isinstance(v, dict))
        return None if value is None else JsonFields(value, self._where, self.faults, self.name(key))

    def alias(self, key: str, other: str) -> str:
        """Of two spellings of one key the one that is there; both with different values are a fault."""
        self._asked |= {key, other}
        if key in self and other in self and self._data[key] != self._data[other]:
            first, second = (f"{self.name(k)} {show(self._data[k])}" for k in (key, other))
            self.fault(f"{first} contradicts {second}")
        return other if other in self and key not in self else key

    def unknown(self, ignorable: Iterable[str]) -> None:
        """Record every key that was not asked for, is not ignorable and says something (null and false say nothing)."""
        ignorable = set(ignorable)
        for key, value in self._data.items():
            if key in self._asked or key in ignorable or key.startswith("_") or value in (None, False, [], {}):
                continue
            close = nearest(key, [*self._asked, *ignorable])
            hint = f", nearest known {close}" if close else ""
            self.fault(f"unknown key {self.name(key)} = {show(value)}{hint}; remove it if it changes nothing")

    def name(self, key: str) -> str:
        """The key with the path to its object."""
        return f"{self.path}.{key}" if self.path else key

    def _take(self, key: str, default: Any, wanted: str, fits: Any, known: Sequence[Any] = ()) -> Any:
        self._asked.add(key)
        value = self._data.get(key)
        if value is None and default is not REQUIRED:
            return default
        if value is None:
            state = "null" if key in self._data else "missing"
            self.fault(f"{self.name(key)} is {state}, wanted {wanted}")
            return None
        if fits(value):
            return value
        words = [word for word in known if isinstance(word, str)]
        close = nearest(value, words) if isinstance(value, str) and len(words) > 1 else ""
        hint = f", nearest {show(close)}" if close else ""
        self.fault(f"{self.name(key)} is {show(value)}, wanted {wanted}{hint}")
        return None


def show(value: Any) -> str:
    """A value as JSON, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
