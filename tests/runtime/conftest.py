"""Engines of examples/tiny-r1, compiled once a session."""

import pytest
import torch
from support.engines import compile_tiny

from dsc import runtime


@pytest.fixture(scope="session")
def fp32_folder(tmp_path_factory):
    """tiny-r1 in float32: numbers may be compared closely."""
    return compile_tiny("tiny-r1-fp32", tmp_path_factory.mktemp("fp32"))


@pytest.fixture(scope="session")
def wint4_folder(tmp_path_factory):
    """tiny-r1 as people run it."""
    return compile_tiny("tiny-r1-wint4", tmp_path_factory.mktemp("wint4"))


@pytest.fixture(scope="session")
def fp32(fp32_folder):
    torch.set_num_threads(1)
    return runtime.load(fp32_folder)


@pytest.fixture(scope="session")
def wint4(wint4_folder):
    torch.set_num_threads(1)
    return runtime.load(wint4_folder)
