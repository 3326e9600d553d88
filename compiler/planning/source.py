"""The model a plan is for: from config.json alone, with the index, or with the headers of what is downloaded already."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dsc.compiler.checkpoint import Checkpoint, check_names
from dsc.compiler.config import read_config
from dsc.compiler.model_shapes import KNOWN, read_shape
from dsc.compiler.planning.weights import source_bytes
from dsc.compiler.recipe import Recipe
from dsc.compiler.shards import INDEX, read_index
from dsc.runtime.errors import DscError
from dsc.runtime.spec import ModelSpec

NOT_KNOWN = (
    "the source's bytes are those of weights packed as config.json says: which ones are, and whether an MTP layer is there, "
    f"the tensors' names tell ({INDEX})"
)


@dataclass(frozen=True)
class Source:
    """A model and its checkpoint's bytes.

    read_from  what these facts come from: "config.json", "config.json and index" or "headers of N files"
    """

    spec: ModelSpec
    bytes: int
    read_from: str
    notes: tuple[str, ...] = ()


def read_source(model: str, recipe: Recipe) -> Source:
    """What is known of a model without its weights.

    model   a config.json, a folder with one, a known model's name or a cached repository
    raises  DscError with every fault of what is there: config, index, headers
    """
    path = Path(model).expanduser()
    if path.is_file():
        return _of_config(read_config(path.parent, path.name), "config.json", recipe)
    try:
        spec, folder = read_shape(model)
    except DscError as error:
        if path.exists() or "/" not in model:
            raise
        try_ = f"hf download {model} config.json {INDEX}, which is small, and plan again; or --model config.json"
        raise DscError(error.what, where=error.where, details=error.details, try_=try_) from error
    if not path.is_dir() and model in KNOWN:
        return _of_config(spec, "config.json that comes with dsc", recipe)
    return _of_folder(spec, folder, recipe)


def _of_config(spec: ModelSpec, read_from: str, recipe: Recipe) -> Source:
    size = source_bytes(spec)
    notes = () if spec.source.packing is None else (NOT_KNOWN,)
    return Source(spec if recipe.mtp.enabled else replace(spec, num_mtp_layers=0), size, read_from, notes)


def _of_folder(spec: ModelSpec, folder: Path, recipe: Recipe) -> Source:
    """A folder with all its shards is read by their headers, one with an index by its names."""
    files, total = read_index(folder / INDEX) if (folder / INDEX).is_file() else ({}, 0)
    absent = [name for name in files if not (folder / name).is_file()]
    if not absent and any(folder.glob("*.safetensors")):
        checkpoint = Checkpoint.open(folder, spec, mtp=recipe.mtp.enabled)
        sizes = checkpoint.files()
        return Source(checkpoint.spec, sum(sizes.values()), f"headers of {len(sizes)} files", checkpoint.notes)
    if not files:
        return _of_config(spec, "config.json", recipe)
    names = {name for held in files.values() for name in held}
    found, notes = check_names(folder, spec, names, mtp=recipe.mtp.enabled)
    if len(absent) < len(files):
        notes = (*notes, f"{len(absent)} of {len(files)} files are not here yet")
    return Source(found, total or source_bytes(found), "config.json and index", notes)
