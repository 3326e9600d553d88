"""dsc inspect --kernels as text: spills, allowances and remedies are told, and what an older engine does not know is a dash."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from dsc.runtime.inspect_kernel_tables import show_kernels

KERNEL: dict[str, Any] = {
    "cubin": "kernels/sm90_linear-0123456789.cubin", "entry": "linear", "ops": ["Linear", "Qkv"], "registers": 168,
    "stack_bytes": 0, "static_shared_bytes": 1024, "tensor_cores": ["QGMMA"], "fp8": ["QGMMA.64x64x32.F32.E4M3.E4M3"],
    "remedy": "", "allowed": "", "dynamic_shared_bytes": 98816, "threads": 128, "bytes": 13670,
    "launches": {"main.decode": {"1": 5, "16": 0}, "sample": {"1": 0, "16": 0}},
}  # fmt: skip
STEP: dict[str, Any] = {
    "graph": "main.decode", "tokens": 1, "launches": 12, "kinds": {"kernel": 11, "gemm": 1},
    "parts": {"embed_tokens": 1, "layers.0": 2, "layers.1": 4, "layers.2": 4, "lm_head": 1},
}  # fmt: skip


def printed(*kernels: dict[str, Any], step: dict[str, Any] = STEP) -> str:
    out = io.StringIO()
    show_kernels(kernels, [step], Console(file=out))
    return out.getvalue()


def row_of(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(name))


def test_a_kernel_and_a_step() -> None:
    text = printed(KERNEL)
    row = row_of(text, "linear 0123456789")
    told = ["Linear,", "Qkv", "168", "0", "1,024", "98,816", "128", "QGMMA,", "FP8", "13.67", "kB", "5/-"]
    assert row[2:] == told
    assert "sample" not in text, "no kernel here is launched by it"
    assert "1 cubin, 13.67 kB, none spills" in text
    step = "main.decode 1 12 1 layer 0: 2, layers 1-2: 4 each, embed_tokens: 1, lm_head: 1"
    assert row_of(text, "main.decode") == step.split()


def test_collectives_have_a_column_where_there_are_several_ranks() -> None:
    assert "exchanges" not in printed(KERNEL)
    step = {**STEP, "launches": 15, "kinds": {**STEP["kinds"], "collective": 3}}
    text = printed(KERNEL, step=step)
    assert "cuBLAS exchanges" in " ".join(text.split())
    assert row_of(text, "main.decode")[:5] == ["main.decode", "1", "15", "1", "3"]


def test_what_is_not_as_it_should_be() -> None:
    spilling = {**KERNEL, "entry": "moe_down", "stack_bytes": 88, "allowed": "measured: faster so"}
    text = printed({**KERNEL, "remedy": "bounded by 96 registers"}, spilling)
    assert "2 cubins, 27.34 kB, spilling: moe_down" in text
    assert "linear 0123456789: spilled, compiled again: bounded by 96 registers" in text
    assert "moe_down 0123456789: allowed: measured: faster so" in text


def test_an_engine_of_an_older_dsc() -> None:
    keys = ("registers", "stack_bytes", "static_shared_bytes", "tensor_cores", "fp8", "remedy", "allowed")
    text = printed({**KERNEL, **dict.fromkeys(keys)})
    assert row_of(text, "linear 0123456789")[4:8] == ["-", "-", "-", "98,816"]
    assert "whether they spill was not looked at" in text
