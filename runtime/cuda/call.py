"""A bound step."""

from collections.abc import Callable

Call = Callable[[int], object]  # takes the stream; torch calls use the current one, which is the same
