"""What a bound step is: something to call with the stream to work on."""

from collections.abc import Callable

Call = Callable[[int], object]  # takes the stream; torch calls use the current one, which is the same
