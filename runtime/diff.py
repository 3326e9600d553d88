"""`dsc diff`: what two engines have in common and what not, from their folders alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsc.plugins.formats import parse_format
from dsc.plugins.stored import StoredWeight
from dsc.runtime import certificate
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import TensorEntry

PIECE_ELEMENTS = 1 << 22
ABSENT = "-"  # a value that one of the two does not have
# Facts of a certificate that are compared.
MEASURED = (
    "end_to_end.kl",
    "end_to_end.top1",
    "end_to_end.nats",
    "end_to_end.worst_kl",
    "end_to_end.non_finite",
    "stored.saturated",
    "mtp.engine",
    "mtp.reference",
    "text.name",
    "device",
)


def diff(a: EngineFolder, b: EngineFolder) -> dict[str, Any]:
    """Differences as a JSON object; every list is empty where two engines are the same.

    same         whether their content hashes are equal; what is in local/ is not part of that
    spec, recipe, toolchain   [{key, a, b}] for every value that differs, "-" where one has none
    fusion       [{pass, graph, a, b}]: found sites of passes that did not find as many
    tensors      [{weight, a, b, ...}] for every weight that is not the same: its formats and stored bytes; where both have
                 its shape, `largest`, `relative` and `at`: the largest change, the error over the values of `a`, where
    kernels      [{kernel, a, b}]: sha256 of kernels that differ, of their first 16 digits
    files        names of all other files that differ
    certificate  [{key, a, b}]; engines without one have "-"
    """
    programs = {name for folder in (a, b) for name in folder.manifest.files if name.startswith("kernels/")}
    return {
        "a": {"path": str(a.path), "content_hash": a.content_hash},
        "b": {"path": str(b.path), "content_hash": b.content_hash},
        "same": a.content_hash == b.content_hash,
        "spec": _values(a.spec.to_json(), b.spec.to_json()),
        "recipe": _values(a.manifest.recipe, b.manifest.recipe),
        "toolchain": _values(a.manifest.toolchain, b.manifest.toolchain),
        "fusion": _fusion(a, b),
        "tensors": list(_tensors(a, b)),
        "kernels": [
            {"kernel": name, "a": _sha(a, name), "b": _sha(b, name)}
            for name in sorted(programs)
            if _sha(a, name) != _sha(b, name)
        ],
        "files": _files(a, b),
        "certificate": _certificates(a, b),
    }


def _values(a: Any, b: Any, path: str = "") -> list[dict[str, Any]]:
    """Every leaf of two JSON values that is not the same."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = [*a, *(key for key in b if key not in a)]
        dot = f"{path}." if path else ""
        return [found for key in keys for found in _values(a.get(key, ABSENT), b.get(key, ABSENT), f"{dot}{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        longest = range(max(len(a), len(b)))
        pairs = [(a[i] if i < len(a) else ABSENT, b[i] if i < len(b) else ABSENT) for i in longest]
        return [found for i, pair in enumerate(pairs) for found in _values(*pair, f"{path}[{i}]")]
    return [] if a == b else [{"key": path, "a": a, "b": b}]


def _fusion(a: EngineFolder, b: EngineFolder) -> list[dict[str, Any]]:
    found = [
        {(entry["name"], run["graph"]): run["found"] for entry in folder.report["passes"] for run in entry["graphs"]}
        for folder in (a, b)
    ]
    keys = dict.fromkeys((*found[0], *found[1]))
    rows = [{"pass": key[0], "graph": key[1], "a": found[0].get(key), "b": found[1].get(key)} for key in keys]
    return [row for row in rows if row["a"] != row["b"]]


def _files(a: EngineFolder, b: EngineFolder) -> list[str]:
    names = {name for folder in (a, b) for name in folder.manifest.files}
    other = sorted(name for name in names if not name.startswith(("kernels/", "weights/")))
    return [name for name in other if _sha(a, name) != _sha(b, name)]


def _sha(folder: EngineFolder, name: str) -> str:
    entry = folder.manifest.files.get(name)
    return entry.sha256[:16] if entry else ABSENT


def _certificates(a: EngineFolder, b: EngineFolder) -> list[dict[str, Any]]:
    facts = [_measured(folder) for folder in (a, b)]
    return [{"key": key, "a": facts[0][key], "b": facts[1][key]} for key in MEASURED if facts[0][key] != facts[1][key]]


def _measured(folder: EngineFolder) -> dict[str, Any]:
    found = certificate.read(folder)
    data: Any = found.to_json() if found else {}
    values = {}
    for key in MEASURED:
        value = data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        values[key] = ABSENT if value is None else value
    return values


# -- weights


def _tensors(a: EngineFolder, b: EngineFolder) -> Iterator[dict[str, Any]]:
    ours, theirs = weights_of(a), weights_of(b)
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if one is not None and other is not None and one.same_bytes(other):
            continue
        row: dict[str, Any] = {
            "weight": name,
            "a": one.entry.format if one else ABSENT,
            "b": other.entry.format if other else ABSENT,
            "bytes_a": one.nbytes if one else 0,
            "bytes_b": other.nbytes if other else 0,
        }
        if one is not None and other is not None and not (one.is_table or other.is_table) and one.shape == other.shape:
            row.update(_change(one, other))
        yield row
        a.release_pages()
        b.release_pages()


@dataclass(frozen=True)
class EngineWeight:
    """A weight of an engine by its checkpoint's name: its tensors by part, "data" and perhaps "scales"."""

    folder: EngineFolder
    name: str
    tensors: Mapping[str, str]

    @property
    def entry(self) -> TensorEntry:
        return self.folder.manifest.tensors[self.tensors["data"]]

    @property
    def nbytes(self) -> int:
        return sum(self.folder.manifest.tensors[name].bytes for name in self.tensors.values())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored().shape

    @property
    def is_table(self) -> bool:
        """Whether it holds numbers of things, whose changes have no size: places of experts."""
        return self.entry.format == self.entry.dtype == "int32"

    def same_bytes(self, other: EngineWeight) -> bool:
        """By their hashes."""
        return self._facts() == other._facts()

    def _facts(self) -> dict[str, tuple[str, str, tuple[int, ...], str]]:
        entries = {part: self.folder.manifest.tensors[name] for part, name in self.tensors.items()}
        return {part: (e.sha256, e.format, e.shape, e.layout) for part, e in entries.items()}

    def stored(self) -> StoredWeight:
        """Mapped, nothing is read. Raises DscError for a weight in a kernel's own layout."""
        if self.entry.layout != "row_major":
            raise DscError(f"{self.tensors['data']} is laid out for a kernel", got=self.entry.layout)
        parts = {part: self.folder.tensor(name) for part, name in self.tensors.items()}
        name = {"float32": "fp32", "bfloat16": "bf16"}.get(self.entry.format, self.entry.format)
        return StoredWeight(parse_format(name), parts["data"], parts.get("scales"))


def weights_of(folder: EngineFolder) -> dict[str, EngineWeight]:
    """Every weight of an engine by its checkpoint's name: `.packed` and `.scales` are parts of `.weight`."""
    parts: dict[str, dict[str, str]] = {}
    for name, entry in folder.manifest.tensors.items():
        base, _, end = name.rpartition(".")
        weight = f"{base}.weight" if end in ("packed", "scales") else name
        parts.setdefault(weight, {})[entry.part] = name
    return {name: EngineWeight(folder, name, found) for name, found in parts.items()}


def _change(one: EngineWeight, other: EngineWeight) -> dict[str, Any]:
    """The largest change of a value, where it is, and the change as a whole over the values before."""
    square = norm = largest = 0.0
    where = ""
    for at, before, after in _pieces(one.stored(), other.stored()):
        change = (after.double() - before.double()).abs()
        square += float(change.square().sum())
        norm += float(before.double().square().sum())
        most = float(change.max()) if change.numel() else 0.0
        if most > largest or math.isnan(most):
            flat = int(change.flatten().argmax())
            largest, where = most, _place(at, flat, before.shape)
    relative = math.sqrt(square / norm) if norm else 0.0
    numbers = {"largest": largest, "relative": relative}
    return {**{key: float(f"{value:.6g}") for key, value in numbers.items()}, "at": where}


def _pieces(a: StoredWeight, b: StoredWeight) -> Iterator[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]:
    """(matrix and first row, or first row, or nothing for a vector), the values of both there."""
    if len(a.shape) == 1:
        yield (), a.data.float(), b.data.float()
    elif len(a.shape) == 2:
        yield from _rows((), a, b)
    else:
        for index in range(a.shape[0]):
            yield from _rows((index,), a[index], b[index])


def _rows(
    at: tuple[int, ...], a: StoredWeight, b: StoredWeight
) -> Iterator[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]:
    step = max(PIECE_ELEMENTS // max(a.shape[1], 1), 1)
    for start in range(0, a.shape[0], step):
        rows = torch.arange(start, min(start + step, a.shape[0]))
        yield (*at, start), a.dequantize_rows(rows), b.dequantize_rows(rows)


def _place(at: tuple[int, ...], flat: int, shape: torch.Size) -> str:
    if not at:
        return f"[{flat}]"
    row, column = divmod(flat, shape[1])
    return str([*at[:-1], at[-1] + row, column])
