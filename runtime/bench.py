"""Measure an engine: decode and prefill over batches and contexts, against the least time a step can take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.bench_floor import RATES, Rates
from dsc.runtime.bench_points import DecodePoint, Plan, PrefillPoint, decode_data, knee, prefill_data
from dsc.runtime.bench_prefill import PrefillBench
from dsc.runtime.bench_steps import Bench
from dsc.runtime.doctor import driver_version
from dsc.runtime.engine import Engine, load
from dsc.runtime.errors import DscError

DEFAULT_BATCHES = (1, 16, 64, 128, 256)
DEFAULT_CONTEXTS = (2048, 4096, 8192)


def run_bench(
    path: Path,
    *,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    device: str | None = None,
    gpu_memory: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Load an engine with the cache that the measurements need, and measure it.

    batches, contexts  None: DEFAULT_BATCHES and DEFAULT_CONTEXTS as far as the engine's limits go
    options            of Plan
    raises             DscError where the engine is planned for less, or does not fit
    """
    manifest = EngineFolder.open(path).manifest
    limits, block_tokens = manifest.limits, manifest.kv_cache.block_tokens
    plan = Plan(
        batches or [b for b in DEFAULT_BATCHES if b <= limits.sequences],
        contexts or [c for c in DEFAULT_CONTEXTS if c <= limits.context_tokens] or [limits.context_tokens],
        **options,
    )
    if max(plan.batches) > limits.sequences or max(plan.contexts) > limits.context_tokens:
        raise DscError(
            "the engine was planned for smaller steps",
            where=str(path),
            wanted=f"--batch up to {limits.sequences}, --context up to {limits.context_tokens}",
            got=f"batch {max(plan.batches)}, context {max(plan.contexts)}",
        )
    blocks = -(-max(plan.contexts) // block_tokens) * max(max(plan.batches), limits.batch_tokens // min(plan.contexts))
    engine = load(path, device, cache_tokens=blocks * block_tokens, verify=False, gpu_memory=gpu_memory)
    return measure(engine, plan, path.name)


def measure(engine: Engine, plan: Plan, name: str = "", rates: Rates | None = None) -> dict[str, Any]:
    """Run a plan; returns JSON data (see `to_data`). Of several ranks all measure; times are those of rank 0.

    name   what the engine is called
    rates  of the device, None: the target's measured ones
    """
    with engine.loop.together("bench", {"plan": asdict(plan)}):
        return {"engine": name, **to_data(engine, *_measure(engine, plan, rates))}


def _measure(engine: Engine, plan: Plan, rates: Rates | None) -> tuple[list[DecodePoint], list[PrefillPoint]]:
    bench = Bench(engine, rates or RATES.get(engine.manifest.target))
    decode = [bench.decode(batch, context, plan) for context in plan.contexts for batch in plan.batches]
    prompts = PrefillBench(bench, plan.nodes)
    points = [(batch, context) for context in plan.contexts for batch in plan.batches] if plan.prefill else []
    return decode, [prompts.measure(batch, context) for batch, context in points]


def to_data(engine: Engine, decode: Sequence[DecodePoint], prefill: Sequence[PrefillPoint]) -> dict[str, Any]:
    """JSON data: model, device, versions, load, decode, prefill, knees by context; seconds, bytes and tokens throughout.

    Where routing hit too few experts there is no rate and no time of the model's steps.
    """
    device = engine.backend.device
    contexts = list(dict.fromkeys(point.context for point in decode))
    return {
        "model": str(engine.manifest.recipe.get("model", "")),
        "target": engine.manifest.target,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "driver": driver_version(),
        "toolchain": {**engine.manifest.toolchain, "torch": torch.__version__},
        "limits": asdict(engine.manifest.limits),
        "load": engine.backend.describe(),
        "weight_bytes": engine.resident_weight_bytes(),
        "cache_tokens": engine.cache.capacity_tokens,
        "decode": [decode_data(point) for point in decode],
        "prefill": [prefill_data(point) for point in prefill],
        "knee": {str(c): knee([p for p in decode if p.context == c]) for c in contexts},
    }
