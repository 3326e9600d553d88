"""Write a checkpoint of DeepSeek-R1's shapes and file format, with fewer layers and experts, in a few seconds a gigabyte.

python benchmarks/synthetic_checkpoint.py FOLDER [GIGABYTES]        default 8

Every matrix has the size it has in R1; the values are random: FP8 codes of normal numbers, scales of about 1e-4.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import torch

from dsc.compiler.config import read_config
from dsc.compiler.ir.weight import DTYPE_BYTES
from dsc.compiler.tensor_names import Expected, expected_tensors

ROOT = Path(__file__).resolve().parents[1]
SHARD_BYTES = 4_300_000_000  # as in the release
POOL_BYTES = 64 << 20
VOCABULARY = 16384  # a tenth of R1's: the rest of 8 GB is better spent on experts
NAMES = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float32": "F32"}


def make(folder: Path, gigabytes: float) -> int:
    """Write the checkpoint; its bytes. One dense layer and as many MoE layers as R1's 256 experts would make too large."""
    config = json.loads((ROOT / "compiler" / "known_models" / "deepseek-r1.json").read_text())
    layers = 3 if gigabytes >= 6 else 2
    config |= {"num_hidden_layers": layers, "first_k_dense_replace": 1, "vocab_size": VOCABULARY,
               "num_nextn_predict_layers": 0, "n_routed_experts": 16}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    smallest = _write_config(folder, config)
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    more = max(round((gigabytes * 1e9 - smallest) / expert / (layers - 1) / 8), 0)
    total = _write_config(folder, config | {"n_routed_experts": 16 + 8 * more})
    if shutil.disk_usage(folder).free < 3 * total:
        raise SystemExit(f"{folder}: a checkpoint of {total / 1e9:.1f} GB and its engine want three times that")
    shards = _shards(expected_tensors(read_config(folder)))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, names)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def _write_config(folder: Path, config: dict[str, object]) -> int:
    """Write config.json; bytes of the tensors it asks for."""
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return sum(_nbytes(expected) for expected in expected_tensors(read_config(folder)).values())


def _dtype(expected: Expected) -> str:
    return expected.dtypes[0]


def _nbytes(expected: Expected) -> int:
    return math.prod(expected.shape) * DTYPE_BYTES[_dtype(expected)]


def _shards(tensors: dict[str, Expected]) -> list[dict[str, Expected]]:
    """In the model's order, as many in a file as it takes."""
    shards: list[dict[str, Expected]] = [{}]
    size = 0
    for name, expected in tensors.items():
        if size + _nbytes(expected) > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = expected
        size += _nbytes(expected)
    return shards


def _write_shard(path: Path, tensors: dict[str, Expected]) -> None:
    """Sorted by dtype, then by name, as safetensors' own writer does."""
    order = ["float32", "bfloat16", "float8_e4m3fn"]
    entries, end = {}, 0
    names = sorted(tensors, key=lambda name: (order.index(_dtype(tensors[name])), name))
    for name in names:
        start, end = end, end + _nbytes(tensors[name])
        entries[name] = {
            "dtype": NAMES[_dtype(tensors[name])],
            "shape": tensors[name].shape,
            "data_offsets": [start, end],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    pools = {dtype: _pool(dtype) for dtype in order}
    with path.open("wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for number, name in enumerate(names):
            _write_tensor(file, pools[_dtype(tensors[name])], _nbytes(tensors[name]), number)


def _pool(dtype: str) -> memoryview:
    """Random values in their stored form, from which every tensor takes its own stretch."""
    generator = torch.Generator().manual_seed(len(dtype))
    values = torch.randn(POOL_BYTES // 4, generator=generator)
    if dtype == "float32":
        values = values.mul_(0.1).exp_().mul_(1e-4)
    elif dtype == "bfloat16":
        values = values.mul_(0.02).bfloat16()
    else:
        values = values.mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return values.view(torch.uint8).numpy().data


def _write_tensor(file, pool: memoryview, nbytes: int, number: int) -> None:  # type: ignore[no-untyped-def]
    start = number * 7919 * 4096 % len(pool)
    while nbytes:
        nbytes -= file.write(pool[start : start + nbytes])
        start = 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("gigabytes", type=float, nargs="?", default=8)
    arguments = parser.parse_args()
    print(f"{make(arguments.folder, arguments.gigabytes) / 1e9:.2f} GB in {arguments.folder}")
