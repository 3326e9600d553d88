"""A model of random weights: the interface of a checkpoint, and no file behind it.

Every tensor that the passes want quantized is drawn in its stored format, so a build runs as fast as numbers are made:
nothing is ever quantized. Values are N(0, 0.02), so that random tokens spread over the experts; norms are 1, embeddings
N(0, 1) (a token must weigh more than the mean of its context), the router's bias N(0, 0.001).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsc.compiler.ir.simplify import simplify
from dsc.compiler.ir.weight import DTYPE_BYTES, Expression, Quantize, Random, Source, Stack
from dsc.compiler.model_shapes import first_layers, read_shape
from dsc.compiler.random_numbers import data_table, draw, float_table, scale_table
from dsc.compiler.safetensors_file import TensorInfo
from dsc.compiler.tensor_names import SCALE_SUFFIX, Expected, expected_tensors
from dsc.plugins.formats import Format
from dsc.runtime.spec import ModelSpec, SourceFormat

DEVIATION = 0.02
EMBEDDING_DEVIATION = 1.0
BIAS_DEVIATION = 0.001
FP8 = Format("fp8")


@dataclass(frozen=True)
class _Made:
    """How a tensor is drawn: from which table, in which shape. Without a table it is ones."""

    dtype: str
    shape: tuple[int, ...]
    table: torch.Tensor | None


class RandomCheckpoint:
    """See `dsc.compiler.checkpoint.Checkpoint`. `folder` is where config.json lies, for the tokenizer beside it.

    What a model stores packed is drawn as bfloat16: of random weights none is quantized, so none need be dequantized.
    """

    def __init__(self, folder: Path, spec: ModelSpec, seed: int = 0) -> None:
        if spec.source.packing is not None:
            spec = replace(spec, source=SourceFormat("bf16"))
        self.folder, self.spec = folder, spec
        self.expected = expected_tensors(spec)
        self.dropped: dict[str, str] = {}
        self.notes = (f"weights are random: {describe(spec)}",)
        self._seed = seed
        self._made = {name: _made(name, self.expected[name], spec) for name in self.names()}

    @classmethod
    def open(cls, model: str, *, layers: int | None = None, mtp: bool = True) -> RandomCheckpoint:
        """A model by its folder or name (see `read_shape`), or its first `layers` decoder layers.

        mtp  False leaves the MTP layer out
        """
        spec, folder = read_shape(model)
        if layers is not None:
            spec = first_layers(spec, layers)
        return cls(folder, spec if mtp else replace(spec, num_mtp_layers=0))

    def names(self) -> list[str]:
        """Every tensor that is not a copy of another, sorted."""
        return sorted(name for name, expected in self.expected.items() if not expected.copy_of)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and bytes of a tensor, in no file."""
        made = self._made[name]
        return TensorInfo(made.dtype, made.shape, Path(), 0, math.prod(made.shape) * DTYPE_BYTES[made.dtype])

    def source(self, name: str) -> Source:
        """A tensor as a leaf of a weight expression."""
        made = self._made[name]
        return Source(name, made.dtype, made.shape)

    def position(self, name: str) -> tuple[str, int]:
        """No order of reading is better than another: by name."""
        return name, 0

    def expect(self, name: str) -> None:
        """Nothing is to be fetched."""

    def release(self, name: str) -> None:
        """Nothing was fetched."""

    def identity(self) -> dict[str, str]:
        """The seed; shapes are in the spec."""
        return {"the seed": str(self._seed)}

    def check_unchanged(self) -> None:
        """Nothing can change."""

    def files(self) -> dict[str, int]:
        """None."""
        return {}

    def copies(self) -> Iterator[tuple[str, str]]:
        """None."""
        return iter(())

    def ruled(self) -> Iterator[tuple[str, Expected]]:
        """None."""
        return iter(())

    def store(self, name: str, expression: Expression) -> Expression:
        """What is emitted for a stored tensor: one drawn in its format where the recipe chose one."""
        if not isinstance(expression, Quantize):
            return simplify(expression)
        *lead, _, width = expression.x.shape
        embedding = any(_is_embedding(source.name) for source in expression.x.sources())
        deviation = EMBEDDING_DEVIATION if embedding else DEVIATION
        table = _table(expression.parsed, expression.part, width, deviation)
        if not lead:
            return self._random(name, expression.dtype, expression.shape, table)
        parts = (self._random(f"{name}#{i}", expression.dtype, expression.shape[1:], table) for i in range(lead[0]))
        return Stack(tuple(parts))

    def _random(self, name: str, dtype: str, shape: tuple[int, ...], table: torch.Tensor) -> Random:
        self._made[name] = _Made(dtype, shape, table)
        return Random(name, dtype, shape)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor, or rows of its leading axis, drawn anew."""
        made = self._made[name]
        first, last, _ = (rows or slice(None)).indices(made.shape[0])
        shape = (max(last - first, 0), *made.shape[1:])
        if made.table is None:
            return torch.ones(shape, dtype=getattr(torch, made.dtype))
        width = math.prod(made.shape[1:])
        return draw(made.table, name, first * width, math.prod(shape), self._seed).view(shape)


def describe(spec: ModelSpec) -> str:
    """The shape in a few words."""
    moe = spec.num_layers - spec.num_dense_layers if spec.num_experts else 0
    mtp = ", 1 MTP layer" if spec.num_mtp_layers else ""
    return f"{spec.architecture} of {spec.num_layers - moe} dense and {moe} MoE layers{mtp}"


def _is_embedding(name: str) -> bool:
    return name.endswith("embed_tokens.weight")


def _made(name: str, expected: Expected, spec: ModelSpec) -> _Made:
    """A tensor of the checkpoint: linears as the source stores them, floats as config.json says, the bias in float32."""
    shape, base = expected.shape, name.removesuffix(SCALE_SUFFIX)
    if name.endswith(".e_score_correction_bias"):
        return _Made("float32", shape, float_table("float32", BIAS_DEVIATION))
    if base != name:
        return _Made("float32", shape, scale_table(FP8, 0, DEVIATION))
    if expected.dtypes == ("float8_e4m3fn",):
        return _Made("float8_e4m3fn", shape, data_table(FP8, 0))
    dtype = "float32" if spec.source.kind == "fp32" else "bfloat16"
    if len(shape) == 1:
        return _Made(dtype, shape, None)
    return _Made(dtype, shape, float_table(dtype, EMBEDDING_DEVIATION if _is_embedding(name) else DEVIATION))


def _table(format_: Format, part: str, width: int, deviation: float) -> torch.Tensor:
    if not format_.quantized:
        return float_table("float32" if format_.kind == "fp32" else "bfloat16", deviation)
    group_width = width if format_.kind == "wint8" else 0
    return data_table(format_, group_width) if part == "data" else scale_table(format_, group_width, deviation)
