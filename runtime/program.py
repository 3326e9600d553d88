"""A program: what the runtime reads of one graph. Operands with their places, nodes in order, and on GPUs their steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from dsc.runtime import codec
from dsc.runtime.errors import DscError, nearest, raise_all
from dsc.runtime.expressions import (
    DEVICE_CONSTANTS,
    LETTERS,
    LOOP_LETTERS,
    ExpressionError,
    evaluate,
    names_of,
    parse_guard,
)
from dsc.runtime.shards import Cut
from dsc.runtime.steps import (
    Collective,
    Gemm,
    Kernel,
    Pointer,
    Repeat,
    Size,
    Step,
    Variant,
    pointers_of,
    sizes_of,
    takes_scales,
)

DTYPE_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip

Role = Literal["activation", "weight", "state", "input", "output", "scratch", "zeroed", "peer"]
IN_ARENA = ("activation", "scratch")


@dataclass(frozen=True)
class Operand:
    """One tensor of a program.

    role    activation and scratch lie in the arena at `offset`; input, output, state (caches) and zeroed (clear at load,
            left clear by their kernels) are allocated each for itself; a weight is `tensor` of the manifest; peer is
            memory that all ranks see
    alias   the operand whose memory this one is, "" for its own
    bytes   at the letters' bounds; a state is sized by the runtime
    cuts    of a weight: which part of the stored tensor each rank has (dsc.runtime.shards); () for all of it
    """

    dtype: str
    shape: tuple[Size, ...]
    role: Role
    bytes: int
    tensor: str = ""
    alias: str = ""
    offset: int | None = None
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class ProgramNode:
    """One plugin op. `inputs` are operand names by the schema's slots, "" where absent; outputs nobody reads stay."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, int | float | str] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class Program:
    """One graph, ready to bind.

    letters      largest value of each letter; operands' bytes and offsets are for these
    inputs       graph inputs and outputs in the order of the .onnx, whose sha256 is `onnx_sha256`
    """

    name: str
    onnx_sha256: str
    letters: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operands: dict[str, Operand]
    nodes: tuple[ProgramNode, ...]
    arena_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON data that `from_json` reads back."""
        data: dict[str, Any] = codec.encode(self)
        return data

    @classmethod
    def from_json(cls, data: Any, where: str) -> Program:
        """The inverse of `to_json`, checked throughout; raises DscError with all faults, each naming `where`."""
        program = codec.decode(cls, data, where)
        program.check(where)
        return program

    def check(self, where: str) -> None:
        """Raise DscError unless names, places, order and expressions fit together."""
        raise_all(f"{where}: the program does not fit together", list(_Checker(self, where).faults()))

    def root(self, name: str) -> str:
        """The operand whose memory `name` is: aliases followed to their end."""
        while self.operands[name].alias:
            name = self.operands[name].alias
        return name


def layer_of(node: str) -> str:
    """`layers.3` for a node of that layer, else the node's own name: embed_tokens, norm, lm_head."""
    found = re.match(r"layers\.\d+(?=\.)", node)
    return found[0] if found else node


def nbytes(dtype: str, shape: tuple[Size, ...], values: Mapping[str, int]) -> int:
    """Bytes of a contiguous tensor under the letters' values; raises ExpressionError on a letter without one."""
    total = DTYPE_BYTES[dtype]
    for size in shape:
        total *= evaluate(size, values)
    return total


@dataclass(frozen=True)
class _Checker:
    program: Program
    where: str

    def fault(self, what: str, wanted: str = "", got: str = "", try_: str = "") -> DscError:
        return DscError(what, where=self.where, wanted=wanted, got=got, try_=try_)

    def faults(self) -> Iterator[DscError]:
        yield from self.letters()
        broken = False
        for name, operand in self.program.operands.items():
            for fault in self.operand(name, operand, f"operands[{name!r}]"):
                broken = True
                yield fault
        if broken:  # what follows reads operands
            return
        yield from self.interface()
        yield from self.order()
        for i, node in enumerate(self.program.nodes):
            for j, variant in enumerate(node.variants):
                yield from self.variant(variant, f"nodes[{i}] ({node.name}).variants[{j}]")

    def letters(self) -> Iterator[DscError]:
        for letter, bound in self.program.letters.items():
            if letter not in LETTERS:
                yield self.fault(f"letters[{letter!r}] is unknown", wanted=", ".join(LETTERS))
            elif bound < 0:
                yield self.fault(f"letters[{letter!r}] is negative", got=str(bound))
        if self.program.arena_bytes < 0:
            yield self.fault("arena_bytes is negative", got=str(self.program.arena_bytes))

    def operand(self, name: str, operand: Operand, path: str) -> Iterator[DscError]:
        if operand.dtype not in DTYPE_BYTES:
            yield self.fault(f"{path}.dtype is unknown", wanted=", ".join(DTYPE_BYTES), got=operand.dtype)
            return
        size_faults = [f for i, size in enumerate(operand.shape) for f in self.size(size, f"{path}.shape[{i}]", ())]
        yield from size_faults
        if not size_faults:
            want = nbytes(operand.dtype, operand.shape, self.program.letters)
            if want != operand.bytes:
                yield self.fault(
                    f"{path}.bytes does not follow from its shape", wanted=str(want), got=str(operand.bytes)
                )
        if (operand.role == "weight") != bool(operand.tensor):
            yield self.fault(
                f"{path}.tensor: a weight names its tensor, nothing else does", got=operand.tensor or "none"
            )
        if operand.cuts and operand.role != "weight":
            yield self.fault(f"{path}.cuts: a weight has parts, nothing else does", got=operand.role)
        yield from self.alias(name, operand, path)
        yield from self.place(operand, path)

    def alias(self, name: str, operand: Operand, path: str) -> Iterator[DscError]:
        seen, at = {name}, operand.alias
        while at:
            if at not in self.program.operands or at in seen:
                why = "is an alias of itself" if at in seen else f"is an alias of {at}, which is no operand"
                yield self.fault(f"{path} {why}", try_=nearest(at, self.program.operands))
                return
            if self.program.operands[at].bytes != operand.bytes:
                got = f"{operand.bytes}, and {self.program.operands[at].bytes} in {at}"
                yield self.fault(f"{path} and its alias differ in bytes", got=got)
            seen.add(at)
            at = self.program.operands[at].alias

    def place(self, operand: Operand, path: str) -> Iterator[DscError]:
        placed = operand.role in IN_ARENA and not operand.alias
        if placed != (operand.offset is not None):
            wanted = "an offset in the arena" if placed else "no offset"
            yield self.fault(f"{path}.offset does not fit role {operand.role}", wanted=wanted, got=str(operand.offset))
        elif operand.offset is not None and not 0 <= operand.offset <= self.program.arena_bytes - operand.bytes:
            got = f"{operand.bytes} bytes at {operand.offset}"
            yield self.fault(f"{path} leaves the arena", wanted=f"within {self.program.arena_bytes} bytes", got=got)

    def size(self, size: Size, path: str, loops: tuple[str, ...]) -> Iterator[DscError]:
        """Faults of one size: no expression, or a letter without a bound. Shapes know no device constant."""
        allowed = {*self.program.letters, *loops}
        if not path.startswith("operands"):
            allowed |= DEVICE_CONSTANTS.keys()
        try:
            unknown = names_of(size) - allowed
        except ExpressionError as error:
            yield self.fault(f"{path}: {error}")
            return
        if unknown:
            yield self.fault(f"{path} reads a letter that has no bound", wanted=", ".join(allowed), got=str(size))
        elif path.startswith("operands"):
            try:
                if evaluate(size, self.program.letters) < 0:
                    yield self.fault(f"{path} is negative", got=str(size))
            except ExpressionError as error:
                yield self.fault(f"{path}: {error}")

    def interface(self) -> Iterator[DscError]:
        for role, path, names in (
            ("input", "inputs", self.program.inputs),
            ("output", "outputs", self.program.outputs),
        ):
            for name in names:
                if name not in self.program.operands:
                    yield self.fault(f"{path}: {name} is no operand", try_=nearest(name, self.program.operands))
                elif self.program.operands[name].role not in (role, "state"):
                    got = f"{name}: {self.program.operands[name].role}"
                    yield self.fault(f"{path} holds an operand of another role", wanted=f"{role} or state", got=got)
            if len(set(names)) != len(names):
                yield self.fault(f"{path} names an operand twice", got=", ".join(names))
        given = {*self.program.inputs, *self.program.outputs}
        for name, operand in self.program.operands.items():
            if operand.role in ("input", "output", "state") and name not in given:
                yield self.fault(f"{name} is of role {operand.role} and neither in inputs nor in outputs")

    def order(self) -> Iterator[DscError]:
        """Every operand is written before it is read, and once."""
        operands = self.program.operands
        ready = {name for name, o in operands.items() if o.role in ("weight", "zeroed", "peer", "scratch")}
        ready |= set(self.program.inputs)
        seen: set[str] = set()
        for i, node in enumerate(self.program.nodes):
            path = f"nodes[{i}] ({node.name})"
            if node.name in seen:
                yield self.fault(f"{path}: a node before has the same name")
            seen.add(node.name)
            for name in (*filter(None, node.inputs), *node.outputs):
                if name not in operands:
                    yield self.fault(f"{path} names no operand: {name!r}", try_=nearest(name, operands))
            for name in node.inputs:
                if name in operands and name not in ready:
                    yield self.fault(f"{path} reads {name} before it is written")
            for name in node.outputs:
                if name in operands and name in ready:
                    yield self.fault(f"{path} writes {name}, which is written already")
            ready |= set(node.outputs)
        for name in self.program.outputs:
            if name in operands and name not in ready:
                yield self.fault(f"no node writes the output {name}")

    def variant(self, variant: Variant, path: str) -> Iterator[DscError]:
        try:
            unknown = parse_guard(variant.guard).names() - self.program.letters.keys() - DEVICE_CONSTANTS.keys()
            if unknown:
                yield self.fault(f"{path}.guard reads a letter that has no bound", got=variant.guard)
        except ExpressionError as error:
            yield self.fault(f"{path}.guard: {error}")
        yield from self.steps(variant.steps, path, ())

    def steps(self, steps: tuple[Step, ...], path: str, loops: tuple[str, ...]) -> Iterator[DscError]:
        for i, step in enumerate(steps):
            at = f"{path}.steps[{i}]"
            for name, size in sizes_of(step):
                yield from self.size(size, f"{at}.{name}", loops)
            for name, pointer in pointers_of(step):
                yield from self.pointer(pointer, f"{at}.{name}")
            if isinstance(step, Kernel):
                yield from self.cubin(step.cubin, f"{at}.cubin")
            if isinstance(step, Gemm) and (step.a_scales is not None or step.b_scales is not None):
                yield from self.scaled(step, at)
            if isinstance(step, Collective):
                yield from self.collective(step, at)
            if isinstance(step, Repeat):
                if step.letter in loops:
                    yield self.fault(f"{at}.letter counts a loop around it", wanted=" or ".join(LOOP_LETTERS))
                yield from self.steps(step.steps, at, (*loops, step.letter))

    def pointer(self, pointer: Pointer, path: str) -> Iterator[DscError]:
        operand = self.program.operands.get(pointer.operand)
        if operand is None:
            yield self.fault(f"{path} names no operand: {pointer.operand!r}")
        elif pointer.rank is not None and operand.role != "peer":
            yield self.fault(f"{path} names a rank, and {pointer.operand} is of role {operand.role}", wanted="peer")

    def scaled(self, step: Gemm, path: str) -> Iterator[DscError]:
        """Faults of a gemm with scales."""
        if step.a_scales is None or step.b_scales is None:
            yield self.fault(f"{path} has scales of one side only", wanted="a_scales and b_scales, or neither")
        if {step.a.dtype, step.b.dtype} != {"float8_e4m3fn"} or step.a.transposed or not step.b.transposed:
            turned = [" transposed" if matrix.transposed else "" for matrix in (step.a, step.b)]
            got = f"a {step.a.dtype}{turned[0]}, b {step.b.dtype}{turned[1]}"
            wanted = "float8_e4m3fn, b transposed"
            yield self.fault(f"{path} has scales and other matrices than they are for", wanted=wanted, got=got)
        if not (isinstance(step.n, int) and isinstance(step.k, int) and takes_scales(step.n, step.k)):
            got = f"n {step.n}, k {step.k}"
            yield self.fault(f"{path} has scales and no size for them", wanted="16 divides n, 512 divides k", got=got)
        if (step.batch, step.alpha, step.beta) != (1, 1.0, 0.0):
            got = f"batch {step.batch}, alpha {step.alpha:g}, beta {step.beta:g}"
            yield self.fault(f"{path} has scales and is no plain product", wanted="batch 1, alpha 1, beta 0", got=got)

    def collective(self, step: Collective, path: str) -> Iterator[DscError]:
        """Faults of what a collective moves: more than is there, where no loop counts it."""
        if step.dtype not in DTYPE_BYTES:
            yield self.fault(f"{path}.dtype is unknown", wanted=", ".join(DTYPE_BYTES), got=step.dtype)
            return
        for name, pointer in pointers_of(step):
            operand = self.program.operands.get(pointer.operand)
            try:
                first = evaluate(pointer.offset, self.program.letters)
                end = first + evaluate(step.count, self.program.letters) * DTYPE_BYTES[step.dtype]
            except ExpressionError:
                continue
            if operand is not None and not 0 <= first <= end <= operand.bytes:
                got = f"bytes {first} to {end} of {operand.bytes}"
                yield self.fault(f"{path}.{name} leaves {pointer.operand}", wanted="a part of it", got=got)

    def cubin(self, name: str, path: str) -> Iterator[DscError]:
        pure = PurePosixPath(name)
        if pure.is_absolute() or len(pure.parts) != 2 or pure.parts[0] != "kernels" or pure.parts[1] in ("..", "."):
            yield self.fault(f"{path} is not a file of the engine", wanted="kernels/NAME.cubin", got=name)
