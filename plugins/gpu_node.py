"""What a plugin's kernel.py is given: one node's operands, widths and target, and how its launches are written down.

`lower(node) -> tuple[Variant, ...]` in kernel.py turns a node into steps. Nothing is compiled here: `GpuNode.triton` and
`GpuNode.cuda` ask the compiler for a cubin and describe the launch. Imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsc.plugins.formats import Format, parse_format
from dsc.plugins.schema import Attribute, Dim, Type
from dsc.runtime.steps import Argument, Kernel, Null, Pointer, Scalar, Size, TensorMap

TRITON_TYPES = {
    "float32": "fp32", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv", "int8": "i8", "uint8": "u8", "int32": "i32",
    "int64": "i64",
}  # fmt: skip
_SCALARS = {"i32": "i32", "i64": "i64", "f32": "fp32"}


@dataclass(frozen=True)
class Arch:
    """A GPU architecture as in recipes: `sm_90a` has capability 90."""

    name: str

    @property
    def capability(self) -> int:
        return int(self.name.removeprefix("sm_").rstrip("a"))

    @property
    def has_fp8(self) -> bool:
        """Whether the tensor cores multiply e4m3."""
        return self.capability >= 89

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel may start before its predecessor ends (griddepcontrol)."""
        return self.capability >= 90


@dataclass(frozen=True)
class TritonSource:
    """A Triton kernel for one signature. `module` and `function` find it; pairs keep the parameters' order."""

    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    pdl: bool
    max_registers: int = 0


@dataclass(frozen=True)
class CudaSource:
    """A CUDA C++ kernel: a file beside the plugin's kernel.py, its `extern "C"` entry and preprocessor definitions."""

    module: str
    file: str
    entry: str
    defines: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Compiled:
    """What a launch needs to know of a cubin. `hidden` null pointers follow the arguments (Triton's scratch)."""

    cubin: str
    entry: str
    threads: int = 0
    shared_bytes: int = 0
    hidden: int = 0


class KernelCompiler(Protocol):
    """Turns sources into cubins, each once."""

    def compile(self, source: TritonSource | CudaSource) -> Compiled: ...


@dataclass(frozen=True)
class Typed:
    """A pointer with the element type that a kernel reads through it."""

    pointer: Pointer
    dtype: str


@dataclass
class GpuNode:
    """One node to be lowered.

    dims      value of every letter and width of the op's schema: an integer, or a step letter such as "T"
    inputs    operand name by slot (`x`, `w`, `w.scales`), absent ones missing; outputs by operand name
    types     dtype and shape by operand name
    bounds    the largest value of each step letter
    scratch   filled by `add_scratch`: operands that live while this node runs
    """

    name: str
    op: str
    attributes: Mapping[str, Attribute]
    dims: Mapping[str, Dim]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    types: dict[str, Type]
    arch: Arch
    compiler: KernelCompiler
    bounds: Mapping[str, int] = field(default_factory=dict)
    scratch: dict[str, Type] = field(default_factory=dict)
    zeroed: dict[str, Type] = field(default_factory=dict)

    def has(self, slot: str) -> bool:
        """Whether an optional input is there."""
        return slot in self.inputs

    def width(self, letter: str) -> int:
        """A width that is fixed at build time."""
        value = self.dims[letter]
        assert isinstance(value, int), (self.name, letter, value)
        return value

    def format(self, weight: str) -> Format:
        """Storage format of a weight operand."""
        return parse_format(str(self.attributes[f"{weight}_format"]))

    def at(self, name: str, dtype: str = "", offset: Size = 0) -> Typed:
        """An input slot, an output or a scratch operand as a typed pointer; `offset` in bytes."""
        operand = self.inputs.get(name) or self.outputs.get(name) or name
        return Typed(Pointer(operand, offset), dtype or self.types[operand].dtype)

    def maybe(self, name: str, dtype: str = "") -> Typed | None:
        """As `at`, None where an optional input is absent."""
        return self.at(name, dtype) if name in self.inputs else None

    def add_scratch(self, name: str, dtype: str, shape: Sequence[Dim]) -> Typed:
        """Memory for this node alone, its contents undefined at the start."""
        return self._add(self.scratch, name, dtype, shape)

    def add_zeroed(self, name: str, dtype: str, shape: Sequence[Dim]) -> Typed:
        """Memory that is clear before the first step and that the node leaves clear."""
        return self._add(self.zeroed, name, dtype, shape)

    def _add(self, where: dict[str, Type], name: str, dtype: str, shape: Sequence[Dim]) -> Typed:
        operand = f"{self.name}/{name}"
        where[operand] = self.types[operand] = Type(dtype, tuple(shape))
        return self.at(operand)

    def triton(
        self,
        function: Any,
        grid: Sequence[Size],
        arguments: Mapping[str, Any],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        pdl: bool = False,
        max_registers: int = 0,
    ) -> Kernel:
        """A launch of a `@triton.jit` function.

        arguments   by parameter name: `at(...)` for pointers, None for an absent one, a Python value for `tl.constexpr`
                    parameters, a letter expression or an int for i32 and a float for f32 parameters, or a Scalar
        """
        signature: list[tuple[str, str]] = []
        constants: list[tuple[str, Any]] = []
        launch: list[Argument] = []
        for parameter in function.params:
            value = arguments[parameter.name]
            if parameter.is_constexpr or value is None:
                constants.append((parameter.name, value))
                continue
            argument, type_ = _argument(value)
            signature.append((parameter.name, type_))
            launch.append(argument)
        unknown = arguments.keys() - {parameter.name for parameter in function.params}
        assert not unknown, (function.__name__, unknown)
        source = TritonSource(
            function.fn.__module__,
            function.fn.__name__,
            tuple(signature),
            tuple(constants),
            num_warps,
            num_stages,
            pdl and self.arch.has_pdl,
            max_registers,
        )
        made = self.compiler.compile(source)
        return Kernel(
            cubin=made.cubin,
            entry=made.entry,
            grid=_three(grid),
            block=(made.threads, 1, 1),
            arguments=(*launch, *[Null()] * made.hidden),
            shared_bytes=made.shared_bytes,
            pdl=source.pdl,
        )

    def cuda(
        self,
        module: str,
        file: str,
        entry: str,
        grid: Sequence[Size],
        block: int,
        arguments: Sequence[Any],
        *,
        defines: Mapping[str, Any] | None = None,
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
        pdl: bool = False,
        cooperative: bool = False,
    ) -> Kernel:
        """A launch of an `extern "C"` kernel of `file`, which lies beside `module` (a kernel.py's `__name__`)."""
        pairs = tuple(sorted((name, str(value)) for name, value in (defines or {}).items()))
        made = self.compiler.compile(CudaSource(module, file, entry, pairs))
        return Kernel(
            cubin=made.cubin,
            entry=made.entry,
            grid=_three(grid),
            block=(block, 1, 1),
            arguments=tuple(value if isinstance(value, TensorMap) else _argument(value)[0] for value in arguments),
            cluster=cluster,
            shared_bytes=shared_bytes,
            pdl=pdl and self.arch.has_pdl,
            cooperative=cooperative,
        )


def _argument(value: Any) -> tuple[Argument, str]:
    if isinstance(value, Typed):
        return value.pointer, f"*{TRITON_TYPES[value.dtype]}"
    if isinstance(value, Scalar):
        return value, _SCALARS[value.dtype]
    if isinstance(value, float):
        return Scalar("f32", value), "fp32"
    if isinstance(value, int | str):
        return Scalar("i32", value), "i32"
    if value is None:
        return Null(), "*i8"
    raise AssertionError(f"no kernel argument: {value!r}")


def _three(grid: Sequence[Size]) -> tuple[Size, Size, Size]:
    padded = [*grid, 1, 1, 1][:3]
    return padded[0], padded[1], padded[2]


Lower = Callable[[GpuNode], Any]
