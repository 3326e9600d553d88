"""Whole engines for GPUs, built and looked into without one: their kernels, what a step launches, no FP8 where there is none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.builds import dsc, hashes, refusal
from support.damage import rehash
from support.engines import TINY_R1

from dsc.compiler.build import compile_engine
from dsc.compiler.cubin import is_fp8, mnemonics, read_resources
from dsc.compiler.recipe import load_recipe
from dsc.runtime import inspect
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.diff import diff
from dsc.runtime.explain import explain

Build = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """tiny-r1 in a format for a target, each once."""

    @cache
    def make(format_: str, target: str) -> Path:
        recipe = load_recipe(f"tiny-r1-{format_}").override(target)
        output = tmp_path_factory.mktemp("gpu") / f"{format_}.{target}.engine"
        return compile_engine(recipe, model=str(TINY_R1), output=output).folder

    return make


@cache
def held(cubin: Path) -> set[str]:
    """Instructions of a cubin, each file disassembled once."""
    return mnemonics(cubin.read_bytes())


def fp8_of(engine: Path) -> set[str]:
    """Instructions on 8-bit floats in all cubins of an engine's folder."""
    files = sorted((engine / "kernels").iterdir())
    assert [f"kernels/{file.name}" for file in files] == [
        k["cubin"] for k in EngineFolder.open(engine).report["kernels"]
    ]
    assert len(files) > 30
    return {name for file in files for name in held(file) if is_fp8(name)}


@pytest.mark.parametrize("format_", ["wint8", "wint4"])
def test_an_engine_for_ampere_holds_no_fp8(build: Build, format_: str) -> None:
    assert fp8_of(build(format_, "sm_80")) == set()


def test_the_scan_finds_fp8_where_it_is(build: Build) -> None:
    found = fp8_of(build("fp8", "sm_90a"))
    assert any(name.startswith("QGMMA.") for name in found)
    assert any(name.startswith("F2FP.") and "E4M3" in name for name in found)


def test_every_kernel_as_its_cubin_says(build: Build) -> None:
    engine = build("fp8", "sm_90a")
    data = inspect.describe(EngineFolder.open(engine))
    cubins = {kernel["cubin"] for kernel in data["kernels"]}
    assert cubins == {file["path"] for file in data["files"] if file["path"].startswith("kernels/")}
    for kernel in data["kernels"]:
        cubin = (engine / kernel["cubin"]).read_bytes()
        used = read_resources(cubin, kernel["entry"])
        told = (kernel["registers"], kernel["stack_bytes"], kernel["static_shared_bytes"])
        assert told == (used.registers, used.stack_bytes, used.shared_bytes), kernel
        assert kernel["bytes"] == len(cubin)
        assert kernel["stack_bytes"] == 0, kernel
        opcodes = {name.partition(".")[0] for name in held(engine / kernel["cubin"])}
        assert kernel["tensor_cores"] == sorted(name for name in opcodes if name.endswith("MMA")), kernel
    by_entry = {kernel["entry"]: kernel for kernel in data["kernels"]}
    assert by_entry["sm90_mla_decode"]["ops"] == ["MlaAttention"]
    assert by_entry["sm90_mla_decode"]["tensor_cores"] == ["HGMMA"]
    assert (by_entry["sm90_mla_decode"]["threads"], by_entry["sm90_mla_decode"]["fp8"]) == (512, [])
    assert by_entry["sm90_mla_decode"]["dynamic_shared_bytes"] > 200_000
    # Of rows that no norm makes: q_b's, o_proj's and down_proj's.
    assert {op for k in data["kernels"] if k["entry"] == "quantize_rows" for op in k["ops"]} == {"Linear"}
    for entry in ("quantize_rows", "rms_norm"):
        assert any("E4M3" in name for name in by_entry[entry]["fp8"]), entry


def test_launches_of_a_step(build: Build) -> None:
    """Four decoder layers, three with experts, and the MTP layer; counts of single kernels by hand."""
    data = inspect.describe(EngineFolder.open(build("fp8", "sm_90a")))
    steps = {(step["graph"], step["tokens"]): step for step in data["steps"]}
    assert [size for graph, size in steps if graph == "main.decode"] == [1, 16]
    assert [size for graph, size in steps if graph == "main.prefill"] == [256, 512]
    for (graph, size), step in steps.items():
        counted = sum(kernel["launches"][graph][str(size)] for kernel in data["kernels"])
        assert counted == step["kinds"]["kernel"], (graph, size)
        assert sum(step["parts"].values()) == step["launches"] == sum(step["kinds"].values()), (graph, size)
    decode = steps["main.decode", 1]
    assert set(decode["parts"]) == {"embed_tokens", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "lm_head"}
    assert decode["parts"]["layers.1"] == decode["parts"]["layers.2"] == decode["parts"]["layers.3"]
    assert steps["sample", 1]["parts"] == {"sample": 4}  # scan, draw, pick, accept

    def launched(entry: str, graph: str, tokens: int) -> int:
        return sum(k["launches"][graph][str(tokens)] for k in data["kernels"] if k["entry"] == entry)

    for entry, count in (
        ("embedding", 1),
        ("add_rms_norm", 8),
        ("rms_norm", 1),
        ("sm90_mla_decode", 4),
        ("moe_sum", 3),
    ):
        assert launched(entry, "main.decode", 1) == count, entry
    for tokens in (1, 16):
        assert launched("quantize_rows", "main.decode", tokens) == 4 + 4 + 1  # q_b_proj, o_proj, down_proj
    assert launched("sm90_mla_prefill", "main.decode", 16) == 0
    assert launched("sm90_mla_prefill", "main.prefill", 512) >= 4
    assert launched("mtp_input", "mtp.decode", 16) == 1


def test_the_command(build: Build) -> None:
    engine = build("fp8", "sm_90a")
    text = dsc("inspect", engine, "--kernels").stdout
    for told in ("sm90_mla_decode", "223,488", "HGMMA", "none spills", "launches a step", "layers 1-3: ", " each"):
        assert told in text, told
    data = json.loads(dsc("inspect", engine, "--kernels", "--json").stdout)
    assert set(data) == {"engine", "kernels", "steps"}
    assert "show different things" in refusal("inspect", engine, "--kernels", "--layer", "1")


def test_a_node_is_explained_by_what_it_launches(build: Build) -> None:
    """Names by hand, launches inside a repeat too; every file named is one of the engine's."""
    engine = build("fp8", "sm_90a")
    folder = EngineFolder.open(engine)

    def kernels(node: str) -> dict[str, dict[str, list[str]]]:
        """Graph -> sizes served -> names of what is launched, in order."""
        found: dict[str, dict[str, list[str]]] = {}
        for graph in explain(folder, node)["graphs"]:
            for line in graph["kernels"]:
                sizes, _, launched = line.partition(": ")
                names = [name.partition(" of ") for name in launched.split(", ")]
                assert all(f"kernels/{Path(file).name}" in folder.manifest.files for _, of, file in names if of), line
                found.setdefault(graph["graph"], {})[sizes] = [name for name, _, _ in names]
        return found

    (file,) = (engine / "kernels").glob("*_swiglu-*.cubin")
    (decode,) = (graph for graph in explain(folder, "layers.0.mlp.swiglu")["graphs"] if graph["graph"] == "main.decode")
    assert decode["kernels"] == [f"always: swiglu of kernels/{file.name}"]
    attention = kernels("layers.2.self_attn.attention")
    assert set(attention) == {"main.prefill", "main.decode"}
    assert attention["main.decode"] == {
        "T <= 4 and B <= 16": ["mla_queries", "sm90_mla_decode", "mla_values_few"],
        "T <= 16 and B <= 16": ["mla_queries", "sm90_mla_decode", "mla_values"],
        "otherwise": ["mla_queries", "sm90_mla_decode", "mla_values"],
    }
    repeated = ["mla_dequantize", "mla_contexts", "mla_expand", "sm90_mla_prefill"]
    assert attention["main.prefill"]["otherwise"][-4:] == repeated
    head = kernels("mtp.eh_proj")["mtp.decode"]
    assert head == {"T <= 16": ["linear"], "otherwise": ["gemm"]}  # through cuBLAS: no kernel of the engine's
    readers = explain(folder, "model.layers.4.eh_proj.weight")["readers"]
    assert [reader["graph"] for reader in readers] == ["mtp.decode", "mtp.prefill"]
    assert all("otherwise: gemm" in reader["kernels"] for reader in readers)
    shown = dsc("explain", engine, "layers.0.mlp.swiglu").stdout
    assert f"kernel                 always: swiglu of kernels/{file.name}\n" in shown


def test_a_changed_kernel_is_told(build: Build, tmp_path: Path) -> None:
    """By its name and both sha256; and nothing else, where nothing else changed."""
    engine = build("fp8", "sm_90a")
    other = Path(shutil.copytree(engine, tmp_path / "other.engine"))
    (cubin,) = (other / "kernels").glob("*_swiglu-*.cubin")
    cubin.write_bytes(cubin.read_bytes() + b"\0")
    rehash(other)
    found = diff(EngineFolder.open(engine), EngineFolder.open(other))
    name = f"kernels/{cubin.name}"
    row = {"kernel": name, "a": hashes(engine)[name][:16], "b": hashes(other)[name][:16]}
    assert row["a"] != row["b"]
    assert found["kernels"] == [row]
    assert {key: rows for key, rows in found.items() if isinstance(rows, list) and rows} == {"kernels": [row]}
    result = dsc("diff", engine, other)
    assert result.exit_code == 1
    for told in row.values():
        assert told in result.stdout


def test_kernels_of_two_targets(build: Build) -> None:
    """Each has its own: all of both are told, with nothing on the other side."""
    engines = [build("fp8", "sm_90a"), build("wint8", "sm_80")]
    found = diff(*map(EngineFolder.open, engines))
    sides = [{row["kernel"] for row in found["kernels"] if row[side] != "-"} for side in ("a", "b")]
    assert sides == [{f"kernels/{file.name}" for file in (engine / "kernels").iterdir()} for engine in engines]
    assert not sides[0] & sides[1]
    assert all("-" in (row["a"], row["b"]) for row in found["kernels"])
    assert {"key": "target", "a": "sm_90a", "b": "sm_80"} in found["recipe"]


def test_an_engine_of_the_cpu_has_none(build: Build) -> None:
    engine = build("fp8", "cpu")
    assert "an engine for cpu has no kernels" in refusal("inspect", engine, "--kernels")
    data = json.loads(dsc("inspect", engine, "--kernels", "--json").stdout)
    assert (data["kernels"], data["steps"]) == ([], [])
    both = diff(EngineFolder.open(engine), EngineFolder.open(build("fp8", "sm_90a")))
    assert len(both["kernels"]) > 30
    assert {row["a"] for row in both["kernels"]} == {"-"}


def test_looking_takes_no_compiler_and_no_tools(build: Build) -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('triton', 'torch', 'onnx', 'cuda', 'nvidia')))  # an import of these fails\n"
        "from pathlib import Path; from dsc.runtime import inspect; from dsc.runtime.artifact import EngineFolder\n"
        f"inspect.show_kernels(EngineFolder.open(Path({str(build('fp8', 'sm_90a'))!r})))\n"
        "print([name for name in sys.modules if name.startswith('dsc.compiler')])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": "/nowhere"}
    )
    assert "sm90_mla_decode" in told.stdout
    assert told.stdout.splitlines()[-1] == "[]"


def test_a_kernel_that_spills_leaves_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support import planted_kernels

    from dsc.plugins.gpu_node import GpuNode
    from dsc.plugins.swiglu import kernel
    from dsc.runtime.steps import Variant

    def lower(node: GpuNode) -> tuple[Variant, ...]:
        arguments = {"gate": node.at("gate"), "y": node.at("y"), "BLOCK": 16384}
        return (Variant((node.triton(planted_kernels.planted_spill, (1,), arguments, num_warps=1),)),)

    monkeypatch.setattr(kernel, "lower", lower)
    arguments = ("compile", "--recipe", "tiny-r1-fp8", "--target", "sm_90a", "--model", TINY_R1)
    said = refusal(*arguments, "--output", tmp_path / "no.engine")
    assert "main.prefill: kernel planted_spill spills to local memory" in said
    assert "  op      dsc.Swiglu\n  node    layers.0.mlp.swiglu\n" in said
    assert not (tmp_path / "no.engine").exists()
