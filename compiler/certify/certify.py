"""`dsc verify`: an engine against its checkpoint: hashes, stored bytes, and numerics with one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dsc.compiler.certify.device import open_device
from dsc.compiler.certify.numerics import Numerics, measure
from dsc.compiler.certify.stored import compare_stored, raise_differences
from dsc.compiler.certify.text import WINDOW_TOKENS, WINDOWS, read_windows
from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.emit import gather
from dsc.compiler.graphs import make_graphs
from dsc.compiler.hub import find_model
from dsc.compiler.progress import Progress
from dsc.compiler.recipe import Recipe, recipe_from_json
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.certificate import SCHEMA_VERSION, Certificate, Stored, Text
from dsc.runtime.errors import DscError, raise_all
from dsc.runtime.manifest import NAME


def verify_engine(
    path: Path,
    model: str | None = None,
    text: Path | None = None,
    *,
    windows: int = WINDOWS,
    window_tokens: int = WINDOW_TOKENS,
    device: str | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Check an engine's hashes, its stored tensors against the checkpoint, its numerics against the unquantized model.

    model   checkpoint folder or name; None: the recipe's
    device  where engine and reference are run, layer by layer; None: the CPU
    returns the certificate, which then lies in the engine's local/
    raises  DscError naming every tensor whose bytes are not what they must be, before any numerics
    """
    progress = progress or Progress(quiet=True)
    folder = EngineFolder.open(path)
    at, engine = open_device(folder, device)
    progress.step("hashes", sum(file.bytes for file in folder.manifest.files.values()))
    folder.verify_hashes(progress.advance)
    recipe = recipe_from_json(folder.manifest.recipe, str(path / NAME))
    checkpoint = open_checkpoint(folder, recipe, model)
    weights = gather(make_graphs(recipe, checkpoint)[0])
    progress.step("weights", sum(checkpoint.files().values()))
    raise_differences(folder, compare_stored(folder, weights, checkpoint, progress.advance))
    stored = Stored(len(weights), sum(values.nbytes for values in weights.values()), *_saturation(folder))
    tokens, described = read_windows(folder, text, windows, window_tokens)
    progress.step("layers")
    numerics = measure(folder, recipe, checkpoint, tokens, at, engine)
    certificate = _certificate(folder, checkpoint, described, stored, numerics, device or "cpu")
    certificate.write(path)
    return certificate


def certify_build(path: Path, recipe: Recipe, checkpoint: Checkpoint) -> Certificate:
    """The certificate of an engine that was just built, held to the recipe's budgets. Raises DscError where it exceeds one."""
    folder = EngineFolder.open(path)
    tokens, described = read_windows(folder, None)
    numerics = measure(folder, recipe, checkpoint, tokens, *open_device(folder, None))
    certificate = _certificate(folder, checkpoint, described, Stored(0, 0, *_saturation(folder)), numerics, "cpu")
    check_budget(certificate, recipe.verify or {}, recipe.where)
    certificate.write(path)
    return certificate


def _certificate(
    folder: EngineFolder, checkpoint: Checkpoint, text: Text, stored: Stored, numerics: Numerics, device: str
) -> Certificate:
    return Certificate(
        schema_version=SCHEMA_VERSION,
        engine=folder.content_hash,
        checkpoint=checkpoint.folder.resolve().name,
        device=f"{device}, layer by layer",
        text=text,
        stored=stored,
        layers=numerics.layers,
        end_to_end=numerics.end_to_end,
        mtp=numerics.mtp,
    )


def open_checkpoint(folder: EngineFolder, recipe: Recipe, model: str | None) -> Checkpoint:
    """The checkpoint an engine was made of. Raises DscError where it is another model's, or the weights were random."""
    if model is None and recipe.model.startswith("random weights"):
        raise DscError("an engine of random weights has no checkpoint", where=str(folder.path), got=recipe.model)
    found = find_model(model or recipe.model)
    checkpoint = Checkpoint.open(found, read_config(found), mtp=recipe.mtp.enabled)
    wanted, got = folder.spec.to_json(), checkpoint.spec.to_json()
    faults = [
        DscError(f"{key} differs from the engine's", where=str(found), wanted=str(wanted[key]), got=str(got[key]))
        for key in wanted
        if wanted[key] != got[key]
    ]
    raise_all(f"{found} is not the checkpoint of {folder.path}", faults)
    return checkpoint


def check_budget(certificate: Certificate, budgets: Mapping[str, float], where: str) -> None:
    """Raise DscError where a certificate exceeds `max_kl`, or holds anything that is not finite."""
    faults = []
    kl = certificate.end_to_end.kl
    if "max_kl" in budgets and not kl <= budgets["max_kl"]:
        worst = max(certificate.layers, key=lambda layer: layer.alone.relative_error)
        faults.append(
            DscError(
                "the engine is too far from the unquantized model",
                where=where,
                details=[("layer", f"{worst.layer} adds most: relative error {worst.alone.relative_error:.3g}")],
                wanted=f"max_kl: {budgets['max_kl']:g}",
                got=certificate.end_to_end.text(),
                try_="a finer format for the experts, or smaller groups",
            )
        )
    bad = [layer.layer for layer in certificate.layers if layer.reached.non_finite]
    if bad or certificate.end_to_end.non_finite:
        got = f"layers {', '.join(map(str, bad))}" if bad else f"{certificate.end_to_end.non_finite} logits"
        faults.append(DscError("the engine computes NaN or infinity", where=where, got=got))
    raise_all(where, faults)


def _saturation(folder: EngineFolder) -> tuple[int, int]:
    records: Sequence[Mapping[str, int]] = folder.report["weights"]
    return sum(r["saturated"] for r in records), sum(r["zero_groups"] for r in records)
