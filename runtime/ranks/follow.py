"""`python -m dsc.runtime.ranks.follow`: the process of a rank that a leader on this machine started."""

from __future__ import annotations

import argparse
import os
import sys

from dsc.runtime.ranks.processes import end_with


def main() -> None:
    """Follow the leader until it closes the engine or is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    for name in ("--rank", "--ranks", "--port", "--parent"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    end_with(given.parent)  # before torch is imported, which takes seconds

    from dsc.runtime.artifact import EngineFolder
    from dsc.runtime.errors import DscError
    from dsc.runtime.ranks.launch import Launch
    from dsc.runtime.ranks.load import follow
    from dsc.runtime.ranks.meeting import home_store_at

    launch = Launch(given.rank, given.ranks, given.rank, given.ranks)
    try:
        follow(EngineFolder.open(given.folder), launch, home_store_at(given.port))
    except DscError as error:
        sys.exit(error.text())
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of gloo or NCCL


if __name__ == "__main__":
    main()
