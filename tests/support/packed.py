"""Checkpoints as AutoAWQ, GPTQ and compressed-tensors write them: a family's weights as packed integer codes.

    made = pack_checkpoint(tmp_path / "awq", make_checkpoint(tmp_path / "r1", "r1", quantization_config=ABSENT), "awq")
    made.folder    what dsc reads; made.twin the same values in float32, what transformers reads
    made.modules   each packed module's codes, zeros and scales before they were packed

Words are filled from the formats' definitions, one place of a word after the other, with nothing of dsc's own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.families import ABSENT, change_config, read_tensors, write_tensors

METHODS = ("awq", "gptq", "gptq_v2", "compressed-tensors")
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight columns, those in a word's bits from the lowest on


@dataclass(frozen=True)
class Module:
    """A packed module [N, K]: codes int [N, K] from 0 on, zeros int [N, G], scales [N, G] as stored, columns of a group."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group: int

    def values(self) -> torch.Tensor:
        """(code - zero) * scale, in float32, column by column."""
        columns = []
        for k in range(self.codes.shape[1]):
            zero, scale = self.zeros[:, k // self.group], self.scales[:, k // self.group].float()
            columns.append((self.codes[:, k] - zero).float() * scale)
        return torch.stack(columns, 1)


@dataclass(frozen=True)
class PackedCheckpoint:
    folder: Path
    twin: Path
    modules: dict[str, Module]


def pack_checkpoint(
    folder: Path,
    source: Path,
    method: str,
    *,
    bits: int = 4,
    group: int = 64,
    symmetric: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    packs: Callable[[str], bool] = lambda module: True,
    config: Mapping[str, Any] | None = None,
    floats: torch.dtype = torch.float16,
) -> PackedCheckpoint:
    """Pack the linear modules of a checkpoint in bfloat16.

    method  one of METHODS; group -1: one for each row
    packs   which modules; the others stay floats, as `floats`
    config  keys of quantization_config that are added or replaced
    """
    tensors, twin, stored, modules = read_tensors(source), {}, {}, {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if not is_linear(name) or not packs(module):
            stored[name] = value if value.dtype == torch.float32 else value.to(floats)
            twin[name] = stored[name].float()
            continue
        made = quantize(value.float(), bits, group, symmetric, scale_dtype, least=1 if method == "gptq" else 0)
        modules[module] = made
        stored |= {f"{module}.{end}": part for end, part in pack(made, method, bits, symmetric).items()}
        twin[name] = made.values()
    shutil.copytree(source, folder)
    shutil.copytree(source, folder.with_name(f"{folder.name}-float32"))
    write_tensors(folder, stored)
    write_tensors(folder.with_name(f"{folder.name}-float32"), twin)
    made_config = quantization_config(method, bits, group, symmetric)
    torch_dtype = str(floats).removeprefix("torch.")
    change_config(folder, quantization_config={**made_config, **(config or {})}, torch_dtype=torch_dtype)
    change_config(folder.with_name(f"{folder.name}-float32"), quantization_config=ABSENT, torch_dtype="float32")
    return PackedCheckpoint(folder, folder.with_name(f"{folder.name}-float32"), modules)


def is_linear(name: str) -> bool:
    """Whether tools pack a tensor: the projections, but not the router, the head, or what joins the MTP layer's inputs."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and not name.endswith("eh_proj.weight")


def quantize(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, scale_dtype: torch.dtype, least: int = 0
) -> Module:
    """Round a matrix to codes. least: the smallest zero that the format can store."""
    rows, columns = weight.shape
    group = columns if group == -1 else group
    most, codes, zeros, scales = 2**bits - 1, [], [], []
    for start in range(0, columns, group):
        part = weight[:, start : start + group]
        high, low = part.amax(1).clamp(min=0), part.amin(1).clamp(max=0)
        if symmetric:
            scale = (torch.maximum(high, -low) * 2 / most).to(scale_dtype)
            zero = torch.full((rows,), 2 ** (bits - 1))
        else:
            scale = ((high - low) / most).to(scale_dtype)
            zero = (-low / scale.float().clamp(min=1e-12)).round().clamp(least, most).int()
        steps = (part / scale.float().clamp(min=1e-12).unsqueeze(1)).round()
        codes.append((steps.int() + zero.unsqueeze(1)).clamp(0, most))
        zeros.append(zero.int())
        scales.append(scale)
    return Module(torch.cat(codes, 1), torch.stack(zeros, 1), torch.stack(scales, 1), group)


def pack(module: Module, method: str, bits: int, symmetric: bool) -> dict[str, torch.Tensor]:
    """The tensors of a module by the ends of their names."""
    rows, columns = module.codes.shape
    codes, zeros = module.codes.numpy().astype(np.uint32), module.zeros.numpy().astype(np.uint32)
    if method == "compressed-tensors":
        found = {
            "weight_packed": _words(codes, bits, along=1),
            "weight_scale": module.scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        return found if symmetric else {**found, "weight_zero_point": _words(zeros, bits, along=0)}
    scales = module.scales.T.contiguous()
    if method == "awq":
        assert bits == 4
        words = _words(codes.T, bits, along=1, order=AWQ_COLUMNS)
        return {"qweight": words, "qzeros": _words(zeros.T, bits, along=1, order=AWQ_COLUMNS), "scales": scales}
    stored = zeros if method == "gptq_v2" else zeros - 1
    return {
        "qweight": _words(codes.T, bits, along=0),
        "qzeros": _words(stored.T, bits, along=1),
        "scales": scales,
        "g_idx": torch.tensor([k // module.group for k in range(columns)], dtype=torch.int32),
    }


def _words(codes: np.ndarray, bits: int, along: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Codes in uint32 words, neighbours along an axis together; place i of a word holds the one that `order` names."""
    codes = codes if along == 0 else codes.T
    count = 32 // bits
    words = np.zeros((-(-len(codes) // count), codes.shape[1]), np.uint32)
    for word in range(len(words)):
        for place in range(count):
            index = word * count + (order[place] if order else place)
            if index < len(codes):
                words[word] |= codes[index] << np.uint32(place * bits)
    return torch.from_numpy(np.ascontiguousarray(words if along == 0 else words.T).view(np.int32))


def quantization_config(method: str, bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    """What the tools write into config.json."""
    if method == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": group, "version": "gemm", "zero_point": not symmetric,
                "modules_to_not_convert": None}  # fmt: skip
    if method.startswith("gptq"):
        return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False,
                "checkpoint_format": method, "true_sequential": True, "damp_percent": 0.01, "lm_head": False,
                "static_groups": False, "meta": {"quantizer": ["gptqmodel:2.2.0"]}, "pack_dtype": "int32"}  # fmt: skip
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "num_bits": bits, "observer": "minmax",
        "observer_kwargs": {}, "strategy": "channel" if group == -1 else "group", "symmetric": symmetric, "type": "int",
        "group_size": None if group == -1 else group,
    }  # fmt: skip
    scheme = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": scheme}, "ignore": ["lm_head"], "kv_cache_scheme": None}  # fmt: skip


def quantization_of(folder: Path) -> dict[str, Any]:
    """The quantization_config of a checkpoint."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found
