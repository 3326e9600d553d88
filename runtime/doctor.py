"""What a machine has for running engines: packages, driver, GPUs and what may run on them, memory, the disk's rate."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.cache import free_memory_bytes
from dsc.runtime.errors import DscError

PACKAGES = ("dsc", "torch", "numpy", "safetensors", "tokenizers", "jinja2")  # to run an engine on a CPU
GPU_PACKAGES = ("cuda-bindings",)  # and on a GPU
BUILD_PACKAGES = ("onnx", "onnx-graphsurgeon", "triton", "transformers", "tensorrt")  # to build or compare
PROBE_BYTES = 256 << 20
PIECE_BYTES = 8 << 20


def examine(folder: Path | None = None) -> dict[str, Any]:
    """Facts of this machine as JSON data; with a folder, the rate its disk is read at, and an engine's demands if it is one."""
    data: dict[str, Any] = {
        "system": {
            "platform": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "cpu_cores": os.cpu_count(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "free_memory_bytes": free_memory_bytes(),
        },
        "packages": {name: _version(name) for name in (*PACKAGES, *GPU_PACKAGES, *BUILD_PACKAGES)},
        "driver": driver_version(),
        "gpus": gpus(),
        "peers": peers(),
    }
    place = folder or Path.cwd()
    data["disk"] = {"folder": str(place), "read_bytes_per_s": disk_rate(place)}
    if folder is not None and (folder / "manifest.json").is_file():
        data["engine"] = engine_demands(EngineFolder.open(folder), data)
    return data


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The driver's version where the system tells it, and the newest CUDA it runs; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return None
    told = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.[\d.]+)\s", told.read_text(encoding="utf-8")) if told.is_file() else None
    cuda = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return f"{found[1]}, {cuda}" if found else cuda


def gpus() -> list[dict[str, Any]]:
    """Every GPU that torch sees, with the targets whose engines it runs."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "targets": targets_of(properties.major, properties.minor),
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": total,
                "free_bytes": free,
            }
        )
    return found


def targets_of(major: int, minor: int) -> list[str]:
    """Targets whose cubins run on a capability: an `a` target on its own only, others on later ones of their major."""
    return {8: ["sm_80"], 9: ["sm_90a"] if minor == 0 else [], 10: ["sm_100a"] if minor == 0 else []}.get(major, [])


def peers() -> list[list[bool]]:
    """Whether GPU i reaches the memory of GPU j."""
    count = torch.cuda.device_count()
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def disk_rate(folder: Path) -> float | None:
    """Bytes a second of a file that was just written and dropped from memory; None where nothing can be written."""
    piece = bytearray(os.urandom(PIECE_BYTES))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            for _ in range(PROBE_BYTES // PIECE_BYTES):
                file.write(piece)
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            while file.readinto(piece):
                pass
            return PROBE_BYTES / (time.perf_counter() - begin)
    except OSError:
        return None


def engine_demands(engine: EngineFolder, machine: dict[str, Any]) -> dict[str, Any]:
    """What an engine needs here: its target, weights, the cache of its limits, and faults that keep it from running."""
    manifest = engine.manifest
    layers = sum(len(model.layers) for model in manifest.models.values())
    weights = sum(entry.bytes for entry in manifest.tensors.values())
    sequence = (
        -(-manifest.limits.context_tokens // manifest.kv_cache.block_tokens) * manifest.kv_cache.block_bytes * layers
    )
    faults = []
    if manifest.target == "cpu":
        free = machine["system"]["free_memory_bytes"]
    else:
        able = [gpu for gpu in machine["gpus"] if manifest.target in gpu["targets"]]
        free = max((gpu["free_bytes"] for gpu in able), default=0)
        if not able:
            faults.append(f"no GPU here runs {manifest.target}")
        if machine["packages"]["cuda-bindings"] is None:
            faults.append("cuda-bindings is not installed: pip install 'dsc[gpu]'")
    if free and weights + sequence > free:
        faults.append(f"weights and one full sequence take {weights + sequence:,} bytes, {free:,} are free")
    rate = machine["disk"]["read_bytes_per_s"]
    return {
        "target": manifest.target,
        "weight_bytes": weights,
        "sequence_cache_bytes": sequence,
        "full_cache_bytes": sequence * manifest.limits.sequences,
        "load_seconds_from_disk": weights / rate if rate else None,
        "faults": faults,
    }


def report(data: dict[str, Any]) -> list[str]:
    """The data as lines of text."""
    system, packages = data["system"], data["packages"]
    lines = [
        f"system      {system['platform']}, Python {system['python']}, {system['cpu_cores']} cores ({system['cpu']}), "
        f"{system['free_memory_bytes'] / 1e9:.1f} GB of memory free",
        "packages    " + ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items()),
        f"driver      {data['driver'] or 'none'}",
    ]
    for index, gpu in enumerate(data["gpus"]):
        targets = ", ".join(gpu["targets"]) or "no target"
        memory = f"{gpu['free_bytes'] / 1e9:.1f} of {gpu['memory_bytes'] / 1e9:.1f} GB free"
        reached = [str(j) for j, reaches in enumerate(data["peers"][index]) if reaches and j != index]
        peers_ = f", reaches GPU {', '.join(reached)}" if reached else ""
        lines.append(f"GPU {index}       {gpu['name']}, {gpu['capability']}: {targets}; {memory}{peers_}")
    if not data["gpus"]:
        lines.append("GPUs        none")
    rate = data["disk"]["read_bytes_per_s"]
    lines.append(
        f"disk        {data['disk']['folder']}: " + (f"{rate / 1e9:.2f} GB/s" if rate else "cannot be written")
    )
    if "engine" in data:
        engine = data["engine"]
        lines.append(
            f"engine      {engine['target']}, weights {engine['weight_bytes'] / 1e9:.2f} GB, cache "
            f"{engine['sequence_cache_bytes'] / 1e9:.2f} GB a full sequence, {engine['full_cache_bytes'] / 1e9:.2f} GB for all"
        )
        lines += [f"fault       {fault}" for fault in engine["faults"]] or ["            it runs here"]
    missing = [name for name in PACKAGES if packages[name] is None]
    lines += [f"fault       {name} is not installed" for name in missing]
    return lines


def check_folder(folder: Path | None) -> None:
    """Raise DscError for a folder that is not there."""
    if folder is not None and not folder.is_dir():
        raise DscError("no such folder", where=str(folder))
