"""Open an engine folder: check it is whole, give its manifest, programs and weights. Nothing is copied."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsc.runtime import codec
from dsc.runtime.errors import DscError, nearest, raise_all
from dsc.runtime.manifest import NAME, REPORT, SCHEMA_VERSION, FileEntry, GraphFiles, Manifest, TensorEntry
from dsc.runtime.program import Program
from dsc.runtime.shards import cut_faults, shard_shape
from dsc.runtime.spec import ModelSpec

if TYPE_CHECKING:
    import torch

__all__ = ["SCHEMA_VERSION", "EngineFolder", "looks_like_engine"]

_PIECE = 1 << 20  # bytes hashed at a time
_HASHING_THREADS = 8  # at most


def looks_like_engine(path: Path) -> bool:
    """Whether a folder holds an engine's manifest, of whatever version. Others use that file's name too."""
    try:
        data = codec.read_json(path / NAME, str(path / NAME))
    except DscError:
        return False
    return isinstance(data, dict) and data.keys() >= {"schema_version", "spec", "target", "tensors", "files"}


class EngineFolder:
    """An engine on disk. `open` it; weights are mapped on first use and never read as a whole."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._maps: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, path: str | PathLike[str]) -> EngineFolder:
        """Read the manifest and check that every file is there with its size.

        Hashes are checked by `verify_hashes` (weights) and when a file is read (programs, report).
        Raises DscError: no engine, another schema version, a damaged manifest, files missing or of another size.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise DscError("no such engine", where=str(path), wanted="a folder written by dsc compile")
        if not (folder / NAME).is_file():
            raise DscError(
                "is no engine, or a build that was cut short", where=str(path), wanted=f"a folder with {NAME}"
            )
        where = str(folder / NAME)
        engine = cls(folder, Manifest.from_json(codec.read_json(folder / NAME, where), where))
        engine.check_files()
        return engine

    # -- what it says

    @property
    def spec(self) -> ModelSpec:
        return self.manifest.spec

    @cached_property
    def report(self) -> dict[str, Any]:
        """report.json: what the compiler did and why."""
        data = self._read_json(REPORT)
        if not isinstance(data, dict):
            raise DscError("is no report", where=str(self.path / REPORT), wanted="an object")
        return data

    @property
    def tokenizer_dir(self) -> Path:
        """Folder with tokenizer.json, tokenizer_config.json and what else the checkpoint had of it."""
        return self.path / "tokenizer"

    @cached_property
    def content_hash(self) -> str:
        """sha256 of the manifest, which holds the sha256 of every other hashed file: equal engines, equal hash.

        What an engine was before it was migrated is no part of it: then it equals one built anew.
        """
        return hashlib.sha256(codec.dump_json(replace(self.manifest, migrated=()).to_json())).hexdigest()

    def graph_files(self, name: str, rank: int = 0) -> GraphFiles:
        """Files of a graph on a rank."""
        graphs = self.manifest.graphs
        if name not in graphs:
            where = str(self.path / NAME)
            raise DscError(f"no graph {name}", where=where, wanted=", ".join(graphs), try_=nearest(name, graphs))
        if not 0 <= rank < len(graphs[name]):
            raise DscError(
                f"no rank {rank}", where=str(self.path), wanted=f"0 to {len(graphs[name]) - 1}", got=str(rank)
            )
        return graphs[name][rank]

    def program(self, name: str, rank: int = 0) -> Program:
        """The program of a graph on a rank, checked against its .onnx, the manifest's tensors and its own rules."""
        files = self.graph_files(name, rank)
        where = str(self.path / files.program)
        program = Program.from_json(self._read_json(files.program), where)
        onnx_sha256 = self.manifest.files[files.onnx].sha256
        if program.name != name or program.onnx_sha256 != onnx_sha256:
            raise DscError(
                f"the program does not belong to {files.onnx}: files of different builds, rank {rank}",
                where=where,
                wanted=f"{name} {onnx_sha256}",
                got=f"{program.name} {program.onnx_sha256}",
            )
        self._check_weights(program, where)
        self._check_limits(program, where)
        return program

    # -- weights

    def tensor(self, name: str) -> torch.Tensor:
        """A stored tensor, mapped from its file: nothing is read until it is used. Writes do not reach the file."""
        import torch

        entry = self.manifest.tensors.get(name)
        if entry is None:
            near = nearest(name, self.manifest.tensors)
            raise DscError(f"the engine has no tensor {name}", where=str(self.path), try_=near)
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if not entry.bytes:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(self._map(entry.file), dtype=torch.uint8, count=entry.bytes, offset=entry.offset)
        return flat.view(dtype).view(entry.shape)

    def kernel(self, name: str) -> bytes:
        """A cubin by its path in the engine, `kernels/NAME.cubin`."""
        if name not in self.manifest.files:
            raise DscError(f"the engine has no {name}", where=str(self.path))
        return (self.path / name).read_bytes()

    def check_files(self) -> None:
        """Raise DscError with every file that is missing, of another size or a way out of the engine."""
        faults = []
        root = self.path.resolve()
        for path, entry in sorted(self.manifest.files.items()):
            file, where = self.path / path, str(self.path / path)
            if not file.is_file():
                faults.append(DscError(f"is missing{self._rank_of(path)}", where=where))
            elif not file.resolve().is_relative_to(root):
                faults.append(DscError("leads out of the engine", where=where, got=f"a link to {file.resolve()}"))
            elif file.stat().st_size != entry.bytes:
                got = f"{file.stat().st_size} bytes"
                faults.append(DscError("has another size", where=where, wanted=f"{entry.bytes} bytes", got=got))
        raise_all(f"{self.path}: the engine is not whole", faults)

    def verify_tensor(self, name: str) -> None:
        """Compare one tensor's bytes with its sha256; raises DscError naming file and tensor."""
        entry = self.manifest.tensors[name]
        digest = hashlib.sha256()
        self._digest(entry.file, entry.offset, entry.offset + entry.bytes, digest.update)
        if digest.hexdigest() != entry.sha256:
            raise self._changed_tensor(name, digest.hexdigest())

    def verify_hashes(
        self, advance: Callable[[int], None] = lambda nbytes: None, share: tuple[int, int] = (0, 1)
    ) -> None:
        """Hash every file and every tensor, several files at a time; `advance` is told the bytes of tensors gone through.

        share   (which, of how many): only the files of one share; all shares together are every file
        raises  DscError with all that differ; a changed byte inside a tensor names the tensor
        """
        which, shares = share
        files = self.manifest.files
        paths = sorted(files, key=lambda path: (-files[path].bytes, path))[which::shares]  # alike in bytes
        with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as pool:
            found = pool.map(lambda path: self._verify_file(path, advance), sorted(paths))
            faults = [fault for faults in found for fault in faults]
        raise_all(f"{self.path}: changed since it was built", faults)

    def parts_sha256(self, path: str) -> str:
        """`FileEntry.parts_sha256` of a file, by the sha256 its tensors have in the manifest; of its bytes the others are read."""
        digest, at = hashlib.sha256(), 0
        for _, tensor in self._tensors_in(path):
            self._digest(path, at, tensor.offset, digest.update)
            digest.update(bytes.fromhex(tensor.sha256))
            at = max(at, tensor.offset + tensor.bytes)
        self._digest(path, at, self.manifest.files[path].bytes, digest.update)
        return digest.hexdigest()

    def release_pages(self) -> None:
        """Give back the memory of what was read so far; a tensor in use is read again. Private writes are lost."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Let the mapped files go. Tensors still held keep their file mapped."""
        self._maps.clear()

    # -- inside

    def _rank_of(self, path: str) -> str:
        for of_ranks in self.manifest.graphs.values():
            ranks = [rank for rank, files in enumerate(of_ranks) if path in (files.onnx, files.program)]
            if ranks:
                return f": a file of rank {ranks[0]}" if len(ranks) == 1 else f": a file of {len(ranks)} ranks"
        return ""

    def _check_weights(self, program: Program, where: str) -> None:
        faults = []
        for name, operand in program.operands.items():
            if operand.role != "weight":
                continue
            entry = self.manifest.tensors.get(operand.tensor)
            if entry is None:
                faults.append(DscError(f"operand {name} names no tensor: {operand.tensor}", where=where))
                continue
            mesh = self.manifest.parallel
            bad = list(cut_faults(entry.shape, operand.cuts, mesh.tensor, mesh.expert))
            faults += [
                DscError(f"operand {name} is no part of tensor {operand.tensor}", where=where, got=got) for got in bad
            ]
            shape = entry.shape if bad else shard_shape(entry.shape, operand.cuts)
            if not bad and (entry.dtype, shape) != (operand.dtype, operand.shape):
                wanted, got = f"{operand.dtype} {list(operand.shape)}", f"{entry.dtype} {list(shape)}"
                part = f" of {list(entry.shape)} for a rank" if operand.cuts else ""
                faults.append(
                    DscError(f"tensor {operand.tensor} is of another type", where=where, wanted=wanted, got=got + part)
                )
        raise_all(f"{where}: program and weights do not fit together", faults)

    def _check_limits(self, program: Program, where: str) -> None:
        """Its memory is planned for its letters: a step within the limits must not be larger."""
        limits, models = self.manifest.limits, self.manifest.models.values()
        needed = {"B": limits.sequences, "P": -(-limits.context_tokens // self.manifest.kv_cache.block_tokens)}
        if program.name in (model.phases.get("prefill") for model in models):
            needed["T"] = limits.batch_tokens
        small = [letter for letter in needed if program.letters.get(letter, needed[letter]) < needed[letter]]
        if small:
            raise DscError(
                "the program is not planned for the engine's limits",
                where=where,
                wanted=", ".join(f"{letter} {needed[letter]}" for letter in small),
                got=", ".join(f"{letter} {program.letters[letter]}" for letter in small),
            )

    def _read_json(self, path: str) -> Any:
        """A JSON file of the engine, after its hash."""
        if path not in self.manifest.files:
            raise DscError("is not listed in the manifest", where=str(self.path / path))
        raise_all(f"{self.path}: changed since it was built", list(self._verify_file(path, lambda nbytes: None)))
        return codec.read_json(self.path / path, str(self.path / path))

    def _verify_file(self, path: str, advance: Callable[[int], None]) -> list[DscError]:
        """Hash a file and the tensors in it, every byte read once."""
        entry, size = self.manifest.files[path], (self.path / path).stat().st_size
        if size != entry.bytes:
            return [DscError("has another size", where=str(self.path / path), wanted=str(entry.bytes), got=str(size))]
        whole, at, faults = hashlib.sha256(), 0, []
        for name, tensor in self._tensors_in(path):
            part, end = hashlib.sha256(), tensor.offset + tensor.bytes
            self._digest(path, at, tensor.offset, whole.update)
            if entry.parts_sha256:
                self._digest(path, tensor.offset, end, part.update)
                whole.update(bytes.fromhex(tensor.sha256))
            else:
                self._digest(path, tensor.offset, end, part.update, whole.update)
            at = max(at, end)
            advance(tensor.bytes)
            if part.hexdigest() != tensor.sha256:
                faults.append(self._changed_tensor(name, part.hexdigest()))
        self._digest(path, at, size, whole.update)
        digest = whole.hexdigest()
        got = FileEntry(size, parts_sha256=digest) if entry.parts_sha256 else FileEntry(size, digest)
        if got != entry and (entry.parts_sha256 or not faults):
            what = "its bytes changed, outside of its tensors" if entry.parts_sha256 else "its bytes changed"
            faults.append(DscError(what, where=str(self.path / path), wanted=entry.digest, got=got.digest))
        return faults

    def _tensors_in(self, path: str) -> list[tuple[str, TensorEntry]]:
        """In the order of their bytes."""
        found = [(name, tensor) for name, tensor in self.manifest.tensors.items() if tensor.file == path]
        return sorted(found, key=lambda item: (item[1].offset, item[1].bytes, item[0]))

    def _changed_tensor(self, name: str, got: str) -> DscError:
        entry = self.manifest.tensors[name]
        where, wanted = str(self.path / entry.file), f"sha256 {entry.sha256}"
        return DscError(f"the bytes of {name} changed", where=where, wanted=wanted, got=f"sha256 {got}")

    def _digest(self, path: str, start: int, end: int, *updates: Callable[[memoryview], None]) -> None:
        """Tell `updates` the bytes of a range. Read, not mapped: mapped pages would count as memory of the process."""
        buffer = memoryview(bytearray(min(_PIECE, max(end - start, 0))))
        with open(self.path / path, "rb", buffering=0) as file:
            file.seek(start)
            while start < end:
                count = file.readinto(buffer[: end - start])
                if not count:
                    raise DscError("ends early", where=str(self.path / path), wanted=f"{end} bytes", got=f"{start}")
                for update in updates:
                    update(buffer[:count])
                start += count

    def _map(self, path: str) -> mmap.mmap:
        """A private mapping of a file: torch wants memory it may write, and the file must stay as it is."""
        if path not in self._maps:
            with open(self.path / path, "rb") as file:
                # Not reserving keeps the kernel from refusing a private mapping larger than its memory.
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
                self._maps[path] = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return self._maps[path]
