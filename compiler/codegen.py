"""Kernels to cubins, without a GPU: Triton and CUDA C++ cross-compiled, each source once, in parallel, cached by content.

Lowering runs twice over one compiler: the first time collects sources, `build` compiles them, the second time gets
what was made. A source's key covers all that its cubin depends on, so a cached cubin is the one that would be made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from dsc.compiler.crosscompile import Dot, Source, compile_source, dots_of, identity
from dsc.compiler.cubin import Resources, is_fp8, is_tensor_core, mnemonics, read_resources
from dsc.plugins.gpu_node import Arch, Compiled, TritonSource

Result = TypeVar("Result")
# Registers a thread to allow, one after the other, where ptxas spilled to leave room for more blocks than it had to.
BOUNDS = (64, 80, 96, 128, 168, 255)
REGISTERS = 1 << 16  # of a multiprocessor


@dataclass(frozen=True)
class Built:
    """A cubin with what its launch needs and what it uses of the chip; `remedy` is what kept it from spilling, if it had to be
    compiled again.
    """

    compiled: Compiled
    cubin: bytes
    resources: Resources
    remedy: str = ""


@dataclass(frozen=True)
class Contents:
    """The products that a source asks for, and every instruction of its cubin with its modifiers, sorted."""

    dots: tuple[Dot, ...]
    mnemonics: tuple[str, ...]

    @property
    def tensor_cores(self) -> tuple[str, ...]:
        """Instructions that multiply matrices."""
        return tuple(filter(is_tensor_core, self.mnemonics))

    @property
    def fp8(self) -> tuple[str, ...]:
        """Instructions that multiply or convert 8-bit floats."""
        return tuple(filter(is_fp8, self.mnemonics))


@dataclass
class CubinCompiler:
    """The KernelCompiler of one target. Use: lower everything, `build()`, lower everything again, `write()`.

    arch  what sources are chosen and written for
    chip  what they are compiled for, if that is another: sources of an older architecture can be tried on a newer chip
    """

    arch: Arch
    cache: Path = field(default_factory=lambda: Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dsc")
    chip: Arch | None = None
    built: dict[Source, Built] = field(default_factory=dict)
    wanted: dict[Source, None] = field(default_factory=dict)
    _contents: dict[Source, Contents] = field(default_factory=dict)

    def compile(self, source: Source) -> Compiled:
        """The cubin's launch facts; placeholders until `build` ran."""
        if source in self.built:
            return self.built[source].compiled
        self.wanted[source] = None
        entry = source.function if isinstance(source, TritonSource) else source.entry
        return Compiled(f"kernels/{entry}.cubin", entry, threads=32)

    def build(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """Compile what was asked for and is not there yet. Raises DscError with the compiler's words."""
        found = {s: self.built.get(s) or self._place(s).recall() for s in self.wanted}
        known = {s: built for s, built in found.items() if built and not built.resources.stack_bytes}
        advance(len(known))
        todo = [source for source in self.wanted if source not in known]
        self.built |= known | dict(zip(todo, self._each(build_one, todo, advance), strict=True))
        self.wanted.clear()

    def contents(self, advance: Callable[[int], None] = lambda _: None) -> dict[Source, Contents]:
        """What is in every cubin that was built."""
        found = {s: self._contents.get(s) or self._place(s).recall_contents(built) for s, built in self.built.items()}
        known = {s: contents for s, contents in found.items() if contents}
        todo = [source for source in self.built if source not in known]
        self._contents |= known | dict(zip(todo, self._each(scan_one, todo, advance), strict=True))
        return self._contents

    def write(self, folder: Path) -> list[str]:
        """Write every cubin under `folder`; returns their names relative to it, sorted."""
        names = set()
        for built in self.built.values():
            path = folder / built.compiled.cubin
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(built.cubin)
            names.add(built.compiled.cubin)
        return sorted(names)

    def _place(self, source: Source) -> Place:
        return Place.of(source, self.chip or self.arch, self.cache)

    def _each(
        self, work: Callable[[Source, Arch, Path], Result], sources: Sequence[Source], advance: Callable[[int], None]
    ) -> list[Result]:
        """`work` for each source, in processes where there are enough of them."""
        chip, results = self.chip or self.arch, []
        workers = min(len(sources) // 4, os.cpu_count() or 1)  # a worker imports Triton first: not worth it for a few
        if workers < 2:
            for source in sources:
                results.append(work(source, chip, self.cache))
                advance(1)
            return results
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for job in [pool.submit(work, source, chip, self.cache) for source in sources]:
                results.append(job.result())
                advance(1)
        return results


def build_one(source: Source, chip: Arch, cache: Path) -> Built:
    """Compile one source, or take it from the cache; a Triton kernel that spills, again as `_remedies` say."""
    built = _made(source, chip, cache)
    if built.resources.stack_bytes and isinstance(source, TritonSource):
        for remedy, other in _remedies(source, built.resources.registers):
            made = _made(other, chip, cache)
            if not made.resources.stack_bytes:
                return replace(made, remedy=remedy)
    return built


def _remedies(source: TritonSource, registers: int) -> Iterator[tuple[str, TritonSource]]:
    """What may keep a kernel from spilling that was given `registers`.

    ptxas may spill a few bytes to fit another block on a multiprocessor; told how many registers it may take, it does not.
    Then, a shallower pipeline.
    """
    if not source.max_registers:
        for bound in BOUNDS:
            if registers < bound <= REGISTERS // (32 * source.num_warps):
                yield f"bounded by {bound} registers", replace(source, max_registers=bound)
    for stages in range(source.num_stages - 1, 1, -1):
        yield f"{stages} stages instead of {source.num_stages}", replace(source, num_stages=stages)


def _made(source: Source, chip: Arch, cache: Path) -> Built:
    place = Place.of(source, chip, cache)
    found = place.recall()
    if found is not None:
        return found
    made, cubin = compile_source(source, chip)
    compiled = replace(made, cubin=f"kernels/sm{chip.capability}_{made.entry}-{place.key[:10]}.cubin")
    built = Built(compiled, cubin, read_resources(cubin, made.entry))
    place.remember(built)
    return built


def scan_one(source: Source, chip: Arch, cache: Path) -> Contents:
    """Look into what was built from one source."""
    built = build_one(source, chip, cache)
    contents = Contents(dots_of(source, chip), tuple(sorted(mnemonics(built.cubin))))
    Place.of(source, chip, cache).remember_contents(built, contents)
    return contents


@dataclass(frozen=True)
class Place:
    """Where the cache keeps what was made from a source, by the hash of all that it depends on."""

    folder: Path

    @staticmethod
    def of(source: Source, chip: Arch, cache: Path) -> Place:
        key = hashlib.sha256(json.dumps(identity(source, chip), sort_keys=True).encode()).hexdigest()
        return Place(cache / "cubins" / key)

    @property
    def key(self) -> str:
        return self.folder.name

    def recall(self) -> Built | None:
        """What the cache has; None where that is nothing, or damaged."""
        try:
            facts, cubin = json.loads((self.folder / "facts.json").read_text()), (self.folder / "cubin").read_bytes()
            if hashlib.sha256(cubin).hexdigest() == facts["sha256"]:
                return Built(Compiled(**facts["compiled"]), cubin, Resources(**facts["resources"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def remember(self, built: Built) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=self.folder.parent))
        (temporary / "cubin").write_bytes(built.cubin)
        facts = {
            "compiled": asdict(built.compiled),
            "resources": asdict(built.resources),
            "sha256": hashlib.sha256(built.cubin).hexdigest(),
        }
        (temporary / "facts.json").write_text(json.dumps(facts))
        try:
            temporary.rename(self.folder)
        except OSError:  # another process was first
            shutil.rmtree(temporary)

    def recall_contents(self, built: Built) -> Contents | None:
        """As `recall`, of what was built."""
        try:
            data = json.loads((self.folder / "contents.json").read_text())
            if hashlib.sha256(built.cubin).hexdigest() == data["sha256"]:
                return Contents(tuple(Dot(**dot) for dot in data["dots"]), tuple(data["mnemonics"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def remember_contents(self, built: Built, contents: Contents) -> None:
        try:
            handle, temporary = tempfile.mkstemp(dir=self.folder)
        except FileNotFoundError:  # somebody cleared the cache meanwhile
            return
        with os.fdopen(handle, "w") as file:
            json.dump({**asdict(contents), "sha256": hashlib.sha256(built.cubin).hexdigest()}, file)
        Path(temporary).rename(self.folder / "contents.json")
