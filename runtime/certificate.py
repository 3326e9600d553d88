"""The numerics certificate: how far an engine is from its unquantized model. Measured after the build, kept in local/."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsc.runtime import codec
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import LOCAL

NAME = "certificate.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RowErrors:
    """Rows of an engine compared with the reference's.

    relative_error   Frobenius norm of the difference over the reference's; worst_row_error the largest of one row
    cosine           of all values as one vector; worst_row_cosine the smallest of one row
    non_finite       NaN and infinite values, which count as 0 in the rest; largest is the largest magnitude
    """

    relative_error: float
    worst_row_error: float
    cosine: float
    worst_row_cosine: float
    non_finite: int
    largest: float


@dataclass(frozen=True)
class LayerErrors:
    """The residual stream after a decoder layer.

    reached  by the engine from its own start: errors of all layers so far
    alone    by this layer of the engine from the reference's input: what the layer itself adds
    """

    model: str
    layer: int
    reached: RowErrors
    alone: RowErrors


@dataclass(frozen=True)
class EndToEnd:
    """Predictions of every token that has a successor. KL is KL(reference || engine) in nats a token.

    top1        part of the tokens whose likeliest successor is the reference's
    non_finite  NaN and infinite logits
    """

    tokens: int
    nats: float
    reference_nats: float
    kl: float
    worst_kl: float
    top1: float
    non_finite: int

    def text(self) -> str:
        """In a line."""
        return f"KL {self.kl:.4f} nats a token, top-1 agreement {self.top1:.2%} over {self.tokens:,} tokens"


@dataclass(frozen=True)
class Acceptance:
    """Part of the tokens that MTP's first draft gets as main would have it, for the engine and for the reference."""

    tokens: int
    engine: float
    reference: float


@dataclass(frozen=True)
class Text:
    """What was fed: its name, sha256 of its token ids as int32, and how it was cut."""

    name: str
    sha256: str
    windows: int
    tokens: int


@dataclass(frozen=True)
class Stored:
    """Tensors whose bytes were compared with what the recipe makes of the checkpoint, all equal; 0 if none were.

    saturated, zero_groups  over all weights, as the build counted them
    """

    tensors: int
    bytes: int
    saturated: int
    zero_groups: int


@dataclass(frozen=True)
class Certificate:
    """engine is the content hash it was measured for; device where and how it was run: "cuda, layer by layer"."""

    schema_version: int
    engine: str
    checkpoint: str
    device: str
    text: Text
    stored: Stored
    layers: tuple[LayerErrors, ...]
    end_to_end: EndToEnd
    mtp: Acceptance | None

    def to_json(self) -> dict[str, Any]:
        """JSON data that `read` reads back, numbers to six digits."""
        data: dict[str, Any] = _rounded(codec.encode(self))
        return data

    def write(self, engine: Path) -> Path:
        """Put it into an engine's folder, replacing another; returns the file. DscError where that leads out of the engine."""
        folder = engine / LOCAL
        if folder.is_symlink():
            raise DscError(
                "leads out of the engine", where=str(folder), wanted="a folder", got=f"a link to {folder.resolve()}"
            )
        folder.mkdir(exist_ok=True)
        beside, file = folder / f"{NAME}.partial", folder / NAME
        beside.unlink(missing_ok=True)  # were it a link, it would be written through
        beside.write_bytes(codec.dump_json(self.to_json()))
        os.replace(beside, file)
        return file


def read(folder: EngineFolder) -> Certificate | None:
    """An engine's certificate, None where it has none. Raises DscError for one of another engine or version."""
    file = folder.path / LOCAL / NAME
    if not file.is_file():
        return None
    certificate = codec.decode(Certificate, codec.read_json(file, str(file)), str(file))
    if certificate.schema_version != SCHEMA_VERSION:
        raise DscError(
            "is of another version", where=str(file), wanted=str(SCHEMA_VERSION), got=str(certificate.schema_version)
        )
    earlier = [version.content_hash for version in folder.manifest.migrated]  # a migration changes no weight
    if certificate.engine not in (folder.content_hash, *earlier):
        raise DscError(
            "belongs to another engine",
            where=str(file),
            wanted=f"content hash {folder.content_hash}",
            got=f"content hash {certificate.engine}",
            try_=f"dsc verify {folder.path}",
        )
    return certificate


def _rounded(data: Any) -> Any:
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, dict):
        return {key: _rounded(item) for key, item in data.items()}
    return [_rounded(item) for item in data] if isinstance(data, list) else data
