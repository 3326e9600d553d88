"""What one writes first: shard by shard with safetensors and torch, no attention to memory or speed. For comparison only.

python benchmarks/plain_loop.py CHECKPOINT OUTPUT wint4|wint8|fp8

Round to nearest: wint4 in groups of 128 on one grid, wint8 a row; fp8 copies. No hashes, no errors measured, experts unstacked.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SCALE = "_scale_inv"


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """128x128 blocks to float32."""
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


def quantize(x: torch.Tensor, format_: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales."""
    groups = x.view(x.shape[0], -1, 128 if format_ == "wint4" else x.shape[1])
    largest = 7 if format_ == "wint4" else 127
    scales = (groups.abs().amax(-1) / largest).clamp_min(1e-20).bfloat16()
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-largest, largest).to(torch.int8).flatten(1)
    if format_ == "wint4":
        codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    return codes, scales


def main() -> None:
    """One output file for each shard, flushed to the disk."""
    model, output, format_ = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    output.mkdir()
    where = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: safe_open(model / name, "pt") for name in sorted(set(where.values()))}
    for file, shard in files.items():
        stored = {}
        for name in shard.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
            if name.endswith(SCALE) and format_ != "fp8":
                continue
            value = shard.get_tensor(name)  # type: ignore[no-untyped-call]
            if name + SCALE in where and format_ != "fp8":
                scales = files[where[name + SCALE]].get_tensor(name + SCALE)  # type: ignore[no-untyped-call]
                stored[f"{name}.packed"], stored[f"{name}.scales"] = quantize(dequantize(value, scales), format_)
            else:
                stored[name] = value
        save_file(stored, output / file)
        with (output / file).open("rb") as written:
            os.fsync(written.fileno())


if __name__ == "__main__":
    main()
