"""One kernel source to one cubin, with Triton or nvcc, for a chip that is not here; and what the source asks of that chip."""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsc.plugins.gpu_node import Arch, Compiled, CudaSource, TritonSource
from dsc.runtime.errors import DscError

Source = TritonSource | CudaSource


@dataclass(frozen=True, order=True)
class Dot:
    """A product of tiles in a source: rows x columns of the result, and the dtype of its factors ("bf16", "f8E4M3FN").

    rows and columns are 0 where the source is CUDA C++, which names its instruction: `dtype` is that then.
    """

    rows: int
    columns: int
    dtype: str


def compile_source(source: Source, chip: Arch) -> tuple[Compiled, bytes]:
    """The cubin, and its launch facts without a file's name. Raises DscError with the compiler's words."""
    return _triton(source, chip) if isinstance(source, TritonSource) else _nvcc(source, chip)


def identity(source: Source, chip: Arch) -> dict[str, Any]:
    """Everything the cubin depends on."""
    facts: dict[str, Any] = {"arch": chip.name, "source": {name: repr(v) for name, v in asdict(source).items()}}
    if isinstance(source, TritonSource):
        facts["triton"] = _triton_module().__version__
        facts["code"] = _function(source).cache_key
    else:
        facts["nvcc"] = _nvcc_version()
        folder = importlib.resources.files(source.module.rpartition(".")[0])
        facts["code"] = {f.name: f.read_text() for f in folder.iterdir() if f.name.endswith((".cu", ".cuh"))}
    return facts


def dots_of(source: Source, chip: Arch) -> tuple[Dot, ...]:
    """The products of tiles that a source asks for, each once: `tl.dot`s, or the instructions that CUDA C++ and the headers
    beside it name.
    """
    if isinstance(source, CudaSource):
        folder = importlib.resources.files(source.module.rpartition(".")[0])
        text = (folder / source.file).read_text()
        text += "".join((folder / name).read_text() for name in re.findall(r'^#include "(.+)"', text, re.M))
        named = re.findall(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", text)
        return tuple(Dot(0, 0, name) for name in sorted(set(named)))
    text = _compile_triton(source, chip).asm["ttir"]  # from Triton's own cache, where it compiled this before
    shapes = r"tensor<\d+x\d+x(\w+)> \* tensor<\S+> -> tensor<(\d+)x(\d+)x\w+>"
    found = re.findall(rf"\btt\.dot .*: {shapes}", text)
    assert len(found) == len(re.findall(r"\btt\.dot\b", text)), source.function
    return tuple(sorted({Dot(int(m), int(n), dtype) for dtype, m, n in found}))


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


def _compile_triton(source: TritonSource, chip: Arch) -> Any:
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
    return triton.compile(ast, target=backends.GPUTarget("cuda", chip.capability, 32), options=options)


def _triton(source: TritonSource, chip: Arch) -> tuple[Compiled, bytes]:
    kernel = _compile_triton(source, chip)
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


def _nvcc(source: CudaSource, chip: Arch) -> tuple[Compiled, bytes]:
    folder = importlib.resources.files(source.module.rpartition(".")[0])
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "kernel.cubin"
        number = chip.name.removeprefix("sm_")
        command = [_find_nvcc(), f"-gencode=arch=compute_{number},code=sm_{number}", "-cubin", "-O3", "-std=c++17"]
        command += [f"-D{name}={value}" for name, value in source.defines]
        with importlib.resources.as_file(folder / source.file) as path:
            done = subprocess.run(
                [*command, "-o", str(out), path.name], capture_output=True, text=True, cwd=path.parent, check=False
            )
        if done.returncode:
            raise DscError(f"{source.file} does not compile for {chip.name}", got=done.stderr[-2000:])
        return Compiled("", source.entry), out.read_bytes()
