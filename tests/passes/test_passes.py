"""What holds for every pass file: one pass, named as the file, documented with its pattern, tested."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import onnx
import pytest

from dsc.compiler.ir.rewrite import find_pass, pass_names
from dsc.runtime.errors import DscError

VERBS = ("fold", "fuse", "insert", "quantize", "shard", "plan", "lower", "set")


def test_names_are_the_files():
    folder = Path(__file__).parents[2] / "passes"
    assert pass_names() == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    assert len(pass_names()) >= 5


@pytest.mark.parametrize("name", pass_names())
def test_a_pass(name):
    type_ = find_pass(name)
    assert name.partition("_")[0] in VERBS
    assert type_.__name__ == "".join(part.capitalize() for part in name.split("_"))
    assert is_dataclass(type_)
    assert type_.__dataclass_params__.frozen
    assert inspect.getmodule(type_).__doc__
    assert not str(type_.__doc__).startswith((f"{type_.__name__}(", "None")), "no docstring of its own"
    assert set(vars(type_)).issuperset({"expected", "run"})
    if name.startswith(("fuse", "insert")):
        assert re.search(r"->.*dsc\.\w+", type_.__doc__, re.S), "the docstring shows what becomes of which pattern"
    for option in fields(type_):
        assert option.name in type_.__doc__, f"option {option.name} is not documented"


@pytest.mark.parametrize("name", pass_names())
def test_a_pass_takes_ops_that_exist(name):
    for op in find_pass(name).takes:
        assert onnx.defs.has(op), op


@pytest.mark.parametrize("name", pass_names())
def test_a_pass_is_tested(name):
    assert (Path(__file__).parent / f"test_{name}.py").is_file()


def test_unknown_names_get_the_nearest():
    with pytest.raises(DscError, match="unknown pass fuse_swigl") as error:
        find_pass("fuse_swigl")
    assert error.value.try_ == "fuse_swiglu"
