"""Sample's GPU kernels without a GPU: on the CPU they choose what the reference chooses, compiled they stay in registers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsc.compiler.codegen import CubinCompiler
from dsc.plugins.gpu_node import Arch, GpuNode
from dsc.plugins.moe.few_tokens import SHARED_BYTES
from dsc.plugins.sample.kernel import lower
from dsc.plugins.schema import Type, load_op
from dsc.runtime.steps import Kernel

TESTS = Path(__file__).parents[1]
KERNELS = ["sample_scan", "sample_draw", "sample_pick", "sample_accept"]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
PER_ROW = {
    "temperature": "float32", "top_p": "float32", "top_k": "int32", "min_p": "float32", "seeds": "int64",
    "positions": "int32", "drafts": "int32",
}  # fmt: skip


def sample_node(arch: str, vocabulary: int = 129280) -> tuple[GpuNode, CubinCompiler]:
    op, compiler = load_op("Sample"), CubinCompiler(Arch(arch))
    types = {name: Type(dtype, ("R",)) for name, dtype in PER_ROW.items()}
    types["logits"] = Type("float32", ("R", vocabulary))
    types["token_mask"] = Type("int32", ("R", -(-vocabulary // 32)))
    made, dims = op.check([types[slot] for slot in op.slot_names()], {})
    outputs = {tensor.name: tensor.name for tensor in op.outputs}
    node = GpuNode(
        name="sample", op="Sample", attributes={}, dims=dims, inputs={name: name for name in types}, outputs=outputs,
        types={**types, **dict(zip(outputs, made, strict=True))}, arch=Arch(arch), compiler=compiler,
    )  # fmt: skip
    return node, compiler


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("vocabulary", [2048, 102400, 129280, 163840])
def test_kernels_compile_and_nothing_spills(arch: str, vocabulary: int):
    node, compiler = sample_node(arch, vocabulary)
    (variant,) = lower(node)
    compiler.build()
    assert [step.entry for step in variant.steps if isinstance(step, Kernel)] == KERNELS
    assert len(compiler.built) == len(KERNELS)
    assert {built.resources.stack_bytes for built in compiler.built.values()} == {0}
    assert all(step.pdl == (arch != "sm_80") for step in variant.steps if isinstance(step, Kernel))


@pytest.mark.parametrize("capability", [90, 100])
def test_two_blocks_that_draw_fit_on_a_multiprocessor(capability: int):
    (variant,) = lower(sample_node(f"sm_{capability}a")[0])
    (draw,) = (step for step in variant.steps if isinstance(step, Kernel) and step.entry == "sample_draw")
    # Every block takes 1 KiB more, one of which is not in what its blocks have together.
    assert 2 * int(draw.shared_bytes) <= SHARED_BYTES[capability] - 1024


def on_cpu(*arguments: str) -> str:
    """In a process of its own: Triton decides once whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.sample_cases", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=TESTS, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_compiler
def test_kernels_on_the_cpu_choose_what_the_reference_chooses():
    assert on_cpu("3") == "0 differences"


@needs_compiler
@pytest.mark.parametrize("temperature", ["0.6", "1.0"])
def test_rows_of_real_models_are_read_once_to_draw(temperature: str):
    """Their heads are short, so that no row is searched by reading it again."""
    assert float(on_cpu("readings", "zipf", temperature)) == 1.0
