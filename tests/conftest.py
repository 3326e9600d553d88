"""Puts this folder on sys.path, so that tests share code as `from support.families import make_checkpoint`."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="also the long runs of tests/soak")


def pytest_ignore_collect(collection_path, config):
    """Leave out tests/soak unless asked for; None is no opinion."""
    return True if collection_path.name == "soak" and not config.getoption("--soak") else None


def pytest_configure(config):
    """Markers of tests that do not run everywhere."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU of compute capability 9.0; `make test-gpu` runs these")


def pytest_collection_modifyitems(items):
    """Leave out GPU tests where there is no GPU: they would only say that."""
    import torch

    if not torch.cuda.is_available():
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
