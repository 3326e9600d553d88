"""Puts this folder on sys.path, so that tests share code as `from support.families import make_checkpoint`."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
