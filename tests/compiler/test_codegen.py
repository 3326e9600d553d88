"""The compiler of kernels: what it keeps, what it makes again, and how it meets small spills."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import planted_kernels

from dsc.compiler import codegen
from dsc.compiler.codegen import Built, CubinCompiler, build_one, scan_one
from dsc.compiler.crosscompile import Dot
from dsc.compiler.cubin import Resources
from dsc.plugins import moe
from dsc.plugins.gpu_node import Arch, Compiled, CudaSource, TritonSource

DOT = TritonSource(
    module="support.planted_kernels",
    function="planted_dot",
    signature=(("gate", "*bf16"), ("y", "*bf16")),
    constants=(("ROWS", 64),),
    num_warps=4,
    num_stages=3,
    pdl=False,
)


def entry_of(cache: Path) -> Path:
    (place,) = (cache / "cubins").iterdir()
    return place


def test_the_cache_gives_back_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_one(DOT, Arch("sm_90a"), tmp_path)
    contents = scan_one(DOT, Arch("sm_90a"), tmp_path)
    assert contents.dots == (Dot(64, 64, "bf16"),)
    assert {name.partition(".")[0] for name in contents.tensor_cores} == {"HGMMA"}
    assert contents.fp8 == ()
    monkeypatch.setattr(codegen, "compile_source", None)  # nothing is compiled or disassembled again
    monkeypatch.setattr(codegen, "mnemonics", None)
    compiler = CubinCompiler(Arch("sm_90a"), tmp_path)
    assert compiler.compile(DOT).threads == 32
    compiler.build()
    assert compiler.built[DOT] == made
    assert compiler.contents() == {DOT: contents}


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    made = build_one(DOT, Arch("sm_90a"), tmp_path)
    (entry_of(tmp_path) / "cubin").write_bytes(made.cubin[:-1])
    assert build_one(DOT, Arch("sm_90a"), tmp_path) == made


def test_contents_are_of_the_cubin_at_hand(tmp_path: Path) -> None:
    built = build_one(DOT, Arch("sm_90a"), tmp_path)
    contents = scan_one(DOT, Arch("sm_90a"), tmp_path)
    file = entry_of(tmp_path) / "contents.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sha256": "another's", "mnemonics": ["NOP"]}))
    compiler = CubinCompiler(Arch("sm_90a"), tmp_path, built={DOT: built})
    assert compiler.contents() == {DOT: contents}


def test_sources_of_one_architecture_for_the_chip_of_another(tmp_path: Path) -> None:
    compiler = CubinCompiler(Arch("sm_80"), tmp_path, chip=Arch("sm_90"))
    compiler.compile(DOT)
    compiler.build()
    assert compiler.built[DOT].compiled.cubin.startswith("kernels/sm90_planted_dot-")
    assert any(name.startswith("HGMMA") for name in compiler.contents()[DOT].tensor_cores)


BUILD = """
from pathlib import Path
from dsc.compiler.codegen import CubinCompiler
from dsc.plugins.gpu_node import Arch, CudaSource, TritonSource
signature = (("gate", "*bf16"), ("y", "*bf16"))
defines = (("EXPERTS", "16"), ("TILE", "16"), ("THREADS", "1024"), ("PDL", "1"), ("LATE", "0"))
compiler = CubinCompiler(Arch("sm_90a"))
compiler.compile(TritonSource("planted.kernels", "planted_dot", signature, (("ROWS", 64),), 4, 3, pdl=False))
compiler.compile(CudaSource("planted.kernels", "plan.cu", "moe_plan", defines))
compiler.build()
print(*compiler.write(Path("engine")), sep="\\n")
"""


def build_in(folder: Path, seed: str) -> dict[str, bytes]:
    """Cubins of one Triton and one CUDA C++ source, made by a process that has its sources and caches in this folder."""
    package = folder / "planted"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(planted_kernels.__file__, package / "kernels.py")
    shutil.copy(Path(moe.__file__).parent / "plan.cu", package)
    caches = {"XDG_CACHE_HOME": str(folder / "xdg"), "TRITON_CACHE_DIR": str(folder / "triton")}
    environment = {**os.environ, **caches, "PYTHONPATH": str(folder), "PYTHONHASHSEED": seed}
    ran = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert len(list((folder / "xdg" / "dsc" / "cubins").iterdir())) == 2  # nothing came from another build's cache
    assert any((folder / "triton").iterdir())
    return {name: (folder / "engine" / name).read_bytes() for name in ran.stdout.splitlines()}


def test_bytes_depend_neither_on_folders_nor_on_caches(tmp_path: Path) -> None:
    first, second = build_in(tmp_path / "first", "1"), build_in(tmp_path / "elsewhere" / "and deeper", "2")
    assert [name.rpartition("-")[0] for name in first] == ["kernels/sm90_moe_plan", "kernels/sm90_planted_dot"]
    assert first == second


# What ptxas makes of registers that are allowed (0: any) and stages: registers and bytes of stack.
Makes = dict[tuple[int, int], tuple[int, int]]


@pytest.mark.parametrize(
    ("makes", "warps", "remedy"),
    [
        ({(0, 4): (96, 0)}, 4, ""),
        ({(0, 4): (40, 8), (64, 4): (63, 0)}, 4, "bounded by 64 registers"),
        ({(0, 4): (96, 8), (128, 4): (120, 8), (168, 4): (126, 0)}, 4, "bounded by 168 registers"),
        ({(0, 4): (255, 16), (0, 3): (255, 8), (0, 2): (250, 0)}, 8, "2 stages instead of 4"),
        ({(0, 4): (255, 136), (0, 3): (255, 88), (0, 2): (255, 80)}, 8, ""),
        (
            {(0, 4): (96, 8), (128, 4): (128, 8), (0, 3): (96, 0)},
            16,
            "3 stages instead of 4",
        ),  # 512 threads: 128 at most
    ],
)
def test_what_is_tried_against_a_spill(
    makes: Makes, warps: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def made(source: TritonSource, chip: Arch, cache: Path) -> Built:
        seen.append((source.max_registers, source.num_stages))
        return Built(Compiled(str(seen[-1]), "entry"), b"", Resources(*makes[seen[-1]], 0))

    monkeypatch.setattr(codegen, "_made", made)
    built = build_one(replace(DOT, num_warps=warps, num_stages=4), Arch("sm_90a"), tmp_path)
    assert seen == list(makes)
    assert built.remedy == remedy
    assert built.compiled.cubin == str(seen[-1] if remedy else seen[0])
    assert (built.resources.stack_bytes == 0) == (bool(remedy) or len(makes) == 1)


def test_bounds_that_a_source_has_itself_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled = Built(Compiled("x", "entry"), b"", Resources(64, 8, 0))
    monkeypatch.setattr(codegen, "_made", lambda *_: spilled)
    cuda = CudaSource("support.planted_kernels", "none.cu", "none", ())
    for source in (replace(DOT, max_registers=64, num_stages=2), cuda):
        assert build_one(source, Arch("sm_90a"), tmp_path) is spilled
