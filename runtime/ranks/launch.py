"""Whether this process is one of several that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dsc.runtime.errors import DscError

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """A process among `ranks`, of which `local_ranks` are on this machine."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


def find_launch(environment: Mapping[str, str] | None = None) -> Launch | None:
    """What torchrun says in the environment; None where it started no process, or this one alone.

    Raises DscError where the variables do not fit together.
    """
    given = os.environ if environment is None else environment
    if "MASTER_ADDR" not in given or given.get("WORLD_SIZE", "1") == "1":
        return None
    texts = {name: given.get(name, "") for name in _NUMBERS}
    if not all(text.isdecimal() for text in texts.values()):
        raise DscError(
            "the environment tells only in part which rank this process is",
            wanted=f"{', '.join(_NUMBERS)}, as torchrun sets them",
            got=", ".join(f"{name} {text or 'not set'}" for name, text in texts.items()),
        )
    found = Launch(*(int(texts[name]) for name in _NUMBERS[:4]))
    if not (found.rank < found.ranks and found.local_rank < found.local_ranks <= found.ranks):
        got = ", ".join(f"{name} {text}" for name, text in texts.items())
        raise DscError("the environment names no rank that there is", wanted="RANK below WORLD_SIZE", got=got)
    return found
