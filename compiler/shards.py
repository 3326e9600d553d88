"""Which file of a checkpoint holds which tensor: the index, or the files themselves, with every fault collected."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsc.compiler.safetensors_file import TensorInfo, read_header
from dsc.compiler.tensor_names import fold_names
from dsc.runtime.codec import read_json
from dsc.runtime.errors import DscError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UNSAFE = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass
class Shards:
    """The tensors of a folder.

    tensors  those whose file is there and sound
    lost     names that the index promises and that could not be found, each told by a fault already
    """

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    faults: list[DscError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_shards(folder: Path) -> Shards:
    """Read the index and every header of a checkpoint folder; data is not touched."""
    if (folder / INDEX).is_file():
        return _indexed(folder)
    return _loose(folder)


def _indexed(folder: Path) -> Shards:
    shards, index = Shards(), folder / INDEX
    by_file = index_files(index)
    if (folder / SINGLE).exists() and SINGLE not in by_file:
        shards.faults.append(DscError(f"{SINGLE} lies beside an index that does not name it", where=str(index)))
    for file, names in sorted(by_file.items()):
        stored = _header(folder, file, names, shards)
        if stored is None:
            shards.lost |= names
            continue
        for what, absent in (
            (f"{file} does not hold tensors that the index places there", names - stored.keys()),
            (f"{file} holds tensors that the index does not place there", stored.keys() - names),
        ):
            if absent:
                shards.faults.append(DscError(what, where=str(index), details=tensor_lines(absent)))
        shards.lost |= names - stored.keys()
        shards.tensors.update({name: info for name, info in stored.items() if name in names})
    return shards


def index_files(index: Path) -> dict[str, set[str]]:
    """file -> the names it holds."""
    return read_index(index)[0]


def read_index(index: Path) -> tuple[dict[str, set[str]], int]:
    """file -> the names it holds; bytes of all tensors as the index tells them, 0 where it does not."""
    data = read_json(index, str(index))
    weight_map: Any = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DscError("has no weight_map", where=str(index), wanted='{"weight_map": {tensor: file}}')
    by_file: dict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        by_file[file if isinstance(file, str) else ""].add(name)
    for file, names in by_file.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            name = next(name for name in weight_map if name in names)
            raise DscError(
                f"tensor {name} is in {weight_map[name]!r}",
                where=str(index),
                wanted="a .safetensors file beside the index",
            )
    metadata = data.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return by_file, int(size) if isinstance(size, int | float) and size > 0 else 0


def _loose(folder: Path) -> Shards:
    """No index: one model.safetensors, or the numbered shards, whose names say how many there must be."""
    shards = Shards()
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise _no_weights(folder)
    if files != [SINGLE]:
        shards.notes.append(f"{folder.name} has no {INDEX}: the tensors are those of its {len(files)} files")
    counts = {int(m[1]) for file in files if (m := re.search(r"-of-(\d{5})\.safetensors$", file))}
    for count in counts:
        numbered = {f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
        files = sorted({*files, *numbered})
    for file in files:
        stored = _header(folder, file, set(), shards)
        for name, info in (stored or {}).items():
            if name in shards.tensors:
                other = shards.tensors[name].file.name
                shards.faults.append(DscError(f"tensor {name} is in {other} and in {file}", where=str(folder)))
            shards.tensors[name] = info
    return shards


def _header(folder: Path, file: str, names: Iterable[str], shards: Shards) -> dict[str, TensorInfo] | None:
    """A shard's tensors, or None after a fault that lists what it should hold."""
    path = folder / file
    try:
        if path.is_file():
            return read_header(path)
        error = DscError("is missing", where=str(path), try_=download_line(folder))
    except DscError as fault:
        error = fault
    except OSError as unreadable:  # a name that no file can have, a file that may not be read
        error = DscError("cannot be read", where=str(path), got=unreadable.strerror or str(unreadable))
    lines = tensor_lines(names)
    shards.faults.append(
        DscError(error.what, where=error.where, details=lines, wanted=error.wanted, got=error.got, try_=error.try_)
    )
    return None


def tensor_lines(names: Iterable[str]) -> list[tuple[str, str]]:
    """Labelled lines of an error that name all tensors, numbers folded into ranges."""
    names = sorted(names)
    return [("tensors", str(len(names))), *(("", name) for name in fold_names(names))] if names else []


def download_line(folder: Path) -> str:
    """How to complete a folder of the Hugging Face cache, "" for any other folder."""
    for parent in folder.absolute().parents:
        if parent.name.startswith("models--"):
            return f"hf download {parent.name.removeprefix('models--').replace('--', '/')}"
    return ""


def _no_weights(folder: Path) -> DscError:
    unsafe = sorted({path.name for pattern in UNSAFE for path in folder.glob(pattern)})
    if unsafe:
        return DscError(
            "the weights are pickle files, which can run code when they are read",
            where=str(folder),
            wanted="*.safetensors",
            got=", ".join(unsafe[:3]),
            try_="convert them to safetensors, or take a revision of the model that has them",
        )
    return DscError(
        "no weights", where=str(folder), wanted=f"{SINGLE}, or shards with {INDEX}", try_=download_line(folder)
    )
