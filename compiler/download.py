"""A checkpoint from Hugging Face: its small files first, its weights only for a build that nothing in those refuses."""

from __future__ import annotations

import glob
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dsc.compiler.fit import check_fit
from dsc.compiler.hub import SMALL_FILES, WEIGHTS, fetch
from dsc.compiler.planning.sharding import check_parallel
from dsc.compiler.planning.source import Source, read_source
from dsc.compiler.planning.weights import planned_weights
from dsc.compiler.recipe import Recipe
from dsc.compiler.shards import INDEX, index_files
from dsc.compiler.staging import Staging
from dsc.compiler.tokenizer_check import check_tokenizer
from dsc.runtime.errors import DscError, raise_all
from dsc.runtime.spec import ModelSpec


class Need(NamedTuple):
    """Bytes that will be written below a folder, and what to try where they find no room."""

    label: str
    folder: Path
    bytes: int
    try_: str


def download_checkpoint(model: str, *, recipe: Recipe, output: Path) -> Path:
    """Fetch a repository into the Hugging Face cache and return its folder; what is already there is kept.

    output  the engine's folder, for which there must be room too
    raises  DscError where the hub refuses; and, with no weights fetched, for a config that is not supported, a recipe that
            does not fit or whose ranks cannot share the weights, missing or unknown tensors, a tokenizer that cannot be
            read, an output that cannot become an engine, a disk without room
    """
    folder = fetch(model, SMALL_FILES)
    source = read_source(str(folder), recipe)
    spec = _with_mtp(source, recipe)
    check_fit(recipe, spec)
    check_tokenizer(folder, recipe)
    planned = planned_weights(spec, recipe)
    check_parallel(spec, planned, recipe.parallel, recipe.where)
    engine = Staging(output, sum(weight.nbytes for weight in planned))
    engine.check_target()
    weights = _weights(folder)
    check_room(
        [
            Need("checkpoint", folder, max(source.bytes - _bytes_here(folder, weights), 0), "HF_HOME on another disk"),
            Need("engine", engine.target.parent, engine.missing_bytes(), "--output on another disk"),
        ]
    )
    return fetch(model, weights, revision=folder.name)


def check_room(needs: Sequence[Need]) -> None:
    """Raise DscError with every disk that has no room for all that will be written to it."""
    by_disk: dict[int, list[Need]] = defaultdict(list)
    for need in (need for need in needs if need.bytes):
        by_disk[disk_of(_there(need.folder))].append(need)
    raise_all("not enough disk space", [fault for on_one in by_disk.values() if (fault := _shortage(on_one))])


def _shortage(needs: Sequence[Need]) -> DscError | None:
    wanted, free = sum(need.bytes for need in needs), shutil.disk_usage(_there(needs[0].folder)).free
    if free >= wanted:
        return None
    return DscError(
        "not enough disk space",
        where=str(needs[0].folder),
        details=[(need.label, f"{need.bytes:,} bytes in {need.folder}") for need in needs],
        wanted=f"{wanted:,} bytes",
        got=f"{free:,} bytes free",
        try_=", or ".join(need.try_ for need in needs),
    )


def disk_of(folder: Path) -> int:
    """The number of the file system that a folder is on."""
    return folder.stat().st_dev


def _there(folder: Path) -> Path:
    """A folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _weights(folder: Path) -> list[str]:
    """Patterns of the files that hold weights: those the index names, or as they are named where there is none."""
    index = folder / INDEX
    return [glob.escape(file) for file in sorted(index_files(index))] if index.is_file() else list(WEIGHTS)


def _bytes_here(folder: Path, weights: Sequence[str]) -> int:
    """Bytes that need no download. A file of another revision counts: most revisions change small files alone."""
    found = [path for pattern in weights for path in folder.parent.glob(f"*/{pattern}") if path.is_file()]
    return sum({path.name: path.stat().st_size for path in found}.values())


def _with_mtp(source: Source, recipe: Recipe) -> ModelSpec:
    """Where neither index nor header tells, an MTP layer may be stored that config.json does not declare."""
    if source.read_from != "config.json":
        return source.spec
    return replace(source.spec, num_mtp_layers=int(recipe.mtp.enabled))
