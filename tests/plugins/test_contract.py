"""One contract for all plugin folders: schema, reference and cpu.py say the same."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from support.compare import compare
from support.op_cases import CASES, Case, Draw, formats_of

from dsc.plugins.schema import Op, folder_of, load_op, plugin_folders

OPS = sorted(CASES)
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = (0, 1, 3, 129)


def make_case(op: str, tokens: int, dtype: torch.dtype, format_: str) -> Case:
    return CASES[op](Draw(tokens, dtype, format_, torch.Generator().manual_seed(tokens + 1)))


def test_every_folder_has_cases():
    assert sorted(map(folder_of, CASES)) == plugin_folders()


@pytest.mark.parametrize("folder", plugin_folders())
def test_folder(folder):
    module = importlib.import_module(f"dsc.plugins.{folder}.op")
    op = module.OP
    assert isinstance(op, Op)
    assert module.__doc__
    assert folder_of(op.name) == folder
    assert op.doc.strip(), "an op explains itself"
    assert all(tensor.alias in {t.name for t in op.inputs} for tensor in op.outputs if tensor.alias)
    cost = op.cost(make_case(op.name, 3, torch.bfloat16, "bf16").dims())
    assert cost.bytes > 0
    assert cost.flop >= 0


@pytest.mark.parametrize("op", OPS)
def test_reference_takes_operands_and_attributes(op):
    schema = load_op(op)
    signature = inspect.signature(importlib.import_module(f"dsc.plugins.{folder_of(op)}.reference").reference)
    assert list(signature.parameters) == [t.name for t in schema.inputs] + [*schema.attributes, *schema.optional]
    assert {p.kind for p in signature.parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_cpu_equals_reference(op, dtype):
    """Over all formats and token counts; CpuOp checks both sides' outputs against the schema."""
    if not has_cpu(op):
        pytest.skip("runs by its reference")
    for format_ in formats_of(op):
        for tokens in TOKENS:
            case = make_case(op, tokens, dtype, format_)
            reference, cpu = case.bind("reference"), case.bind("cpu")
            want, got = reference(), cpu()
            for name, value in got.items():
                what = f"dsc.{op}.{name}, {tokens} tokens, {format_}, {dtype}"
                compare(case, name, value, want[name], dtype, what)
            check_operands(case, cpu, f"dsc.{op}, {tokens} tokens, {format_}, {dtype}")


@pytest.mark.parametrize(
    "op", [op for op in OPS if any(t.dtypes and "float32" in t.dtypes for t in load_op(op).outputs)]
)
def test_rows_are_their_own(op):
    """The reference's values are finite and not all alike: a comparison with it can fail."""
    outputs = make_case(op, 129, torch.float32, "bf16").bind("reference")()
    for name, value in outputs.items():
        if value.is_floating_point() and name != "logprobs":
            assert bool(value.isfinite().all()), name
            assert value.norm(dim=-1).unique().numel() > 4, name


def has_cpu(op: str) -> bool:
    package = importlib.import_module(f"dsc.plugins.{folder_of(op)}")
    return importlib.util.find_spec(f"{package.__name__}.cpu") is not None


def check_operands(case: Case, node, what: str) -> None:
    """Nothing but aliased operands was written to, and an aliased output is its operand's memory."""
    written = {t.alias for t in node.op.outputs if t.alias}
    for name, value in case.operands.items():
        if isinstance(value, torch.Tensor) and name not in written:
            assert torch.equal(node.operands[name], value), f"{what}: {name} was changed"
