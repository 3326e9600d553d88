"""Ctrl-C while the ranks do something together: it is held until they are done, so that they stay in step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the block; that of a second one at once.

    Only where Python's own handler would raise it, in the main thread.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came += 1
        if came > 1:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came == 1:
        raise KeyboardInterrupt
