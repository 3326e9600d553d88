"""manifest.json as dataclasses: everything an engine says about itself. Its keys are these fields; see docs of each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath, PurePosixPath
from typing import Any, Literal

from dsc.runtime import codec
from dsc.runtime.errors import DscError, nearest, raise_all
from dsc.runtime.program import DTYPE_BYTES
from dsc.runtime.shards import Place
from dsc.runtime.spec import ModelSpec

SCHEMA_VERSION = 3  # another one needs a step in dsc.runtime.migrate
NAME, REPORT = "manifest.json", "report.json"
LOCAL = "local"  # measured after the build; neither listed nor hashed


@dataclass(frozen=True)
class Parallel:
    """Ranks along each axis of the device mesh. Experts are spread over the tensor ranks of a stage."""

    tensor: int
    expert: int
    pipeline: int

    @property
    def num_ranks(self) -> int:
        return max(self.tensor, self.expert) * self.pipeline

    def place(self, rank: int) -> Place:
        """Which parts of weights a rank of one stage has."""
        return Place(rank, self.tensor, self.expert)


@dataclass(frozen=True)
class Limits:
    """The largest step, in tokens and sequences, and the longest context the engine is planned for."""

    batch_tokens: int
    sequences: int
    context_tokens: int


@dataclass(frozen=True)
class CacheLayout:
    """A cache block of one layer: [block_tokens, latent + rope] of `dtype`, row-major.

    A token's row is its normed latent, then its rotated key, whose pairs stay side by side ("interleaved").
    """

    dtype: str
    block_tokens: int
    latent: int
    rope: int
    block_bytes: int
    rope_order: Literal["interleaved"]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.block_bytes // self.block_tokens


@dataclass(frozen=True)
class Mtp:
    """Whether an MTP model is part of the engine, and how many tokens it drafts."""

    enabled: bool
    drafts: int


@dataclass(frozen=True)
class Model:
    """One model of the engine: its decoder layers, and the graph of each phase ("" for a model without phases)."""

    layers: tuple[int, ...]
    phases: dict[str, str]


@dataclass(frozen=True)
class GraphFiles:
    """Files of one graph on one rank; ranks whose graphs are alike share them."""

    onnx: str
    program: str


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor: `bytes` bytes at `offset` of `file`.

    weight_class   by which the recipe chose `format` (see dsc.plugins.formats; a dtype where it has no say), of which this
                   is the part data or scales
    layout         order of the elements; kernels that want another than "row_major" name it
    models         models that use the tensor
    """

    file: str
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    weight_class: str
    format: str
    part: str
    models: tuple[str, ...]
    layout: str


@dataclass(frozen=True)
class FileEntry:
    """Size and hash of one file: `parts_sha256` where tensors lie in it, so that their bytes are hashed once, else `sha256`.

    parts_sha256   sha256 of the file's bytes from first to last, with the 32 bytes of a tensor's own sha256 in place of every
                   tensor. Header and padding are in it as they are.
    Until it is migrated, a file of an engine older than version 3 has `sha256` in any case.
    """

    bytes: int
    sha256: str = ""
    parts_sha256: str = ""

    @property
    def digest(self) -> str:
        """Whichever it has, by its name: "sha256 0123..."."""
        return f"sha256 {self.sha256}" if self.sha256 else f"parts_sha256 {self.parts_sha256}"


@dataclass(frozen=True)
class Serving:
    """What to serve with on GPUs of one kind, a server's defaults: sequences at once, blocks of cache, tokens of a step."""

    gpu: str
    sequences: int
    cache_blocks: int
    batch_tokens: int


@dataclass(frozen=True)
class Earlier:
    """What an engine was before a migration: what was measured then, and names it by that hash, holds."""

    schema_version: int
    content_hash: str


@dataclass(frozen=True)
class Manifest:
    """What an engine is. `recipe` is the recipe as resolved, `toolchain` the versions that shaped the bytes.

    graphs    by name, one entry per rank
    tensors   by the name that programs use
    target    which backend runs it (dsc.runtime.backends)
    files     every hashed file, by its path in the engine
    serving   as the compiler suggests; None for CPUs, where nothing fits, and in engines older than version 2
    migrated  the versions it went through, oldest first; no part of the content hash
    """

    schema_version: int
    spec: ModelSpec
    recipe: dict[str, Any]
    target: str
    ranks: int
    parallel: Parallel
    limits: Limits
    decode_buckets: tuple[int, ...]
    kv_cache: CacheLayout
    mtp: Mtp
    models: dict[str, Model]
    graphs: dict[str, tuple[GraphFiles, ...]]
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    toolchain: dict[str, str]
    serving: Serving | None
    migrated: tuple[Earlier, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON data that `from_json` reads back."""
        data: dict[str, Any] = codec.encode(self)
        data["spec"] = codec.encode(self.spec.to_json())  # with the fields that have their default, for other readers
        return data

    @classmethod
    def from_json(cls, data: Any, where: str) -> Manifest:
        """The inverse of `to_json`, checked throughout; raises DscError with all faults, each naming `where`."""
        _check_version(data, where)
        manifest = codec.decode(cls, data, where)
        raise_all(f"{where}: the manifest does not fit together", list(_faults(manifest, where)))
        return manifest

    def check_models(self, where: str) -> None:
        """Raise DscError unless there is what serving needs: both phases of each model, and the sampler."""
        wanted = {
            "main": ("decode", "prefill"),
            "sample": ("",),
            **({"mtp": ("decode", "prefill")} if self.mtp.enabled else {}),
        }
        faults = [
            DscError(
                f"the engine has no graph for {phase + ' steps' if phase else 'any step'} of model {name}", where=where
            )
            for name, phases in wanted.items()
            for phase in phases
            if name not in self.models or phase not in self.models[name].phases
        ]
        raise_all(f"{where}: the engine cannot run", faults)


def version_of(data: Any, where: str) -> int:
    """The schema version of a manifest's JSON; DscError where it has none, so is none."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int:
        raise DscError("is not the manifest of an engine", where=where, wanted="schema_version, an integer")
    return version


def _check_version(data: Any, where: str) -> None:
    """Before anything else: another version has other keys, and a heap of faults would hide why."""
    version = version_of(data, where)
    if version != SCHEMA_VERSION:
        raise other_version(version, where)


def other_version(version: int, where: str) -> DscError:
    """That an engine is not of the version that this program reads, and what helps."""
    if version > SCHEMA_VERSION:
        try_ = "a newer dsc"
    else:
        try_ = f"dsc migrate {PurePath(where).parent}" if version >= 1 else "build it again"
    return DscError(
        "the engine has another schema version",
        where=where,
        wanted=f"schema version {SCHEMA_VERSION}, the one this dsc reads",
        got=f"schema version {version}",
        try_=try_,
    )


def is_inside(path: str) -> bool:
    """Whether a path names a file inside the engine: relative, normal, without `..`, in forward slashes."""
    pure = PurePosixPath(path)
    plain = path not in ("", ".", NAME) and "\\" not in path and "\0" not in path and str(pure) == path
    return plain and not pure.is_absolute() and ".." not in pure.parts and pure.parts[0] != LOCAL


def _faults(manifest: Manifest, where: str) -> Iterator[DscError]:
    holding = {tensor.file for tensor in manifest.tensors.values()}
    for path, entry in manifest.files.items():
        if not is_inside(path):
            yield DscError(f"files names {path!r}, which is no path inside the engine", where=where)
        if entry.bytes < 0 or not _is_hashed(entry, path in holding):
            wanted = "sha256 or parts_sha256, one of them" if path in holding else "sha256"
            got = f"{entry.bytes} bytes, sha256 {entry.sha256!r}, parts_sha256 {entry.parts_sha256!r}"
            yield DscError(f"files[{path!r}] has no size and hash", where=where, wanted=wanted, got=got)
    for name, tensor in manifest.tensors.items():
        yield from _tensor_faults(manifest, name, tensor, where)
    yield from _overlaps(manifest, where)
    yield from _graph_faults(manifest, where)
    positive = {
        "ranks": manifest.ranks,
        "parallel.tensor": manifest.parallel.tensor,
        "parallel.expert": manifest.parallel.expert,
        "parallel.pipeline": manifest.parallel.pipeline,
        "limits.batch_tokens": manifest.limits.batch_tokens,
        "limits.sequences": manifest.limits.sequences,
        "limits.context_tokens": manifest.limits.context_tokens,
        "kv_cache.block_tokens": manifest.kv_cache.block_tokens,
    }
    for name, value in positive.items():
        if value < 1:
            yield DscError(f"{name} is not positive", where=where, got=str(value))
    yield from _parallel_faults(manifest, where)
    yield from _cache_faults(manifest.kv_cache, where)
    yield from _serving_faults(manifest, where)


def _parallel_faults(manifest: Manifest, where: str) -> Iterator[DscError]:
    parallel = manifest.parallel
    got = f"tensor {parallel.tensor}, expert {parallel.expert}, pipeline {parallel.pipeline}"
    if parallel.num_ranks != manifest.ranks:
        yield DscError("ranks is not the number of ranks of parallel", where=where, wanted=str(manifest.ranks), got=got)
    if parallel.expert > 0 and parallel.tensor % parallel.expert:
        what = "parallel has groups of ranks for experts that do not come out even"
        yield DscError(what, where=where, wanted="expert divides tensor", got=got)


def _cache_faults(cache: CacheLayout, where: str) -> Iterator[DscError]:
    if cache.dtype not in DTYPE_BYTES:
        yield DscError("kv_cache.dtype is unknown", where=where, wanted=", ".join(DTYPE_BYTES), got=cache.dtype)
        return
    want = cache.block_tokens * (cache.latent + cache.rope) * DTYPE_BYTES[cache.dtype]
    if cache.block_bytes != want:
        got = str(cache.block_bytes)
        yield DscError("kv_cache.block_bytes does not follow from its widths", where=where, wanted=str(want), got=got)


def _serving_faults(manifest: Manifest, where: str) -> Iterator[DscError]:
    serving = manifest.serving
    if serving is not None:
        for name in ("sequences", "cache_blocks", "batch_tokens"):
            if getattr(serving, name) < 1:
                yield DscError(f"serving.{name} is not positive", where=where, got=str(getattr(serving, name)))
        if not serving.gpu:
            yield DscError("serving.gpu is empty", where=where, wanted="the kind of GPU it is for")
    for i, earlier in enumerate(manifest.migrated):
        if not 1 <= earlier.schema_version < SCHEMA_VERSION or not _is_sha256(earlier.content_hash):
            got = f"version {earlier.schema_version}, {earlier.content_hash!r}"
            yield DscError(f"migrated[{i}] is no earlier version with its hash", where=where, got=got)


def _is_sha256(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def _is_hashed(entry: FileEntry, holds_tensors: bool) -> bool:
    if entry.parts_sha256:
        return holds_tensors and not entry.sha256 and _is_sha256(entry.parts_sha256)
    return _is_sha256(entry.sha256)


def _tensor_faults(manifest: Manifest, name: str, tensor: TensorEntry, where: str) -> Iterator[DscError]:
    path = f"tensors[{name!r}]"
    if tensor.file not in manifest.files:
        near = nearest(tensor.file, manifest.files)
        yield DscError(f"{path}.file is not in files", where=where, got=tensor.file, try_=near)
        return
    if tensor.dtype not in DTYPE_BYTES or min(tensor.shape, default=0) < 0 or not _is_sha256(tensor.sha256):
        got = f"{tensor.dtype} {list(tensor.shape)}, sha256 {tensor.sha256!r}"
        yield DscError(f"{path} has no dtype, shape and sha256 that can be", where=where, got=got)
        return
    size, held = DTYPE_BYTES[tensor.dtype], manifest.files[tensor.file].bytes
    if tensor.bytes != math.prod(tensor.shape) * size:
        got = f"{tensor.bytes} for {tensor.dtype} {list(tensor.shape)}"
        yield DscError(f"{path}.bytes does not follow from its shape", where=where, got=got)
    if tensor.offset < 0 or tensor.offset % size or tensor.offset + tensor.bytes > held:
        wanted = f"within the {held} bytes of {tensor.file}, a multiple of {size}"
        got = f"{tensor.bytes} bytes at {tensor.offset}"
        yield DscError(f"{path}.offset is out of range", where=where, wanted=wanted, got=got)


def _overlaps(manifest: Manifest, where: str) -> Iterator[DscError]:
    ranges = sorted((t.file, t.offset, t.offset + t.bytes, name) for name, t in manifest.tensors.items() if t.bytes)
    for (file, _, end, before), (next_file, start, _, name) in pairwise(ranges):
        if file == next_file and start < end:
            yield DscError(f"tensors {before!r} and {name!r} overlap in {file}", where=where)


def _graph_faults(manifest: Manifest, where: str) -> Iterator[DscError]:
    for name, ranks in manifest.graphs.items():
        if len(ranks) != manifest.ranks:
            got = f"{len(ranks)} entries, ranks is {manifest.ranks}"
            yield DscError(f"graphs[{name!r}] has not one entry per rank", where=where, got=got)
        for rank, graph in enumerate(ranks):
            for file in (graph.onnx, graph.program):
                if file not in manifest.files:
                    yield DscError(f"graphs[{name!r}] names {file} for rank {rank}, which is not in files", where=where)
    for name, model in manifest.models.items():
        for phase, graph_name in model.phases.items():
            if graph_name not in manifest.graphs:
                near = nearest(graph_name, manifest.graphs)
                what = f"models[{name!r}].phases[{phase!r}] is {graph_name}, which is no graph"
                yield DscError(what, where=where, try_=near)
