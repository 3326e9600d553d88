"""What is called later: the steps of a program, and the end of what may be gone by then."""

import weakref
from collections.abc import Callable
from typing import Any

Call = Callable[[int], object]  # takes the stream; torch calls use the current one, which is the same


def weak_call(owner: Any, method: Callable[[Any], None]) -> Callable[[], None]:
    """A call of a method that does not keep its owner: nothing happens once that is gone."""
    held = weakref.ref(owner)

    def call() -> None:
        found = held()
        if found is not None:
            method(found)

    return call
