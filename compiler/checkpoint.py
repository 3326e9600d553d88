"""A checkpoint folder: checked against the spec as a whole, then read lazily, tensor by tensor or some rows at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsc.compiler.ir.simplify import simplify
from dsc.compiler.ir.weight import Expression, Source
from dsc.compiler.packing import LAYOUTS
from dsc.compiler.safetensors_file import TensorInfo
from dsc.compiler.shards import Shards, find_shards, tensor_lines
from dsc.compiler.source_files import SourceFiles
from dsc.compiler.tensor_names import Expected, TensorNames, all_names, expected_tensors, fold_names, mtp_tensors
from dsc.plugins.schema import Type
from dsc.runtime.errors import DscError, nearest, raise_all
from dsc.runtime.spec import ModelSpec

if TYPE_CHECKING:
    import torch

# Tensors that no graph needs: end of the name -> the rule's reason.
DROPPED_SUFFIXES = {".rotary_emb.inv_freq": "rope frequencies: recomputed from config.json"}
DROPPED_COPY = "copy of the main model's tensor"
DROPPED_TIED = "copy of the tied embeddings"
DROPPED_MTP = "MTP layer: off in the recipe"
MTP_OFF = "mtp: {enabled: false} in the recipe"


class Checkpoint:
    """The stored tensors of one model. Nothing of it is kept in memory but names, shapes and offsets.

    spec      the model as stored: num_mtp_layers is 1 where an MTP layer is there and wanted
    expected  the tensors that the graphs may read, and copies of them
    dropped   stored tensors that no graph needs -> the name of the rule
    notes     what a user should hear, one sentence each
    """

    def __init__(self, folder: Path, spec: ModelSpec, shards: Shards, dropped: dict[str, str]) -> None:
        self.folder, self.spec, self.dropped = folder, spec, dropped
        self.expected = expected_tensors(spec, shards.tensors)
        self.notes = tuple(shards.notes)
        self._tensors = shards.tensors
        self._files = SourceFiles(info.file for info in self._tensors.values())

    @classmethod
    def open(cls, folder: Path, spec: ModelSpec, *, mtp: bool = True) -> Checkpoint:
        """Read all headers and compare them with the spec of `read_config`.

        mtp     False leaves the MTP layer out, whatever of it is stored
        raises  DscError with every missing, cut, unknown or misshapen file and tensor at once
        """
        shards = find_shards(folder)
        names = shards.tensors.keys() | shards.lost
        spec = _settle_mtp(spec, names, mtp, shards, folder)
        dropped = _dropped(spec, names, mtp)
        _compare(spec, shards, names - dropped.keys(), folder)
        raise_all(f"{folder} cannot be used", shards.faults)
        return cls(folder, spec, shards, dropped)

    def names(self) -> list[str]:
        """Every stored tensor, sorted."""
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape, file, offset and bytes of a tensor."""
        return self._tensors[name]

    def source(self, name: str) -> Source:
        """A tensor as a leaf of a weight expression."""
        info = self._tensors[name]
        return Source(name, info.dtype, info.shape)

    def position(self, name: str) -> tuple[str, int]:
        """Where a tensor lies: sorts as the bytes do."""
        return self._tensors[name].file.name, self._tensors[name].offset

    def store(self, name: str, expression: Expression) -> Expression:
        """What is emitted for a stored tensor."""
        return simplify(expression)

    def files(self) -> dict[str, int]:
        """Every shard's name and bytes."""
        return {file.name: file.stat().st_size for file in sorted({info.file for info in self._tensors.values()})}

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor, or rows of its leading axis, freshly read. Raises DscError where the file changed, OSError."""
        import torch  # here: a plan reads headers alone and is done before torch is imported

        info = self._tensors[name]
        shape, offset, nbytes = info.shape, info.offset, info.nbytes
        if rows is not None:
            first, last, step = rows.indices(shape[0])
            assert step == 1, (name, rows)
            last = max(first, last)
            row_bytes = nbytes // shape[0] if shape[0] else 0
            shape, offset, nbytes = (last - first, *shape[1:]), offset + first * row_bytes, (last - first) * row_bytes
        data = torch.empty(nbytes, dtype=torch.uint8)
        self._files.read(info.file, offset, data.numpy().data)
        dtype: torch.dtype = getattr(torch, info.dtype)
        return data.view(dtype).view(shape)

    def expect(self, name: str) -> None:
        """Have the system fetch a tensor that will be read soon."""
        info = self._tensors[name]
        self._files.expect(info.file, info.offset, info.nbytes)

    def release(self, name: str) -> None:
        """Have the system forget a tensor that will not be read again."""
        info = self._tensors[name]
        self._files.release(info.file, info.offset, info.nbytes)

    def identity(self) -> dict[str, str]:
        """What differs where a file does: name -> its size, its time of change, and a hash of what its header says."""
        entries: dict[Path, list[str]] = {path: [] for path in self._files.stamps}
        for name, info in sorted(self._tensors.items()):
            entries[info.file].append(f"{name} {info.dtype} {info.shape} {info.offset}")
        return {path.name: self._files.identity(path, "\n".join(lines)) for path, lines in entries.items()}

    def check_unchanged(self) -> None:
        """Raise DscError with every file that is not what it was when the checkpoint was opened."""
        self._files.check()

    def copies(self) -> Iterator[tuple[str, str]]:
        """Stored tensors that must equal another one: (copy, original)."""
        for name, expected in self.expected.items():
            if expected.copy_of and name in self._tensors:
                yield name, expected.copy_of

    def ruled(self) -> Iterator[tuple[str, Expected]]:
        """Stored tensors that no graph reads, and what they must hold, in the order of the files: there is one a module."""
        found = [name for name, expected in self.expected.items() if expected.rule and name in self._tensors]
        for name in sorted(found, key=self.position):
            yield name, self.expected[name]


def check_names(
    folder: Path, spec: ModelSpec, names: set[str], *, mtp: bool = True
) -> tuple[ModelSpec, tuple[str, ...]]:
    """What `Checkpoint.open` would say of tensors of these names, whose files are not here: the spec as stored, and notes.

    raises  DscError with every missing and unknown tensor
    """
    shards = Shards()
    spec = _settle_mtp(spec, names, mtp, shards, folder)
    _compare(spec, shards, names - _dropped(spec, names, mtp).keys(), folder)
    raise_all(f"{folder} cannot be used", shards.faults)
    return spec, tuple(shards.notes)


def _settle_mtp(spec: ModelSpec, names: set[str], mtp: bool, shards: Shards, folder: Path) -> ModelSpec:
    """Declared and stored MTP layers compared; the spec with the layer that will be used, or without."""
    expected = mtp_tensors(spec, names)
    found = names & expected.keys()
    absent = {name for name in expected if not expected[name].optional} - found
    if not mtp or not (found or spec.num_mtp_layers):
        return replace(spec, num_mtp_layers=0)
    declared = spec.num_mtp_layers == 1
    if absent:
        state = "declares 1 MTP layer" if declared else "declares no MTP layer, yet a part of one is stored"
        what = f"config.json {state}: {len(absent)} of its {len(expected)} tensors are missing"
        shards.faults.append(DscError(what, where=str(folder), details=tensor_lines(absent), try_=MTP_OFF))
    elif not declared:
        shards.notes.append(f"config.json declares no MTP layer, model.layers.{spec.num_layers} is one: it is used")
    copies = [name for name in expected if expected[name].copy_of and name not in found]
    if not absent and copies:
        shards.notes.append(f"{', '.join(copies)}: not stored, the main model's is used")
    return replace(spec, num_mtp_layers=1)


def _dropped(spec: ModelSpec, names: set[str], mtp: bool) -> dict[str, str]:
    dropped = {n: rule for n in names for suffix, rule in DROPPED_SUFFIXES.items() if n.endswith(suffix)}
    if not mtp:
        dropped |= dict.fromkeys(names & mtp_tensors(spec, names).keys(), DROPPED_MTP)
    return dropped


def _compare(spec: ModelSpec, shards: Shards, names: set[str], folder: Path) -> None:
    """Every missing, unknown and misshapen tensor becomes a fault; what a lost file or the MTP rules told stays told."""
    found = all_names(spec, names)
    expected = found.found
    told = shards.lost | (mtp_tensors(spec, names).keys() if spec.num_mtp_layers else set())
    absent = {n for n, e in expected.items() if not e.optional} - names - told
    if absent:
        what = f"{len(absent)} of {len(expected)} tensors are missing"
        shards.faults.append(DscError(what, where=str(folder), details=tensor_lines(absent)))
    names = names - _tell_packed(found, names, shards, folder)
    _tell_unknown(sorted(names - expected.keys()), expected, shards, folder)
    misfits: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(names & expected.keys() & shards.tensors.keys()):
        info, wanted = shards.tensors[name], expected[name]
        if info.dtype not in wanted.dtypes or info.shape != wanted.shape:
            got = str(Type(info.dtype, info.shape))
            misfits[str(Type(" or ".join(wanted.dtypes), wanted.shape)), got].append(name)
        elif name.endswith(".e_score_correction_bias") and info.dtype != "float32":
            shards.notes.append(
                f"{name} is stored as {info.dtype}, DeepSeek releases it as float32: choices may differ"
            )
    for (wanted_type, got), misfit in misfits.items():
        what = (
            f"{len(misfit)} tensors do not fit config.json"
            if len(misfit) > 1
            else f"{misfit[0]} does not fit config.json"
        )
        lines = tensor_lines(misfit) if len(misfit) > 1 else []
        shards.faults.append(DscError(what, where=str(folder), details=lines, wanted=wanted_type, got=got))


def _tell_packed(found: TensorNames, names: set[str], shards: Shards, folder: Path) -> set[str]:
    """Modules stored in another way than config.json says become notes, those stored in both ways a fault, whose packed
    tensors are returned.
    """
    packing = found.spec.source.packing
    if packing is None:
        return set()
    layout = LAYOUTS[packing.method]
    ends = (layout.words, layout.scales, layout.zeros)
    twice = {
        f"{module}.{end}"
        for module, packed in found.modules.items()
        if not packed
        for end in ends
        if f"{module}.{end}" in names
    }
    if twice:
        what = f"{len(twice)} packed tensors are of modules whose weight is stored too"
        shards.faults.append(DscError(what, where=str(folder), details=tensor_lines(twice), wanted="one of both"))
    for packed, declared, stored in ((True, "unpacked", "packed"), (False, "packed", "unpacked")):
        differing = [module for module, is_packed in found.modules.items() if is_packed is packed]
        differing = [module for module in differing if found.declared(module) is not packed]
        if differing:
            shown = fold_names(sorted(differing))
            more = f" and {len(shown) - 4} kinds more" if len(shown) > 4 else ""
            shards.notes.append(
                f"config.json says that {len(differing)} modules are {declared}, they are stored {stored}: "
                f"{', '.join(shown[:4])}{more}"
            )
    return twice


def _tell_unknown(unknown: list[str], expected: dict[str, Expected], shards: Shards, folder: Path) -> None:
    """Unknown tensors, grouped where one numbered kind of them fills many layers; the nearest known name for each group."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in unknown:
        groups[".".join("#" if part.isdigit() else part for part in name.split("."))].append(name)
    for names in groups.values():
        close = nearest_tensor(names[0], expected)
        what = f"{names[0]} is unknown" if len(names) == 1 else f"{len(names)} tensors are unknown"
        lines = tensor_lines(names) if len(names) > 1 else []
        shards.faults.append(DscError(what, where=str(folder), details=lines, try_=close and f"nearest known {close}"))


def nearest_tensor(name: str, expected: dict[str, Expected]) -> str:
    """The expected name closest to an unknown one; among those of the same layer and expert when there are any."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    same = [known for known in expected if [part for part in known.split(".") if part.isdigit()] == numbers]
    return nearest(name, same) or nearest(name, list(expected)[:2000])
