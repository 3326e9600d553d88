"""The sampler's kernels on a GPU: microseconds a call, by kind of rows.

    python benchmarks/gpu_sample.py [--rows 64,256] [--before FILE] [--json FILE] [--compile-only]

Rows are greedy, greedy with a mask, or drawn with a temperature, top_p and top_k: from logits as models have them (`zipf`: the
logit of rank r is 12 - 2.2 log(r + 1), noise added), whose head is short, or from normal ones (`flat`), where thousands of
tokens share the mass and rows are read again and again. The first rows are held against the reference. --before is another
kernel.py of Sample, timed beside it, whose results must be the same bit for bit. --compile-only fills the kernels' cache.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import torch
from node_times import Bound, Case, Times, microseconds, run
from support.sample_cases import differences, zipf

from dsc.plugins.sample import kernel
from dsc.plugins.sample.reference import reference

VOCABULARY = 129280
RESULTS = {"tokens": torch.int32, "accepted": torch.int32, "logprobs": torch.float32}
# Logits, temperature, top_p, top_k.
KINDS = {
    "greedy": ("flat", 0.0, 1.0, 0),
    "masked": ("flat", 0.0, 1.0, 0),
    "zipf 0.6 p": ("zipf", 0.6, 0.95, 0),
    "zipf 0.6 p k": ("zipf", 0.6, 0.95, 50),
    "zipf 1.0 p": ("zipf", 1.0, 0.95, 0),
    "zipf 1.0": ("zipf", 1.0, 1.0, 0),
    "flat 0.6 p": ("flat", 0.6, 0.95, 0),
    "flat 0.6 p k": ("flat", 0.6, 0.95, 50),
}


def sample_case(most: int, before: ModuleType | None) -> Case:
    """Sample on R1's vocabulary, as it is and as `before` has it."""
    floats, ints = ("temperature", "top_p", "min_p"), ("top_k", "positions", "drafts")
    inputs = {name: torch.empty(most, device="meta") for name in floats}
    inputs |= {name: torch.empty(most, dtype=torch.int32, device="meta") for name in ints}
    inputs |= {
        "seeds": torch.empty(most, dtype=torch.int64, device="meta"),
        "logits": torch.empty(most, VOCABULARY, device="meta"),
        "token_mask": torch.empty(most, -(-VOCABULARY // 32), dtype=torch.int32, device="meta"),
    }
    made: dict[str, dict[str, object]] = {"now": {}}
    if before is not None:
        made = {"before": {"lower": before.lower}, **made}
    return Case("Sample", "", kernel, made, inputs, {}, "R", most)


@cache
def logits_of(name: str, rows: int) -> torch.Tensor:
    """Rows of normal logits, or of those that models have."""
    g = torch.Generator().manual_seed(rows)
    return zipf(rows, VOCABULARY, g) if name == "zipf" else 2 * torch.randn(rows, VOCABULARY, generator=g)


def step_of(kind: str, rows: int) -> dict[str, torch.Tensor]:
    """Operands of rows of a kind, on the CPU."""
    logits, heat, top_p, top_k = KINDS[kind]
    mask = torch.full((rows, -(-VOCABULARY // 32)), -1, dtype=torch.int32)
    if kind == "masked":
        mask = torch.randint(-(2**31), 2**31, mask.shape, generator=torch.Generator().manual_seed(rows)).int()
    return {
        "logits": logits_of(logits, rows), "temperature": torch.full((rows,), heat), "top_p": torch.full((rows,), top_p),
        "top_k": torch.full((rows,), top_k).int(), "min_p": torch.zeros(rows), "seeds": torch.arange(rows),
        "positions": torch.arange(rows).int(), "token_mask": mask, "drafts": torch.full((rows,), -1).int(),
    }  # fmt: skip


def samples(case: Case, every: Sequence[int]) -> Iterator[tuple[str, str, int, float, float, float]]:
    """Check and time Sample on rows of every kind."""
    made, stream = case.lowered(), torch.cuda.Stream()
    for kind in KINDS:
        step = step_of(kind, case.most)
        want = reference(**{name: tensor[:8] for name, tensor in step.items()})
        step = {name: tensor.cuda() for name, tensor in step.items()}
        out = {name: torch.empty(case.most, dtype=dtype, device="cuda") for name, dtype in RESULTS.items()}
        bound = {name: Bound(*program, {**step, **out}) for name, program in made.items()}
        for count in every:
            first: torch.Tensor | None = None
            errors, calls = {}, {}
            for name, one in bound.items():
                calls[name] = one.calls({"R": count})
                for tensor in out.values():
                    tensor.view(torch.uint8).fill_(0xFF)
                run(calls[name], stream)
                got = {key: tensor[: min(count, 8)].clone() for key, tensor in out.items()}
                found = torch.cat([tensor.view(torch.int32).clone() for tensor in out.values()])
                first = found if first is None else first
                wrong = differences(got, tuple(tensor[:count] for tensor in want))
                errors[name] = math.inf if wrong or not torch.equal(found, first) else 0.0
            for name, time in microseconds(calls, 1, stream).items():
                yield f"sample {kind}", name, count, time, errors[name], 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    before = None
    if options.before is not None:
        sys.path.insert(0, str(options.before.parent.resolve()))
        before = importlib.import_module(options.before.stem)
    case = sample_case(max(rows), before)
    if options.compile_only:
        case.lowered()
        return
    times = Times(rows, options.json)
    times.measure(case, partial(samples, case, rows))
    times.show()


if __name__ == "__main__":
    main()
