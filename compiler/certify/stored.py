"""Compare what an engine stores with what its recipe makes of the checkpoint, piece by piece, and name what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.convert import convert
from dsc.compiler.emission_plan import EmissionPlan, plan_emission
from dsc.compiler.ir.weight import Stack, WeightValues
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError

SHOWN = 8  # differing rows of one matrix, differing matrices of one weight


@dataclass(frozen=True)
class Difference:
    """A stored tensor that is not what the recipe makes.

    where  the expert and rows in it, "" for a tensor that is missing, too much or of another type
    note   what else is known of it: how many rows, or which expert's bytes they are
    """

    tensor: str
    where: str
    note: str

    def text(self) -> str:
        return ", ".join(part for part in (self.where, self.note) if part)


def compare_stored(
    folder: EngineFolder,
    weights: Mapping[str, WeightValues],
    checkpoint: Checkpoint,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> list[Difference]:
    """Every tensor of an engine against its expression, in the order of the checkpoint's files, in pieces.

    weights  by the names the engine stores them under (dsc.compiler.emit.gather)
    advance  is told of source bytes that are done with
    """
    found = _other_tensors(folder, weights)
    unlike = {difference.tensor for difference in found}
    comparable = {name: values for name, values in weights.items() if name not in unlike}
    plan = plan_emission(comparable, position=checkpoint.position, store=checkpoint.store)
    pieces = _Pieces(folder)
    for job in plan.jobs:
        convert(job, checkpoint.read, pieces.compare, advance)
        folder.release_pages()
    for name, differing in sorted(pieces.differing.items()):
        found += _describe(folder, name, weights[name].expression.shape, differing, plan, checkpoint)
    return found


def raise_differences(folder: EngineFolder, differences: Sequence[Difference]) -> None:
    """Raise DscError naming every tensor that differs."""
    if differences:
        raise DscError(
            f"{len({d.tensor for d in differences})} tensors are not what the recipe makes of the checkpoint",
            where=str(folder.path),
            details=[(difference.tensor, difference.text()) for difference in differences],
            try_="build it again: dsc compile",
        )


def _other_tensors(folder: EngineFolder, weights: Mapping[str, WeightValues]) -> list[Difference]:
    """Tensors that are missing, too much, or of another dtype or shape."""
    entries = folder.manifest.tensors
    extra = entries.keys() - weights.keys()
    found = [Difference(name, "", "is stored and not in the recipe's graphs") for name in extra]
    for name, values in weights.items():
        entry, expression = entries.get(name), values.expression
        if entry is None:
            found.append(Difference(name, "", "is missing"))
        elif (entry.dtype, entry.shape) != (expression.dtype, expression.shape):
            got = f"{entry.dtype} {list(entry.shape)}"
            found.append(Difference(name, "", f"is {got}, wanted {expression.dtype} {list(expression.shape)}"))
    return sorted(found, key=lambda difference: difference.tensor)


@dataclass
class _Pieces:
    """Compares pieces with what is stored. differing: tensor -> bytes from its start where rows differ."""

    folder: EngineFolder
    differing: dict[str, list[int]] = field(default_factory=dict)

    def compare(self, tensor: str, offset: int, values: torch.Tensor) -> None:
        want = _as_bytes(values)
        got = _bytes_of(self.folder, tensor)[offset : offset + len(want)]
        if not torch.equal(got, want):
            row_bytes = len(want) // values.shape[0]
            rows = (got != want).view(-1, row_bytes).any(1).nonzero().flatten()
            self.differing.setdefault(tensor, []).extend((rows * row_bytes + offset).tolist())


def _describe(
    folder: EngineFolder,
    name: str,
    shape: tuple[int, ...],
    differing: Sequence[int],
    plan: EmissionPlan,
    checkpoint: Checkpoint,
) -> list[Difference]:
    """One difference for each matrix, and whose bytes they are where experts changed places."""
    stacked = isinstance(checkpoint.store(name, plan.weights[name].expression), Stack)
    matrix_bytes = folder.manifest.tensors[name].bytes // (shape[0] if stacked else 1)
    row_bytes = matrix_bytes // shape[1 if stacked else 0]
    by_matrix: dict[int, list[int]] = {}
    for at in sorted(differing):
        by_matrix.setdefault(at // matrix_bytes, []).append(at % matrix_bytes // row_bytes)
    owners = _owners(name, matrix_bytes, plan, checkpoint) if stacked else {}
    found = []
    for index, rows in list(by_matrix.items())[:SHOWN]:
        where = f"expert {index}, {_rows(rows)}" if stacked else _rows(rows)
        stored = _bytes_of(folder, name)[index * matrix_bytes : (index + 1) * matrix_bytes]
        owner = owners.get(hashlib.sha256(stored.numpy().data).digest())
        note = f"{len(rows)} rows differ" if owner is None else f"it holds what belongs to expert {owner}"
        found.append(Difference(name, where, note))
    if len(by_matrix) > SHOWN:
        found.append(Difference(name, "", f"{len(by_matrix) - SHOWN} more of its matrices differ"))
    return found


def _owners(name: str, matrix_bytes: int, plan: EmissionPlan, checkpoint: Checkpoint) -> dict[bytes, int]:
    """Hash of what each expert of a stack must be -> the expert; of experts that are alike, the first."""
    digests: dict[int, hashlib._Hash] = {}

    def update(tensor: str, offset: int, values: torch.Tensor) -> None:
        if tensor == name:  # pieces of one expert come in order
            digests.setdefault(offset // matrix_bytes, hashlib.sha256()).update(_as_bytes(values).numpy().data)

    for job in plan.jobs:
        if any(target.tensor == name for target in job.targets.values()):
            convert(job, checkpoint.read, update, lambda num_bytes: None)
    return {digest.digest(): index for index, digest in sorted(digests.items(), reverse=True)}


def _bytes_of(folder: EngineFolder, name: str) -> torch.Tensor:
    return folder.tensor(name).view(-1).view(torch.uint8)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _rows(rows: list[int]) -> str:
    shown = ", ".join(map(str, rows[:SHOWN]))
    return f"{'row' if len(rows) == 1 else 'rows'} {shown}" + (", ..." if len(rows) > SHOWN else "")
