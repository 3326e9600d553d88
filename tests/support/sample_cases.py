"""Rows of logits and sampling parameters for the Sample op, awkward ones among them.

As a program, with TRITON_INTERPRET=1 in the environment: the GPU kernels of Sample run on the CPU, interpreted, against
the reference. It says which cases differ and ends with their number;
`readings zipf 0.6` says how often rows of such logits are read to draw with that temperature.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dsc.plugins.sample.reference import reference
from support.cuda_on_cpu import cuda_on_cpu

KINDS = ("normal", "flat", "wide", "ties", "equal", "odd", "zipf", "halves")


def zipf(rows: int, vocabulary: int, g: torch.Generator) -> torch.Tensor:
    """Logits as language models have them, in any order: they fall with the logarithm of the rank."""
    ranks = torch.argsort(torch.rand(rows, vocabulary, generator=g), 1)
    return 12 - 2.2 * torch.log1p(ranks.float()) + 0.5 * torch.randn(rows, vocabulary, generator=g)


def make_case(rows: int, vocabulary: int, kind: str, seed: int) -> dict[str, torch.Tensor]:
    """Operands of one call. `rows` is at least 8; kind "odd" has NaN, infinities, empty masks, both zeros, huge logits; of
    "halves" every row has 8 tokens of one probability, and top_p keeps exactly 4."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g)

    def some(values: torch.Tensor, share: float, otherwise: float) -> torch.Tensor:
        return torch.where(uniform(rows) < share, values, torch.full_like(values, otherwise))

    logits = torch.randn(rows, vocabulary, generator=g) * {"flat": 0.01, "wide": 6.0}.get(kind, 1.7)
    if kind == "zipf":
        logits = zipf(rows, vocabulary, g)
    if kind == "ties":
        logits = (logits * 2).round() / 2
    if kind == "equal":
        logits[:] = 0.25
    temperature = some(0.2 + 1.5 * uniform(rows), 0.8, 0.0)
    top_k = torch.where(uniform(rows) < 0.5, uniform(rows) * vocabulary * 1.1, uniform(rows) * 20)
    mask = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32)), generator=g).int()
    mask[uniform(rows) < 0.5] = -1
    if kind == "odd":
        logits[0, 5], logits[2], logits[3, 7], logits[4, ::2] = float("nan"), float("-inf"), float("inf"), float("-inf")
        logits[5], logits[5, 3::2], logits[7] = -0.0, 0.0, logits[7] * 1e37
        mask[1], mask[6], mask[6, 0] = 0, 0, 16
        temperature[5:7] = 1.0
    case = {
        "logits": logits,
        "temperature": temperature,
        "top_p": some(uniform(rows), 0.5, 1.0),
        "top_k": some(top_k, 0.5, 0.0).int(),
        "min_p": some(0.5 * uniform(rows), 0.4, 0.0),
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=g),
        "positions": torch.randint(0, 100_000, (rows,), generator=g).int(),
        "token_mask": mask,
        "drafts": torch.full((rows,), -1, dtype=torch.int32),
    }
    if kind == "halves":
        case["logits"][:] = -torch.inf
        case["logits"][:, 3 : 3 + 8 * 5 : 5] = 1.5
        case |= {"temperature": torch.ones(rows), "top_p": torch.full((rows,), 0.5), "top_k": torch.zeros(rows).int()}
        case |= {"min_p": torch.zeros(rows), "token_mask": torch.full_like(mask, -1)}
    # Most drafts are right, some are wrong, some rows end their sequence.
    drafts = reference(**case)[0]
    drafts[uniform(rows) < 0.15] = 3
    drafts[uniform(rows) < 0.3] = -1
    case["drafts"] = drafts
    return case


def differences(got: dict[str, torch.Tensor], want: tuple[torch.Tensor, ...]) -> list[str]:
    """What of tokens, accepted and logprobs differs, one line each."""
    tokens, accepted, logprobs = want
    rows = (got["tokens"].cpu() != tokens).nonzero().flatten().tolist()
    found = [f"row {row}: token {int(got['tokens'][row])}, wanted {int(tokens[row])}" for row in rows]
    if not torch.equal(got["accepted"].cpu(), accepted):
        found.append(f"accepted {got['accepted'].tolist()}, wanted {accepted.tolist()}")
    if not torch.allclose(got["logprobs"].cpu(), logprobs, rtol=1e-6, atol=3e-5, equal_nan=True):
        found.append(f"logprobs {got['logprobs'].tolist()}, wanted {logprobs.tolist()}")
    return found


def draw_on_cpu(
    case: dict[str, torch.Tensor], floats: torch.Tensor, threads: int, room: int, few: int
) -> tuple[torch.Tensor, float]:
    """The tokens of draw.cu, compiled for the CPU, int32 [R], -7 where it writes none; and how often it read all rows."""
    from dsc.plugins.sample import kernel

    R, V = case["logits"].shape
    defines = kernel.draw_defines(V, case["token_mask"].shape[1], floats.shape[2], False, threads, room, few)
    drawn = torch.full((R,), -7, dtype=torch.int32)
    given = {**case, "floats": floats, "drawn": drawn}
    pointers = [given[name].contiguous() for name in kernel.DRAW_ARGUMENTS]
    source = Path(kernel.__file__).with_name("draw.cu")
    entry = cuda_on_cpu(source, "sample_draw", tuple(sorted(defines.items())), threads, len(pointers))
    copied = entry(R, *[ctypes.c_void_p(tensor.data_ptr()) for tensor in pointers])
    vector = 4 if V % 4 == 0 else 1
    return drawn, copied / (R * V * (4 + 4 / vector))


def interpreted(case: dict[str, torch.Tensor], split: int, threads: int, room: int, few: int) -> dict[str, Any]:
    """The kernels one after the other on the CPU, with block sizes small enough that every loop turns."""
    import triton

    from dsc.plugins.sample import kernel

    R, V = case["logits"].shape
    S, ints = -(-V // split), torch.int32
    floats = torch.full((R, 3, S), float("nan"))
    given: dict[str, Any] = {
        **case, "floats": floats, "ints": torch.full((R, S), -1, dtype=ints),
        "tokens": torch.full((R,), -7, dtype=ints), "accepted": torch.full((R,), -7, dtype=ints),
        "logprobs": torch.zeros(R), "V": V, "W": case["token_mask"].shape[1], "S": S, "S2": triton.next_power_of_2(S),
        "SPLIT": split, "PDL": False, "R": R, "BLOCK": 4,
    }  # fmt: skip
    for name, grid in (("scan", (R, S)), ("pick", (R,)), ("accept", (1,))):
        if name == "pick":
            given["drawn"], given["readings"] = draw_on_cpu(case, floats, threads, room, few)
        function = getattr(kernel, f"sample_{name}")
        function[grid](*[given[parameter] for parameter in function.arg_names])
    return {name: given[name] for name in ("tokens", "accepted", "logprobs", "readings")}


def check(seeds: int, kinds: Sequence[str] = KINDS) -> Iterator[str]:
    """Differences between kernels and reference over kinds of cases."""
    for seed in range(seeds):
        vocabulary, *blocks = ((300, 64, 64, 64, 16), (1001, 128, 64, 32, 32), (4000, 512, 128, 256, 16))[seed % 3]
        for kind in kinds:
            case = make_case(8, vocabulary, kind, seed)
            for line in differences(interpreted(case, *blocks), reference(**case)):
                yield f"{kind}, seed {seed}, vocabulary {vocabulary}: {line}"


def readings(logits: str, heat: float) -> float:
    """How often draw.cu reads rows of R1's vocabulary, for whatever top_p and top_k."""
    from dsc.plugins.sample import kernel

    settings = [(top_p, top_k) for top_p in (0.95, 1.0) for top_k in (0, 50)]
    shares, numbers = (torch.tensor(values) for values in zip(*settings * 2, strict=True))
    case = make_case(len(shares), 129280, logits, 1) | {"top_p": shares, "top_k": numbers.int()}
    case |= {"temperature": torch.full_like(shares, heat), "min_p": torch.zeros_like(shares)}
    case["token_mask"] = torch.full_like(case["token_mask"], -1)
    got = interpreted(case, kernel.SPLIT, kernel.THREADS, kernel.ROOM, kernel.FEW)
    assert not differences(got, reference(**case))
    return float(got["readings"])


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    if sys.argv[1] == "readings":
        print(readings(sys.argv[2], float(sys.argv[3])))
        sys.exit()
    found = list(check(int(sys.argv[1]), sys.argv[2:] or KINDS))
    print("\n".join([*found, f"{len(found)} differences"]))
