"""How the ranks' CPU ops exchange tensors: by gloo."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsc.runtime.ranks.group import Group

MEETING = timedelta(seconds=60)
WAIT = timedelta(seconds=1800)  # a rank that dies is known at once; this long one may compute while another waits


class GlooCommunicator:
    """See `dsc.plugins.communicator.Communicator`. Making one waits for all ranks."""

    def __init__(self, group: Group) -> None:
        self.rank, self.ranks = group.rank, group.ranks
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs know little of it
        options = gloo._Options()
        options._timeout = MEETING
        options._devices = [gloo.create_device(hostname=group.address)]
        self._gloo: Any = gloo(group.store_of("gloo"), group.rank, group.ranks, options)
        self._gloo.set_timeout(WAIT)

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Every rank's tensor, in the order of the ranks."""
        found = torch.empty(self.ranks, *x.shape, dtype=x.dtype)
        # As bytes: gloo does not know every dtype.
        own, every = x.contiguous().view(-1).view(torch.uint8), found.view(-1).view(torch.uint8)
        self._gloo._allgather_base(every, own).wait()
        return found.unbind()

    def close(self) -> None:
        """Let go of the other ranks. Threads of gloo must have ended before Python does, whose objects they may hold."""
        self._gloo = None
