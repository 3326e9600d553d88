"""Work through a list with threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def work_through(items: Iterable[Item], work: Callable[[Item], None], threads: int) -> None:
    """Call `work` with every item; threads take them in their order, and torch has one thread in each.

    The first failure, or an interrupt, ends it once the calls under way have returned; of several failures the one of the
    earliest item is raised.
    """
    queue, lock, stop = enumerate(items), threading.Lock(), threading.Event()
    failures: list[tuple[int, BaseException]] = []

    def loop() -> None:
        torch.set_num_threads(1)
        while not stop.is_set():
            with lock:
                number, item = next(queue, (-1, None))
            if number < 0:
                return
            try:
                work(item)  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001
                failures.append((number, error))
                stop.set()

    before = torch.get_num_threads()
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        running = [pool.submit(loop) for _ in range(max(threads, 1))]
        try:
            for each in running:
                each.result()
        finally:
            stop.set()
    torch.set_num_threads(before)
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
