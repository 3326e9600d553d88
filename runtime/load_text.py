"""What loading an engine came to, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def load_text(loaded: Mapping[str, Any], cache_tokens: int) -> str:
    """For example "loaded 26.3 GB in 8.1 s, 3.25 GB/s; the cache holds 4,038,272 tokens".

    loaded        of `Backend.describe`: GB, seconds and GB/s; {} where weights are mapped and read as they are used
    cache_tokens  tokens of all sequences together
    """
    cache = f"the cache holds {cache_tokens:,} tokens"
    if not loaded:
        return cache
    return f"loaded {loaded['gb']:.1f} GB in {loaded['load_seconds']:.1f} s, {loaded['gb_per_s']:.2f} GB/s; {cache}"
