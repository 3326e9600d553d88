"""Weight expressions: a weight is source tensors and the transforms that lead to the stored bytes, not an array.

Nothing here reads data. `dsc.compiler.emit` evaluates expressions in pieces along the leading axis. Shapes are logical.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import onnx
from onnx_graphsurgeon.ir.tensor import LazyValues

from dsc.plugins.formats import Format, parse_format
from dsc.runtime.shards import Cut, shard_shape
from dsc.runtime.spec import Packing

ONNX_DTYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float16": onnx.TensorProto.FLOAT16,
    "float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN,
    "int32": onnx.TensorProto.INT32,
    "int64": onnx.TensorProto.INT64,
    "uint8": onnx.TensorProto.UINT8,
    "int8": onnx.TensorProto.INT8,
    "bool": onnx.TensorProto.BOOL,
}
DTYPE_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "int64": 8, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip

# Classes by which recipes choose a format. All but the last are quantizable; "exact" weights keep their dtype.
WEIGHT_CLASSES = (
    "experts",
    "attention",
    "kv_b",
    "dense_mlp",
    "shared_experts",
    "embeddings",
    "lm_head",
    "eh_proj",
    "exact",
)


CUTS = "dsc.cuts"  # of an initializer's metadata: its cuts, a list of dsc.runtime.shards.Cut as JSON


@dataclass(frozen=True)
class Expression:
    """A node of a weight expression. Subclasses give `dtype`, `shape` and `inputs`."""

    @property
    def dtype(self) -> str:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def sources(self) -> Iterator[Source]:
        """Every source tensor the expression reads, in order, with repetitions."""
        if isinstance(self, Source):
            yield self
        for item in self.inputs:
            yield from item.sources()


@dataclass(frozen=True)
class Source(Expression):
    """A tensor of the checkpoint, by its name there."""

    name: str
    stored_dtype: str
    stored_shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.stored_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored_shape


@dataclass(frozen=True)
class Random(Source):
    """A tensor of random numbers in a stored format; its name is what tells it from others."""


@dataclass(frozen=True)
class Generated(Expression):
    """A table computed in float64 and rounded once, by a named function of `dsc.compiler.tables` and its arguments."""

    function: str
    arguments: tuple[tuple[str, Any], ...]
    out_shape: tuple[int, ...]
    out_dtype: str = "float32"

    @property
    def dtype(self) -> str:
        return self.out_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.out_shape


@dataclass(frozen=True)
class Unary(Expression):
    """An expression of one operand."""

    x: Expression

    @property
    def dtype(self) -> str:
        return self.x.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return (self.x,)


@dataclass(frozen=True)
class Cast(Unary):
    """Elementwise conversion, round to nearest even."""

    to: str = "float32"

    @property
    def dtype(self) -> str:
        return self.to


@dataclass(frozen=True)
class Reshape(Unary):
    """The same elements in row-major order."""

    to: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.to


@dataclass(frozen=True)
class Dequantize(Unary):
    """float32 codes * scales: `x` float8_e4m3fn [N, K], `scales` float32 [ceil(N/rows), ceil(K/cols)]."""

    scales: Expression = None  # type: ignore[assignment]
    block: tuple[int, int] = (128, 128)

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return (self.x, self.scales)


@dataclass(frozen=True)
class DequantizePacked(Unary):
    """float32 (codes - zeros) * scales of a packed matrix `to` [N, K]; `x` are its words, all as stored
    (dsc.compiler.packing). Without zeros every zero is the middle of the codes.
    """

    scales: Expression = None  # type: ignore[assignment]
    zeros: Expression | None = None
    packing: Packing = None  # type: ignore[assignment]
    to: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.to

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return (self.x, self.scales) if self.zeros is None else (self.x, self.scales, self.zeros)


@dataclass(frozen=True)
class Concat(Expression):
    """Parts joined along axis 0."""

    parts: tuple[Expression, ...]

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(p.shape[0] for p in self.parts), *self.parts[0].shape[1:])

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return self.parts


@dataclass(frozen=True)
class Stack(Expression):
    """Parts of one shape along a new leading axis: the experts of a layer."""

    parts: tuple[Expression, ...]

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return self.parts


@dataclass(frozen=True)
class Quantize(Unary):
    """One stored part ("data" or "scales") of `x` in a storage format (see `dsc.plugins.formats`)."""

    format: str = "bf16"
    part: str = "data"

    @property
    def parsed(self) -> Format:
        return parse_format(self.format)

    @property
    def dtype(self) -> str:
        return self.parsed.parts(self.x.shape)[self.part][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parsed.parts(self.x.shape)[self.part][1]


@dataclass(frozen=True)
class Placement:
    """Where a weight's bytes lie in the engine: a file relative to it, offset and length in bytes."""

    location: str
    offset: int
    length: int


class WeightValues(LazyValues):  # type: ignore[misc]
    """The values of a graph constant as an expression. `load` raises: nothing may read a weight while the graph is edited.

    shape   what the graph's rank has of it
    nbytes  what is stored, for all ranks: as `expression`, all of it
    cuts    which part a rank has (dsc.runtime.shards); () for all of it
    """

    def __init__(
        self, name: str, expression: Expression, weight_class: str = "exact", cuts: tuple[Cut, ...] = ()
    ) -> None:
        assert weight_class in WEIGHT_CLASSES, weight_class
        self.name = name
        self.expression = expression
        self.weight_class = weight_class
        self.cuts = cuts
        self.placement: Placement | None = None
        self.shape = shard_shape(expression.shape, cuts)
        self.dtype = ONNX_DTYPES[expression.dtype]
        self.nbytes = expression.nbytes

    def same(self, other: WeightValues) -> bool:
        """Whether two constants are one: the same part of the same weight."""
        return self.expression == other.expression and self.cuts == other.cuts

    @property
    def tensor(self) -> onnx.TensorProto:
        """A fresh proto each time (two constants that share one would export under one name).

        It is the stored tensor, all of it; which part the graph means stands in its metadata, see `part_shape`.
        """
        proto = onnx.TensorProto(name=self.name, data_type=self.dtype, dims=self.expression.shape)
        proto.data_location = onnx.TensorProto.EXTERNAL
        place = self.placement
        entries = (
            {"location": place.location, "offset": place.offset, "length": place.length} if place else {"location": "-"}
        )
        for key, value in entries.items():
            proto.external_data.add(key=key, value=str(value))
        if self.cuts:
            proto.metadata_props.add(key=CUTS, value=json.dumps([asdict(cut) for cut in self.cuts], sort_keys=True))
        return proto

    def load(self) -> Any:
        raise AssertionError(f"weight {self.name} was read while the graph is edited")


def part_shape(proto: onnx.TensorProto) -> tuple[int, ...]:
    """The shape of what the graph means by an initializer: of the part that its cuts leave."""
    cuts = [Cut(**cut) for item in proto.metadata_props if item.key == CUTS for cut in json.loads(item.value)]
    return shard_shape(proto.dims, cuts)
