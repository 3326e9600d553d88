"""What every kernel of an engine must hold: no spills, its architecture's tensor-core instruction, no FP8 where there is none.

What a kernel should multiply with follows from its source: a `tl.dot` of 64 x 16 or more is wgmma on Hopper and tcgen05 on
Blackwell, a smaller one and all of them before are mma.sync, and CUDA C++ names its instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsc.compiler.codegen import Built, Contents, CubinCompiler
from dsc.compiler.crosscompile import Dot
from dsc.plugins.gpu_node import Arch
from dsc.runtime.errors import DscError, raise_all
from dsc.runtime.program import Program
from dsc.runtime.steps import kernels_in

WIDE = (64, 16)  # rows and columns from which on a tile is wgmma's or tcgen05's; Triton gives them none of 8 columns
LETTERS = {"bf16": "H", "f16": "H", "f8E4M3FN": "Q", "f8E5M2": "Q", "i8": "I"}
NAMED = {"wgmma.mma_async": ("HGMMA", "QGMMA", "IGMMA"), "mma.sync": ("HMMA", "IMMA", "QMMA")}
NAMED["tcgen05.mma"] = ("UTCHMMA", "UTCQMMA", "UTCIMMA")


def wanted_by(dot: Dot, chip: Arch) -> tuple[str, ...]:
    """Opcodes of which a kernel with such a product must hold one; none for float32, which tensor cores would round."""
    if not dot.rows:
        return NAMED[dot.dtype]
    if dot.dtype not in LETTERS:
        return ()
    letter = LETTERS[dot.dtype]
    if chip.capability >= 90 and dot.rows >= WIDE[0] and dot.columns >= WIDE[1]:
        return (f"{letter}GMMA",) if chip.capability < 100 else (f"UTC{letter}MMA",)
    return ("HMMA", "QMMA") if letter == "Q" else (f"{letter}MMA",)  # narrow tiles of e4m3 may be widened first


@dataclass(frozen=True)
class _Fault:
    what: str
    wanted: str
    got: str
    try_: str
    allowable: bool = True


def _faults(built: Built, contents: Contents, arch: Arch, chip: Arch) -> Iterator[_Fault]:
    resources, held = built.resources, {name.partition(".")[0] for name in contents.tensor_cores}
    if resources.stack_bytes:
        got = f"{resources.stack_bytes}, at {resources.registers} registers"
        yield _Fault("spills to local memory", "0 bytes of stack a thread", got, "a smaller tile, or more warps")
    for dot in contents.dots:
        wanted = wanted_by(dot, chip)
        if wanted and held.isdisjoint(wanted):
            shape = f" for its product of {dot.rows} x {dot.columns} in {dot.dtype}" if dot.rows else ""
            got = ", ".join(sorted(held)) or "no tensor core"
            yield _Fault(
                f"misses its instruction on {chip.name}",
                f"{' or '.join(wanted)}{shape}",
                got,
                "4 or 8 warps, another tile",
            )
            break  # one product is enough to say it
    if contents.fp8 and not arch.has_fp8:
        none, got = f"none on {arch.name}, which has no FP8", ", ".join(contents.fp8)
        yield _Fault("holds FP8 instructions", none, got, "uint8 codes and decode_e4m3", allowable=False)


def check_kernels(programs: Sequence[Program], compiler: CubinCompiler, allowed: Mapping[str, str]) -> None:
    """Raise DscError naming every kernel that spills or misses its instruction, with the op and node that launch it.

    allowed  kernels that may, by name, and why: the recipe's `allow_kernels`; one that need not be there is a fault too
    """
    contents = compiler.contents()
    users = first_users(programs)
    found: dict[tuple[str, str], list[tuple[Built, _Fault]]] = {}
    for source, built in compiler.built.items():
        for fault in _faults(built, contents[source], compiler.arch, compiler.chip or compiler.arch):
            found.setdefault((built.compiled.entry, fault.what), []).append((built, fault))
    errors = [
        _error(cases, users)
        for (entry, _), cases in sorted(found.items(), key=lambda item: item[0])
        if entry not in allowed or not cases[0][1].allowable
    ]
    for entry, reason in allowed.items():
        if not any(name == entry and cases[0][1].allowable for (name, _), cases in found.items()):
            got = f"allow_kernels: {{{entry}: {reason}}}"
            what = f"kernel {entry} needs no allowance on {compiler.arch.name}"
            errors.append(DscError(what, got=got, try_="take it out"))
    raise_all(f"kernels for {compiler.arch.name}", errors)


def first_users(programs: Sequence[Program]) -> dict[str, tuple[str, str, str]]:
    """The first node that launches each cubin: graph, node, op."""
    users: dict[str, tuple[str, str, str]] = {}
    for program in programs:
        for node in program.nodes:
            for variant in node.variants:
                for step in kernels_in(variant.steps):
                    users.setdefault(step.cubin, (program.name, node.name, node.op))
    return users


def _error(cases: Sequence[tuple[Built, _Fault]], users: Mapping[str, tuple[str, str, str]]) -> DscError:
    built, fault = cases[0]
    entry, cubin = built.compiled.entry, built.compiled.cubin
    graph, node, op = users.get(cubin, ("", "", ""))
    others = f", and {len(cases) - 1} more of its cubins" if len(cases) > 1 else ""
    allow = f"; or, in the recipe, allow_kernels: {{{entry}: why}}" if fault.allowable else ""
    return DscError(
        f"kernel {entry} {fault.what}",
        where=graph,
        details=[("op", f"dsc.{op}"), ("node", node), ("cubin", f"{cubin}{others}")],
        wanted=fault.wanted,
        got=fault.got,
        try_=f"{fault.try_}{allow}",
    )
