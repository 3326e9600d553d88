"""An engine as its users run it: loaded whole on its device, its logits of every token of some windows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from dsc.compiler.certify.steps import Windows
from dsc.runtime.batch import Batch, Segment
from dsc.runtime.engine import load


def device_logits(path: Path, device: str, windows: Windows, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """At most `rows` rows at a time in the order of the windows: where they lie among all rows, logits [R, V] on the CPU.

    A step gives as many logits as the engine's prefill graph has room for; a window goes on over the cache.
    """
    engine = load(path, device, cache_tokens=max(map(len, windows)), prefix_reuse=False)  # one window at a time
    block_tokens = engine.manifest.kv_cache.block_tokens
    letters = engine.programs[engine.manifest.models["main"].phases["prefill"]].program.letters
    size = min(rows, letters["T"], letters["R"])
    at = 0
    for window in windows:
        blocks = engine.cache.pool.take(engine.cache.blocks_for(len(window)))
        assert blocks is not None, (len(window), engine.cache.capacity_tokens)
        for start in range(0, len(window), size):
            piece = list(window[start : start + size])
            batch = Batch.of([Segment(piece, start, blocks, logits=len(piece))], block_tokens)
            yield slice(at, at + len(piece)), engine.forward(batch, phase="prefill").float().cpu()
            at += len(piece)
        engine.cache.pool.give(blocks)
