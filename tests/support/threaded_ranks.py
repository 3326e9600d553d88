"""`dsc.runtime.ranks.threads.run_ranks` for tests: ops may be bound on the ranks' threads too, and nobody waits long.

sums = run_ranks(4, lambda rank: CpuOp("reference", "AllReduce", {"x": parts[rank]}, {"ranks": 4})()["y"])
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from dsc.runtime.ranks import threads

Result = TypeVar("Result")
SECONDS = 60.0  # that a rank waits for the others


def run_ranks(ranks: int, function: Callable[[int], Result]) -> list[Result]:
    """`function(rank)` on a thread for each rank; results in the order of the ranks, or what the first to fail raised."""
    with one_parser():
        return threads.run_ranks(ranks, function, SECONDS)


@contextmanager
def one_parser() -> Iterator[None]:
    """Meanwhile one thread parses at a time: CPython 3.11 counts how deep all of them are together, and stops where that does
    not add up.
    """
    lock, parse = threading.Lock(), ast.parse

    def locked(*arguments: Any, **options: Any) -> Any:
        with lock:
            return parse(*arguments, **options)

    with mock.patch.object(ast, "parse", locked):
        yield
