"""A CUDA C++ kernel as a function of the CPU (`cuda.h` beside this is what it finds of CUDA)."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path


@cache
def cuda_on_cpu(
    source: Path, entry: str, defines: tuple[tuple[str, int], ...], threads: int, arguments: int, shared: str = ""
) -> Callable[..., int]:
    """f(blocks, *arguments) of a kernel whose arguments are pointers and int, all passed as c_void_p: the bytes it copied with
    memcpy_async. Needs g++.

    shared  what `__shared__` is: nothing where it stands before `extern`, "static" where the kernel declares its own
    """
    names = [f"p{i}" for i in range(arguments)]
    text = "\n".join(
        [
            '#include "cuda.h"',
            "#include <cuda_pipeline.h>",
            "struct Any {",
            "    void* at;",
            "    template <class T> operator T*() const { return static_cast<T*>(at); }",
            "    operator int() const { return static_cast<int>(reinterpret_cast<intptr_t>(at)); }",
            "};",
            "#undef __shared__",
            f"#define __shared__ {shared}",
            f'#include "{source.resolve()}"',
            f'extern "C" long long on_cpu(int blocks, {", ".join(f"void* {name}" for name in names)}) {{',
            "    copied_bytes = 0;",
            f"    launch(blocks, {threads}, [=] {{ {entry}({', '.join(f'Any{{{name}}}' for name in names)}); }});",
            "    return copied_bytes;",
            "}",
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        library, here = Path(folder, "kernel.so"), Path(__file__).parent
        command = [
            "g++",
            "-std=c++17",
            "-O1",
            "-w",
            "-shared",
            "-fPIC",
            "-x",
            "c++",
            f"-I{here}",
            "-",
            "-o",
            str(library),
        ]
        command += [f"-D{name}={value}" for name, value in defines]
        done = subprocess.run(command, input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        function = ctypes.CDLL(str(library)).on_cpu
    function.restype = ctypes.c_longlong
    return lambda blocks, *at: int(function(ctypes.c_int(blocks), *at))
