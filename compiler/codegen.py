"""Kernels to cubins, without a GPU: Triton and CUDA C++ cross-compiled, each source once, in parallel, cached by content.

Lowering runs twice over one compiler: the first time collects sources, `build` compiles them, the second time gets
what was made. A source's key covers all that its cubin depends on, so a cached cubin is the one that would be made.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.resources
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dsc.compiler.cubin import Resources, read_resources
from dsc.plugins.gpu_node import Arch, Compiled, CudaSource, TritonSource
from dsc.runtime.errors import DscError

Source = TritonSource | CudaSource


@dataclass(frozen=True)
class Built:
    """A cubin with what its launch needs and what it uses of the chip."""

    compiled: Compiled
    cubin: bytes
    resources: Resources


@dataclass
class CubinCompiler:
    """The KernelCompiler of one target. Use: lower everything, `build()`, lower everything again, `write()`."""

    arch: Arch
    cache: Path = field(default_factory=lambda: Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dsc")
    built: dict[Source, Built] = field(default_factory=dict)
    wanted: dict[Source, None] = field(default_factory=dict)

    def compile(self, source: Source) -> Compiled:
        """The cubin's launch facts; placeholders until `build` ran."""
        if source in self.built:
            return self.built[source].compiled
        self.wanted[source] = None
        entry = source.function if isinstance(source, TritonSource) else source.entry
        return Compiled(f"kernels/{entry}.cubin", entry, threads=32)

    def build(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """Compile what was asked for and is not there yet. Raises DscError with the compiler's words."""
        todo = []
        for source in self.wanted:
            found = self.built.get(source) or _recall(source, self.arch, self.cache)
            if found is not None:
                self.built[source] = found
            else:
                todo.append(source)
        advance(len(self.wanted) - len(todo))
        self.wanted.clear()
        workers = min(len(todo) // 4, os.cpu_count() or 1)  # a worker imports Triton first: not worth it for a few
        if workers < 2:
            for source in todo:
                self.built[source] = build_one(source, self.arch, self.cache)
                advance(1)
            return
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(build_one, source, self.arch, self.cache) for source in todo]
            for source, job in zip(todo, jobs, strict=True):
                self.built[source] = job.result()
                advance(1)

    def write(self, folder: Path) -> list[str]:
        """Write every cubin under `folder`; returns their names relative to it, sorted."""
        names = set()
        for built in self.built.values():
            path = folder / built.compiled.cubin
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(built.cubin)
            names.add(built.compiled.cubin)
        return sorted(names)


def build_one(source: Source, arch: Arch, cache: Path) -> Built:
    """Compile one source, or take it from the cache."""
    found = _recall(source, arch, cache)
    if found is not None:
        return found
    made, cubin = _triton(source, arch) if isinstance(source, TritonSource) else _nvcc(source, arch)
    key = _key(source, arch)
    compiled = Compiled(f"kernels/sm{arch.capability}_{made.entry}-{key[:10]}.cubin", **_without_name(made))
    built = Built(compiled, cubin, read_resources(cubin, made.entry))
    _remember(cache / "cubins" / key, built)
    return built


def _key(source: Source, arch: Arch) -> str:
    return hashlib.sha256(json.dumps(_identity(source, arch), sort_keys=True).encode()).hexdigest()


def _recall(source: Source, arch: Arch, cache: Path) -> Built | None:
    """What the cache has; None where that is nothing, or damaged."""
    place = cache / "cubins" / _key(source, arch)
    try:
        facts, cubin = json.loads((place / "facts.json").read_text()), (place / "cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() == facts["sha256"]:
            return Built(Compiled(**facts["compiled"]), cubin, Resources(**facts["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _without_name(made: Compiled) -> dict[str, Any]:
    facts = asdict(made)
    del facts["cubin"]
    return facts


def _remember(place: Path, built: Built) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=place.parent))
    (temporary / "cubin").write_bytes(built.cubin)
    facts = {
        "compiled": asdict(built.compiled),
        "resources": asdict(built.resources),
        "sha256": hashlib.sha256(built.cubin).hexdigest(),
    }
    (temporary / "facts.json").write_text(json.dumps(facts))
    try:
        temporary.rename(place)
    except OSError:  # another process was first
        shutil.rmtree(temporary)


def _identity(source: Source, arch: Arch) -> dict[str, Any]:
    """Everything the cubin depends on."""
    facts: dict[str, Any] = {"arch": arch.name, "source": _plain(asdict(source))}
    if isinstance(source, TritonSource):
        facts["triton"] = _triton_module().__version__
        facts["code"] = _function(source).cache_key
    else:
        facts["nvcc"] = _nvcc_version()
        folder = importlib.resources.files(source.module.rpartition(".")[0])
        facts["code"] = {f.name: f.read_text() for f in folder.iterdir() if f.name.endswith((".cu", ".cuh"))}
    return facts


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    return {name: repr(value) for name, value in data.items()}


def _triton_module() -> Any:
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # line info holds the path of the source
    try:
        return importlib.import_module("triton")
    except ImportError as error:
        raise DscError(
            "GPU targets need Triton to compile kernels", wanted="triton 3.6 or later", try_="pip install 'dsc[gpu]'"
        ) from error


def _function(source: TritonSource) -> Any:
    return getattr(importlib.import_module(source.module), source.function)


def _triton(source: TritonSource, arch: Arch) -> tuple[Compiled, bytes]:
    triton = _triton_module()
    compiler, backends = importlib.import_module("triton.compiler"), importlib.import_module("triton.backends.compiler")
    function = _function(source)
    types, constants = dict(source.signature), dict(source.constants)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    at = {name: (i,) for i, name in enumerate(function.arg_names)}
    aligned = {at[name]: [["tt.divisibility", 16]] for name, type_ in source.signature if type_.startswith("*")}
    ast = compiler.ASTSource(
        function, signature=signature, constexprs={at[name]: value for name, value in constants.items()}, attrs=aligned
    )
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, "launch_pdl": source.pdl}
    if source.max_registers:
        options["maxnreg"] = source.max_registers
    kernel = triton.compile(ast, target=backends.GPUTarget("cuda", arch.capability, 32), options=options)
    facts = kernel.metadata
    assert not facts.global_scratch_size, (source.function, "device-side scratch is not supported")
    parameters = kernel.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0].count(".param")
    return (
        Compiled("", facts.name, 32 * facts.num_warps, facts.shared, hidden=parameters - len(source.signature)),
        kernel.asm["cubin"],
    )


@functools.cache
def _nvcc_version() -> str:
    return subprocess.run([_find_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout


def _find_nvcc() -> str:
    """nvcc on the path, or the pip package's."""
    found = shutil.which("nvcc")
    if found:
        return found
    try:
        roots = importlib.import_module("nvidia").__path__
    except ImportError:
        roots = []
    for root in roots:
        for candidate in sorted(Path(root).glob("**/bin/nvcc")):
            return str(candidate)
    raise DscError("a CUDA C++ kernel needs nvcc", wanted="nvcc 13 on the path", try_="pip install nvidia-cuda-nvcc")


def _nvcc(source: CudaSource, arch: Arch) -> tuple[Compiled, bytes]:
    folder = importlib.resources.files(source.module.rpartition(".")[0])
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "kernel.cubin"
        number = arch.name.removeprefix("sm_")
        command = [_find_nvcc(), f"-gencode=arch=compute_{number},code=sm_{number}", "-cubin", "-O3", "-std=c++17"]
        command += [f"-D{name}={value}" for name, value in source.defines]
        with importlib.resources.as_file(folder / source.file) as path:
            done = subprocess.run(
                [*command, "-o", str(out), path.name], capture_output=True, text=True, cwd=path.parent, check=False
            )
        if done.returncode:
            raise DscError(f"{source.file} does not compile for {arch.name}", got=done.stderr[-2000:])
        return Compiled("", source.entry), out.read_bytes()
