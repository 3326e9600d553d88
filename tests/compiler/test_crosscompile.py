"""nvcc is found on the path, else in the pip package; without one, the error says how to get it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsc.compiler import crosscompile
from dsc.compiler.crosscompile import compile_source
from dsc.plugins.gpu_node import Arch, Compiled, CudaSource
from dsc.runtime.errors import DscError

PLAN = CudaSource("dsc.plugins.moe.kernel", "plan.cu", "moe_plan", (("TILE", "16"),))
# Tells where it is and what it was asked for; the file behind -o becomes its "cubin".
NVCC = '#!/bin/sh\n[ "$1" = --version ] && echo "nvcc of $0" && exit\nfor last; do :; done\n' + (
    'while [ "$1" != -o ]; do told="$told $1"; shift; done\necho "$0$told $last" > "$2"\n'
)


def make_nvcc(folder: Path) -> Path:
    folder.mkdir(parents=True)
    file = folder / "nvcc"
    file.write_text(NVCC)
    file.chmod(0o755)
    return file


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two folders of packages with a share of the namespace `nvidia` each; nothing is on the path but a shell."""
    for name in ("first", "second"):
        (tmp_path / name / "nvidia" / "other" / "lib").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / name))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    crosscompile._nvcc_version.cache_clear()
    yield tmp_path
    crosscompile._nvcc_version.cache_clear()
    sys.modules.pop("nvidia", None)


def test_the_pip_packages_nvcc_compiles(packages: Path) -> None:
    nvcc = make_nvcc(packages / "first" / "nvidia" / "cu13" / "bin")
    compiled, cubin = compile_source(PLAN, Arch("sm_90a"))
    assert compiled == Compiled("", "moe_plan")
    options = "-gencode=arch=compute_90a,code=sm_90a -cubin -O3 -std=c++17 -DTILE=16"
    assert cubin.decode() == f"{nvcc} {options} plan.cu\n"
    assert crosscompile.identity(PLAN, Arch("sm_90a"))["nvcc"] == f"nvcc of {nvcc}\n"


def test_the_one_on_the_path_comes_first(packages: Path) -> None:
    make_nvcc(packages / "first" / "nvidia" / "cu13" / "bin")
    nvcc = make_nvcc(packages / "bin")
    assert crosscompile._find_nvcc() == str(nvcc)


def test_without_one_the_error_says_how_to_get_it(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(packages / "first")])  # a share of the namespace without nvcc
    with pytest.raises(DscError, match="try     pip install nvidia-cuda-nvcc"):
        compile_source(PLAN, Arch("sm_90a"))
    monkeypatch.setitem(sys.modules, "nvidia", None)  # no such package at all
    with pytest.raises(DscError, match="needs nvcc"):
        compile_source(PLAN, Arch("sm_90a"))
