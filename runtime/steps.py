"""What a program node does on a GPU: launches and their typed arguments. CPU programs have none.

Sizes are integers or expressions over the step's letters (`dsc.runtime.expressions`), evaluated when a program is bound.
What only the device knows (lengths, tokens per expert) is never a size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

Size = int | str
Sizes3 = tuple[Size, Size, Size]


@dataclass(frozen=True)
class Pointer:
    """The address of an operand plus `offset` bytes; of a `peer` operand, the copy on `rank` (None: this rank's)."""

    kind: ClassVar[str] = "pointer"
    operand: str
    offset: Size = 0
    rank: int | None = None


@dataclass(frozen=True)
class Scalar:
    """A number passed by value; `f32` also takes a number that is no integer."""

    kind: ClassVar[str] = "scalar"
    dtype: Literal["i32", "i64", "f32"]
    value: int | float | str


@dataclass(frozen=True)
class Null:
    """A null pointer (Triton's scratch arguments)."""

    kind: ClassVar[str] = "null"


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor over an operand (cuTensorMapEncodeTiled); the innermost dimension comes first.

    dims       elements; `strides` bytes of every dimension but the innermost
    box        elements of one copy; `swizzle` bytes, 0 for none; `l2_bytes` promotion, 0 for none
    """

    kind: ClassVar[str] = "tensor_map"
    operand: str
    dtype: str
    dims: tuple[Size, ...]
    strides: tuple[Size, ...]
    box: tuple[int, ...]
    offset: Size = 0
    swizzle: int = 0
    l2_bytes: int = 0
    out_of_bounds: Literal["zero", "nan"] = "zero"


Argument = Pointer | Scalar | Null | TensorMap


@dataclass(frozen=True)
class Kernel:
    """One launch. `cubin` is a file under kernels/; `grid` counts blocks; `shared_bytes` is dynamic shared memory.

    pdl  programmatic dependent launch: the kernel may start before its predecessor ends, and reads only weights until
         it waits
    """

    kind: ClassVar[str] = "kernel"
    cubin: str
    entry: str
    grid: Sizes3
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    pdl: bool = False
    cooperative: bool = False


@dataclass(frozen=True)
class Matrix:
    """One row-major matrix of a gemm, or a batch of them: rows `stride` elements apart, matrices `batch_stride`."""

    at: Pointer
    dtype: str
    stride: Size
    transposed: bool = False
    batch_stride: Size = 0


@dataclass(frozen=True)
class Gemm:
    """c[m, n] = alpha * a[m, k] b[k, n] + beta * c, `batch` times, through cuBLAS; accumulated in `compute` dtype.

    With scales, float32, a and b are e4m3 codes: those of a of 1x128 groups, [k/128, m]; those of b, which is a weight
    [n, k] transposed, of 128x128 blocks, [n/128, k/128]. m is then a multiple of SCALED_ROWS.
    """

    kind: ClassVar[str] = "gemm"
    a: Matrix
    b: Matrix
    c: Matrix
    m: Size
    n: Size
    k: Size
    batch: Size = 1
    alpha: float = 1.0
    beta: float = 0.0
    compute: str = "float32"
    workspace: Pointer | None = None
    workspace_bytes: Size = 0
    a_scales: Pointer | None = None
    b_scales: Pointer | None = None


SCALED_ROWS = 4  # cuBLASLt reads rows of scales of a in steps of 16 bytes


def takes_scales(n: int, k: int) -> bool:
    """Whether a weight [n, k] can be the second side of a gemm with scales: rows of c and of the weight's scales are whole
    steps of 16 bytes, as torch and cuBLASLt demand.
    """
    return n % 16 == 0 and k % (4 * 128) == 0


@dataclass(frozen=True)
class Collective:
    """A collective over an axis of the device mesh. `count` is elements that each rank sends (broadcast: receives).

    counts  all_to_all of unequal parts: elements for each rank, in rank order; empty: `count` split evenly
    """

    kind: ClassVar[str] = "collective"
    op: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
    axis: Literal["tensor", "expert", "pipeline", "world"]
    source: Pointer
    destination: Pointer
    dtype: str
    count: Size
    counts: tuple[Size, ...] = ()
    reduce: Literal["sum", "max"] = "sum"
    root: int = 0


@dataclass(frozen=True)
class Fill:
    """Set `bytes` bytes to `value` (0 to 255)."""

    kind: ClassVar[str] = "fill"
    destination: Pointer
    bytes: Size
    value: int = 0


@dataclass(frozen=True)
class Copy:
    """Copy `bytes` bytes on the device."""

    kind: ClassVar[str] = "copy"
    source: Pointer
    destination: Pointer
    bytes: Size


@dataclass(frozen=True)
class Repeat:
    """The steps, `count` times; inner sizes may read the counter `letter` (I or J), which starts at 0."""

    kind: ClassVar[str] = "repeat"
    count: Size
    steps: tuple[Step, ...]
    letter: Literal["I", "J"] = "I"


Step = Kernel | Gemm | Collective | Fill | Copy | Repeat


@dataclass(frozen=True)
class Variant:
    """Steps that serve a node where `guard` holds (`T <= 64`; "" always). The first variant that holds is taken."""

    steps: tuple[Step, ...]
    guard: str = ""


def kernels_in(steps: Sequence[Step]) -> Iterator[Kernel]:
    """Every kernel launch of some steps, those inside repeats once."""
    for step in steps:
        if isinstance(step, Kernel):
            yield step
        elif isinstance(step, Repeat):
            yield from kernels_in(step.steps)


def operands_in(steps: Sequence[Step]) -> Iterator[str]:
    """Every operand that some steps touch, those inside repeats too; one may come several times."""
    for step in steps:
        yield from (pointer.operand for _, pointer in pointers_of(step))
        if isinstance(step, Repeat):
            yield from operands_in(step.steps)


def sizes_of(step: Step) -> Iterator[tuple[str, Size]]:
    """Every size of a step by its field's name, pointers and arguments included; not of the steps inside a repeat."""
    if isinstance(step, Kernel):
        yield from ((f"grid[{i}]", size) for i, size in enumerate(step.grid))
        for i, argument in enumerate(step.arguments):
            if isinstance(argument, Scalar) and not isinstance(argument.value, float):
                yield f"arguments[{i}].value", argument.value
            if isinstance(argument, TensorMap):
                yield from ((f"arguments[{i}].dims[{d}]", size) for d, size in enumerate(argument.dims))
                yield from ((f"arguments[{i}].strides[{d}]", size) for d, size in enumerate(argument.strides))
    elif isinstance(step, Gemm):
        yield from (("m", step.m), ("n", step.n), ("k", step.k), ("batch", step.batch))
        yield "workspace_bytes", step.workspace_bytes
        for name, matrix in (("a", step.a), ("b", step.b), ("c", step.c)):
            yield from ((f"{name}.stride", matrix.stride), (f"{name}.batch_stride", matrix.batch_stride))
    elif isinstance(step, Collective | Repeat):
        yield "count", step.count
        if isinstance(step, Collective):
            yield from ((f"counts[{i}]", size) for i, size in enumerate(step.counts))
    else:
        yield "bytes", step.bytes
    yield from ((f"{name}.offset", pointer.offset) for name, pointer in pointers_of(step))


def pointers_of(step: Step) -> Iterator[tuple[str, Pointer]]:
    """Every operand a step touches, by its field's name; a tensor map counts as a pointer."""
    if isinstance(step, Kernel):
        for i, argument in enumerate(step.arguments):
            if isinstance(argument, Pointer):
                yield f"arguments[{i}]", argument
            elif isinstance(argument, TensorMap):
                yield f"arguments[{i}]", Pointer(argument.operand, argument.offset)
    elif isinstance(step, Gemm):
        yield from (("a.at", step.a.at), ("b.at", step.b.at), ("c.at", step.c.at))
        for name, pointer in (("workspace", step.workspace), ("a_scales", step.a_scales), ("b_scales", step.b_scales)):
            if pointer is not None:
                yield name, pointer
    elif isinstance(step, Fill):
        yield "destination", step.destination
    elif not isinstance(step, Repeat):
        yield from (("source", step.source), ("destination", step.destination))
