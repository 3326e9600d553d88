"""Damaged engines: bytes changed in place, and manifests rewritten as if the damage had happened while it was built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from dsc.runtime import codec


def change_tensor(engine: Path, name: str, change: Callable[[torch.Tensor], None]) -> None:
    """Let `change` edit a stored tensor, as its dtype and shape, in its file."""
    entry = json.loads((engine / "manifest.json").read_text())["tensors"][name]
    with (engine / entry["file"]).open("r+b") as file:
        file.seek(entry["offset"])
        data = bytearray(file.read(entry["bytes"]))
        change(torch.frombuffer(data, dtype=getattr(torch, entry["dtype"])).view(entry["shape"]))
        file.seek(entry["offset"])
        file.write(data)


def rehash(engine: Path) -> None:
    """Make the manifest say that the bytes there are right."""
    path = engine / "manifest.json"
    manifest = json.loads(path.read_text())
    for tensor in manifest["tensors"].values():
        with (engine / tensor["file"]).open("rb") as file:
            file.seek(tensor["offset"])
            tensor["sha256"] = hashlib.sha256(file.read(tensor["bytes"])).hexdigest()
    for name, file_entry in manifest["files"].items():
        content = (engine / name).read_bytes()
        places = [(t["offset"], t["bytes"]) for t in manifest["tensors"].values() if t["file"] == name]
        digest = {"parts_sha256": parts_sha256(content, places)} if places else {"sha256": _sha256(content).hex()}
        file_entry.update(bytes=len(content), **digest)
    path.write_bytes(codec.dump_json(manifest))


def parts_sha256(content: bytes, places: Iterable[tuple[int, int]]) -> str:
    """What a manifest says of a file with tensors at (byte, length): of it with their digests in their places."""
    for offset, length in sorted(places, reverse=True):
        content = content[:offset] + _sha256(content[offset : offset + length]) + content[offset + length :]
    return _sha256(content).hex()


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def flip_byte(at: int) -> Callable[[torch.Tensor], None]:
    """Change one bit of one byte."""

    def change(tensor: torch.Tensor) -> None:
        tensor.view(-1).view(torch.uint8)[at] ^= 1

    return change


def double_at(*index: int) -> Callable[[torch.Tensor], None]:
    """Double one value."""

    def change(tensor: torch.Tensor) -> None:
        tensor[index] = tensor[index] * 2

    return change


def swap_experts(a: int, b: int) -> Callable[[torch.Tensor], None]:
    """Exchange two matrices of a stack."""

    def change(tensor: torch.Tensor) -> None:
        bytes_ = tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor
        kept = bytes_[a].clone()
        bytes_[a] = bytes_[b]
        bytes_[b] = kept

    return change
