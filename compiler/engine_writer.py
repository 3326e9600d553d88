"""Write an engine folder: graphs, programs, tokenizer, report, and last the manifest with the hash of everything."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from dsc.compiler.emit import Emission
from dsc.compiler.ir.graph import Graph, dtype_of, expression_of, weight_class_of
from dsc.compiler.ir.weight import DTYPE_BYTES, Expression, Quantize, WeightValues
from dsc.compiler.ledger import Ledger
from dsc.compiler.lower import lower
from dsc.compiler.memory import memory_report
from dsc.compiler.pipeline import PipelineReport
from dsc.compiler.recipe import Recipe
from dsc.compiler.staging import JOURNAL
from dsc.compiler.targets import Lowered, Target
from dsc.runtime import codec
from dsc.runtime.disk import sync
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import (
    NAME,
    REPORT,
    SCHEMA_VERSION,
    CacheLayout,
    FileEntry,
    GraphFiles,
    Manifest,
    Model,
    Mtp,
    Serving,
    TensorEntry,
)
from dsc.runtime.program import Program
from dsc.runtime.spec import ModelSpec

# What the runtime reads of a checkpoint's tokenizer; a checkpoint without tokenizer.json makes an engine for token ids.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# Packages whose version can change an engine's bytes.
TOOLCHAIN = ("dsc", "numpy", "onnx", "onnx-graphsurgeon", "torch")
_PIECE = 1 << 24  # bytes hashed at a time


@dataclass(frozen=True)
class EngineContents:
    """What goes into an engine whose weights are written already.

    graphs      final graphs in the order main, mtp, sample; `dsc.compiler.emit.place` has told them where weights lie
    checkpoint  folder the tokenizer is copied from
    notes       what the build told its user besides
    serving     what the planner suggests to serve with, None where it suggests nothing
    """

    spec: ModelSpec
    recipe: Recipe
    graphs: Sequence[Graph]
    emission: Emission
    pipeline: PipelineReport
    ledger: Ledger
    checkpoint: Path
    notes: Sequence[str] = ()
    serving: Serving | None = None


def write_engine(folder: Path, contents: EngineContents, target: Target) -> Manifest:
    """Complete a folder that holds the weights. The manifest comes last: without it a folder is no engine.

    Same contents, same bytes: no time, path or host name is written, keys are sorted.

    target  gives programs their steps; what it writes under kernels/ is hashed with the rest
    """
    ranks = contents.recipe.parallel.num_ranks
    files = {graph.name: _graph_files(graph.name, ranks) for graph in contents.graphs}
    lowered = target.finish([_write_graph(folder / files[g.name].onnx, g) for g in contents.graphs], folder)
    (folder / "program").mkdir(exist_ok=True)
    for program in lowered.programs:
        (folder / files[program.name].program).write_bytes(codec.dump_json(program.to_json()))
    _copy_tokenizer(folder / "tokenizer", contents.checkpoint)
    (folder / REPORT).write_bytes(codec.dump_json(make_report(contents, lowered)))
    graphs = {name: (of_all,) * ranks for name, of_all in files.items()}
    manifest = _manifest(contents, graphs, _file_entries(folder, contents.emission.parts_sha256))
    _write_synced(folder / NAME, codec.dump_json(manifest.to_json()))
    return manifest


def make_report(contents: EngineContents, lowered: Lowered) -> dict[str, Any]:
    """report.json.

    notes    what the build told its user: facts of the checkpoint, weights that stay unquantized
    passes   in order: {name, options, allowed, graphs: [{graph, model, phase, expected, found, changed, declined, notices}]}
    nodes    {graph: [{node, op}]}, what the runtime has to run
    weights  one record per weight (dsc.compiler.weight_record): format, bytes, errors, how it came about
    ledger   {consumed, derived, dropped}: what became of every tensor of the checkpoint
    memory   {graph: {arena_bytes, live_bytes, ...}} (dsc.compiler.memory)
    """
    return {
        "notes": list(contents.notes),
        **contents.pipeline.to_json(),
        "weights": [asdict(record) for record in contents.emission.weights],
        "ledger": contents.ledger.to_json(),
        "memory": {program.name: memory_report(program) for program in lowered.programs},
        "kernels": lowered.kernels,
    }


def weight_bytes(graphs: Sequence[Graph]) -> int:
    """Bytes of all weights the graphs store, each once and with its alignment: what a disk must hold."""
    sizes = {name: expression_of(tensor).nbytes for graph in graphs for name, tensor in graph.weights().items()}
    return sum(-(-size // 64) * 64 for size in sizes.values())


def _graph_files(name: str, ranks: int) -> GraphFiles:
    """Files of a graph: one rank's, or those of every rank alike."""
    stem = f"{name}.rank0" if ranks == 1 else name
    return GraphFiles(f"{stem}.onnx", f"program/{stem}.json")


def _write_graph(file: Path, graph: Graph) -> Program:
    """Write a graph's .onnx; its program, tied to it."""
    model = graph.to_onnx()
    for node in model.graph.node:
        attributes = sorted(node.attribute, key=lambda attribute: str(attribute.name))
        del node.attribute[:]
        node.attribute.extend(attributes)
    content: bytes = model.SerializeToString(deterministic=True)
    file.write_bytes(content)
    onnx.checker.check_model(str(file))  # external data included
    return lower(graph, hashlib.sha256(content).hexdigest())


def _copy_tokenizer(folder: Path, checkpoint: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)


def _file_entries(folder: Path, parts_sha256: Mapping[str, str]) -> dict[str, FileEntry]:
    """Size and hash of every file of the folder but the manifest and the journal, synced to the disk on the way."""
    entries = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        path = file.relative_to(folder).as_posix()
        if path not in (NAME, JOURNAL):
            size = file.stat().st_size
            if path in parts_sha256:
                entries[path] = FileEntry(size, parts_sha256=parts_sha256[path])
            else:
                entries[path] = FileEntry(size, _sha256(file))
            sync(file)
    return entries


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _write_synced(file: Path, content: bytes) -> None:
    """Through another name, so that a cut write is no manifest."""
    beside = file.with_name(f"{file.name}.partial")
    beside.write_bytes(content)
    sync(beside)
    beside.rename(file)


def _manifest(
    contents: EngineContents, graphs: dict[str, tuple[GraphFiles, ...]], files: dict[str, FileEntry]
) -> Manifest:
    recipe, spec = contents.recipe, contents.spec
    token_bytes = spec.cache_width * DTYPE_BYTES[recipe.kv_cache.dtype]
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        spec=spec,
        recipe=recipe.to_json(),
        target=recipe.target,
        ranks=recipe.parallel.num_ranks,
        parallel=recipe.parallel,
        limits=recipe.limits,
        decode_buckets=recipe.decode_buckets,
        kv_cache=CacheLayout(
            dtype=recipe.kv_cache.dtype,
            block_tokens=recipe.kv_cache.block_tokens,
            latent=spec.kv_lora_rank,
            rope=spec.qk_rope_head_dim,
            block_bytes=recipe.kv_cache.block_tokens * token_bytes,
            rope_order="interleaved",
        ),
        mtp=Mtp(recipe.mtp.enabled, recipe.mtp.drafts),
        models=_models(contents.graphs),
        graphs=graphs,
        tensors=_tensor_entries(contents),
        files=files,
        toolchain=toolchain(),
        serving=contents.serving,
    )
    # Read back what will be written: a fault is found here, not by the first who loads the engine.
    return Manifest.from_json(manifest.to_json(), NAME)


def toolchain() -> dict[str, str]:
    """Versions of what can change an engine's bytes."""
    return {name: _version(name) for name in TOOLCHAIN}


def _version(package: str) -> str:
    """A package's version without its local part: torch's CPU and CUDA builds write the same bytes."""
    return importlib.metadata.version(package).partition("+")[0]


def _models(graphs: Sequence[Graph]) -> dict[str, Model]:
    models: dict[str, Model] = {}
    for graph in graphs:
        before = models.get(graph.info.model, Model(graph.info.layers, {}))
        models[graph.info.model] = Model(before.layers, {**before.phases, graph.info.phase: graph.name})
    return models


def _tensor_entries(contents: EngineContents) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    users: dict[str, set[str]] = {}
    for graph in contents.graphs:
        for name, tensor in graph.weights().items():
            users.setdefault(name, set()).add(graph.info.model)
            values: WeightValues = tensor._values
            if values.placement is None:
                raise DscError("was not written", where=f"{graph.name}: weight {name}")
            format_, part = _stored_as(expression_of(tensor))
            entry = TensorEntry(
                file=values.placement.location,
                offset=values.placement.offset,
                bytes=values.placement.length,
                dtype=dtype_of(tensor),
                shape=tuple(expression_of(tensor).shape),
                sha256=contents.emission.tensor_sha256[name],
                weight_class=weight_class_of(tensor),
                format=format_,
                part=part,
                models=tuple(sorted(users[name])),
                layout="row_major",
            )
            found[name] = entry
    return found


def _stored_as(expression: Expression) -> tuple[str, str]:
    """Format and part of a stored tensor; where the recipe has no say, its dtype stands for a format."""
    if isinstance(expression, Quantize):
        return expression.format, expression.part
    return expression.dtype, "data"
