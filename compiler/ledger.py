"""The tensor ledger: what became of every tensor of the checkpoint, with its bytes. Nothing is skipped without a rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dsc.compiler.checkpoint import DROPPED_COPY, DROPPED_TIED, MTP_OFF, Checkpoint, nearest_tensor
from dsc.compiler.ir.simplify import passes_codes
from dsc.compiler.ir.weight import Cast, Dequantize, DequantizePacked, Expression, Quantize, Source
from dsc.compiler.random_checkpoint import RandomCheckpoint
from dsc.compiler.shards import tensor_lines
from dsc.compiler.tensor_names import Expected
from dsc.runtime.errors import DscError, raise_all

State = Literal["consumed", "derived", "dropped"]
PIECE_BYTES = 1 << 24
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Entry:
    """One source tensor.

    consumed  its values are in the engine as they were: copied, joined, widened, or FP8 codes and scales passed through
    derived   the engine holds what was computed from it: dequantized, quantized, rounded
    dropped   no graph reads it; `rule` says why that is right
    """

    name: str
    nbytes: int
    state: State
    rule: str = ""


@dataclass(frozen=True)
class Ledger:
    """Every tensor of a checkpoint, once, sorted by name."""

    entries: tuple[Entry, ...]

    def of(self, state: State) -> list[Entry]:
        return [entry for entry in self.entries if entry.state == state]

    def to_json(self) -> dict[str, Any]:
        """{state: {count, bytes, tensors}}; tensors are names, for dropped ones {rule: names}."""
        data: dict[str, Any] = {}
        for state in ("consumed", "derived", "dropped"):
            entries = self.of(state)
            names: Any = [entry.name for entry in entries]
            if state == "dropped":
                rules = sorted({entry.rule for entry in entries})
                names = {rule: [entry.name for entry in entries if entry.rule == rule] for rule in rules}
            data[state] = {"count": len(entries), "bytes": sum(e.nbytes for e in entries), "tensors": names}
        return data


def make_ledger(checkpoint: Checkpoint | RandomCheckpoint, weights: Mapping[str, Expression]) -> Ledger:
    """The ledger of an engine whose weights are these expressions, over all graphs (before or after quantizing).

    raises  DscError for a tensor that no graph reads and no rule drops, for a read of a tensor that is not stored, and
            for a copy whose bytes differ from the original's (copies are read to compare them, in pieces), and for a
            tensor that a rule drops and that does not hold what the rule says
    """
    kept: dict[str, bool] = {}
    for expression in weights.values():
        for source, whole in _leaves(expression, ""):
            kept[source.name] = kept.get(source.name, False) or whole
    stored = checkpoint.names()
    dropped = {
        **checkpoint.dropped,
        **{name: expected.rule for name, expected in checkpoint.ruled()},
        **{copy: DROPPED_TIED if copy == HEAD else DROPPED_COPY for copy, _ in checkpoint.copies()},
    }
    faults = [_unread([n for n in stored if n not in kept and n not in dropped], checkpoint)]
    faults += [_unstored(sorted(kept.keys() - set(stored)), checkpoint)]
    faults += [_difference(checkpoint, copy, original) for copy, original in checkpoint.copies()]
    faults += [_other_content(checkpoint, name, expected) for name, expected in checkpoint.ruled()]
    raise_all("the tensor ledger does not balance", [fault for fault in faults if fault])
    return Ledger(tuple(_entry(checkpoint, name, kept, dropped) for name in stored))


def _entry(
    checkpoint: Checkpoint | RandomCheckpoint, name: str, kept: dict[str, bool], dropped: dict[str, str]
) -> Entry:
    nbytes = checkpoint.info(name).nbytes
    if name in kept:
        return Entry(name, nbytes, "consumed" if kept[name] else "derived")
    return Entry(name, nbytes, "dropped", dropped[name])


def _leaves(expression: Expression, until: str) -> Iterator[tuple[Source, bool]]:
    """Each source with whether its values come through whole.

    until  what must yet be found below for that: "bf16" a bfloat16 source, "fp8" or "wint4:G" codes with scales, "-" nothing
           helps
    """
    if isinstance(expression, Source):
        yield expression, until == "" or (until == "bf16" and expression.dtype == "bfloat16")
        return
    if isinstance(expression, Quantize):
        kind = expression.parsed.kind
        until = {"fp32": until, "bf16": until or "bf16", "fp8": "-" if until else "fp8"}.get(kind, "-")
        if kind == "wint4":
            until = expression.format
    elif isinstance(expression, Cast) and until.startswith("wint4"):
        until = "-"
    elif isinstance(expression, Cast) and expression.dtype == "bfloat16":
        until = until or "bf16"
    elif isinstance(expression, Dequantize):
        until = "" if until == "fp8" and expression.block == (128, 128) else "-"
    elif isinstance(expression, DequantizePacked):
        until = "" if until.startswith("wint4") and passes_codes(expression, until) else "-"
    for part in expression.inputs:
        yield from _leaves(part, until)


def _unread(names: list[str], checkpoint: Checkpoint | RandomCheckpoint) -> DscError | None:
    if not names:
        return None
    what = f"{len(names)} tensors are read by no graph and dropped by no rule"
    close = nearest_tensor(names[0], checkpoint.expected) if names[0] not in checkpoint.expected else ""
    try_ = close and f"nearest known {close}"
    return DscError(what, where=str(checkpoint.folder), details=tensor_lines(names), try_=try_)


def _unstored(names: list[str], checkpoint: Checkpoint | RandomCheckpoint) -> DscError | None:
    if not names:
        return None
    what = f"{len(names)} tensors are read and not stored"
    return DscError(what, where=str(checkpoint.folder), details=tensor_lines(names))


def _other_content(checkpoint: Checkpoint | RandomCheckpoint, name: str, expected: Expected) -> DscError | None:
    """A fault where a tensor that no graph reads contradicts the rule that says so."""
    kind, *numbers = expected.content
    found = checkpoint.read(name).to(torch.int64)
    if kind == "groups":
        (group,) = (int(number) for number in numbers)
        wanted = torch.arange(len(found)) // group
        if torch.equal(found, wanted):
            return None
        column = int((found != wanted).nonzero()[0])
        what, told = "columns are not in the order of their groups", f"column {column} in group {column // group}"
        got, try_ = f"group {int(found[column])}", "desc_act: false when quantizing"
    else:
        if found.tolist() == numbers:
            return None
        what, told, got, try_ = "does not fit config.json", str(numbers), str(found.tolist()), ""
    return DscError(f"{name}: {what}", where=str(checkpoint.folder), wanted=told, got=got, try_=try_)


def _difference(checkpoint: Checkpoint | RandomCheckpoint, copy: str, original: str) -> DscError | None:
    """A fault if two tensors are not the same bytes."""
    a, b = checkpoint.info(copy), checkpoint.info(original)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        differing, total = a.shape[0], a.shape[0]
    else:
        rows = max(PIECE_BYTES * a.shape[0] // max(a.nbytes, 1), 1)
        starts = range(0, a.shape[0], rows)
        pieces = (
            tuple(checkpoint.read(n, slice(s, s + rows)).view(torch.uint8) for n in (copy, original)) for s in starts
        )
        differing, total = sum(int((x != y).any(-1).sum()) for x, y in pieces), a.shape[0]
    if not differing:
        return None
    tied = checkpoint.spec.tie_word_embeddings and copy == HEAD
    return DscError(
        f"{copy} is not a copy of {original}" + (", yet tie_word_embeddings is true" if tied else ""),
        where=str(checkpoint.folder),
        wanted="the same bytes: one tensor is stored for both",
        got=f"{differing} of {total} rows differ",
        try_="tie_word_embeddings: false in config.json, if the stored head is right" if tied else MTP_OFF,
    )
