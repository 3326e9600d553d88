"""The compiler of kernels: what it keeps, what it makes again, and how it meets small spills."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsc.compiler import codegen
from dsc.compiler.codegen import Built, CubinCompiler, build_one, scan_one
from dsc.compiler.crosscompile import Dot
from dsc.compiler.cubin import Resources
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


@pytest.mark.parametrize(
    ("spills", "warps", "tried", "chosen"),
    [
        ({0: (40, 8), 64: (63, 0)}, 4, [0, 64], 64),
        ({0: (96, 8), 128: (120, 8), 168: (126, 0)}, 4, [0, 128, 168], 168),
        ({0: (255, 136)}, 4, [0], 0),
        ({0: (96, 8), 128: (128, 8)}, 16, [0, 128], 0),  # 512 threads cannot have more
        ({0: (96, 0)}, 4, [0], 0),
    ],
)
def test_a_spill_is_met_with_the_smallest_bound_that_helps(
    spills: dict[int, tuple[int, int]],
    warps: int,
    tried: list[int],
    chosen: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`spills`: what ptxas makes of a bound (0: none), registers and bytes of stack."""
    seen = []

    def made(source: TritonSource, chip: Arch, cache: Path) -> Built:
        seen.append(source.max_registers)
        return Built(Compiled(str(source.max_registers), "entry"), b"", Resources(*spills[source.max_registers], 0))

    monkeypatch.setattr(codegen, "_made", made)
    built = build_one(replace(DOT, num_warps=warps), Arch("sm_90a"), tmp_path)
    assert built.compiled.cubin == str(chosen)
    assert seen == tried


@pytest.mark.parametrize(
    "source", [replace(DOT, max_registers=64), CudaSource("support.planted_kernels", "none.cu", "none", ())]
)
def test_bounds_that_a_source_has_itself_stay(source: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled = Built(Compiled("x", "entry"), b"", Resources(64, 8, 0))
    monkeypatch.setattr(codegen, "_made", lambda *_: spilled)
    assert build_one(source, Arch("sm_90a"), tmp_path) is spilled
