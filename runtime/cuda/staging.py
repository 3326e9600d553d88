"""A step's inputs on their way to the device: one pinned block on the host, one block on the device, one copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

ALIGN = 256
PADDING = {"slots": -1}  # what padded rows hold; other inputs 0, query_starts the number of real tokens


class Staging:
    """Copies the inputs of a program into the fixed memory its kernels read, padded to the shape that runs.

    targets   device memory of each input at its bound, flat
    Small inputs that come from the host travel together; inputs already on the device are copied there.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor]) -> None:
        self._targets = dict(targets)
        self._pinned: dict[str, torch.Tensor] = {}
        self._done: torch.cuda.Event | None = None

    def fill(
        self,
        inputs: Mapping[str, torch.Tensor],
        real: Mapping[str, int],
        padded: Mapping[str, int],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Write every input into its memory on the current stream."""
        if self._done is not None:
            self._done.synchronize()  # the copy before has left the pinned block
        for name, target in self._targets.items():
            given, shape = inputs[name], shapes[name]
            if given.data_ptr() == target.data_ptr():
                continue  # it is there already
            count = 1
            for size in shape:
                count *= size
            filler = real["T"] if name == "query_starts" else PADDING.get(name, 0)
            if given.is_cuda:
                self._put(target[:count].view(shape), given, filler)
                continue
            pinned = self._pinned_for(name)[:count]
            self._put(pinned.view(shape), given, filler)
            target[:count].copy_(pinned, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def _pinned_for(self, name: str) -> torch.Tensor:
        """Pinned memory of an input that comes from the host; large ones (logits, hidden rows) never do."""
        if name not in self._pinned:
            target = self._targets[name]
            self._pinned[name] = torch.zeros(target.numel(), dtype=target.dtype, pin_memory=True)
        return self._pinned[name]

    @staticmethod
    def _put(memory: torch.Tensor, given: torch.Tensor, filler: int) -> None:
        if memory.shape == given.shape:
            memory.copy_(given)
            return
        memory.fill_(filler)
        memory[tuple(slice(0, size) for size in given.shape)].copy_(given)
