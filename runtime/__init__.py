"""Load and run an engine: `from dsc import runtime; engine = runtime.load(path)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from dsc.runtime.engine import Engine


def load(
    path: str | PathLike[str],
    device: str | None = None,
    *,
    cache_tokens: int | None = None,
    prefix_reuse: bool = True,
    verify: bool = True,
    gpu_memory: float | None = None,
) -> Engine:
    """Load an engine folder. See `dsc.runtime.engine.load`, which this calls (torch is imported only then)."""
    from dsc.runtime.engine import load as load_engine

    return load_engine(
        path,
        device,
        cache_tokens=cache_tokens,
        prefix_reuse=prefix_reuse,
        verify=verify,
        gpu_memory=gpu_memory,
    )
