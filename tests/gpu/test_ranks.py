"""Engines of two ranks on two GPUs: what one rank says, by symmetric memory and by NCCL, and what becomes of a rank that dies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from support.engines import compile_tiny
from support.quality import held_out, judge, nats_apart
from support.ranks import compile_ranks, environment, free_port, rank_processes, rest, start, wait_until_gone
from support.top_1 import check_top_1, logits_of

from dsc import runtime
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.cuda.backend import parts_of
from dsc.runtime.cuda.load import load_parts
from dsc.runtime.engine import Engine
from dsc.runtime.errors import DscError
from dsc.runtime.shards import take
from dsc.runtime.weights import part_name

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

PROMPTS = ("def ", "import ", "class Fraction", "The statistics module", "    return", "for i in range(", ".. function:: ",
           "try:\n    ", "while True:\n", "print(", "@property\n", "This module provides", "raise ValueError", "# ",
           "x = [", "from collections import")  # fmt: skip
GREEDY = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
KILL_SECONDS = 60.0  # by which everybody must know that a rank was killed

# One rank of a torchrun, whose sums go the way it is told.
RANK = """
    import json, sys
    from dsc import runtime
    from dsc.runtime.cuda import collectives
    folder, way, prompts, options = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:5])
    collectives.SYMMETRIC = way == "symmetric"
    with runtime.load(folder) as engine:
        way = engine.backend.describe()["all_reduce"]
        again = [[o.token_ids for o in engine.generate(prompts, drafts=n, **options)] for n in (0, 1)]
        print(json.dumps([way, *again]), flush=True)
        while "forever" in sys.argv:
            engine.generate(prompts, drafts=0, **options)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    """Tokens of the CPU's engine of one rank."""
    outputs = runtime.load(compile_tiny("tiny-r1-fp32", folder)).generate(PROMPTS, drafts=0, **GREEDY)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def engines(folder: Path) -> Callable[[str], Path]:
    """tiny-r1 on two ranks by a format's name."""
    return cache(lambda name: compile_ranks(name, 2, folder, "sm_90a"))


@pytest.fixture(scope="module")
def fp32(engines: Callable[[str], Path]) -> Path:
    return engines("fp32")


@pytest.fixture
def two(fp32: Path) -> Iterator[Engine]:
    with runtime.load(fp32) as engine:
        yield engine


def test_fp32_greedy_tokens(two: Engine, wanted: list[list[int]]) -> None:
    """Of prefill, of steps captured with their sums, and of steps that check drafts."""
    print(two.load_text(), two.backend.describe())
    for drafts in (0, 1, 0):
        assert [o.token_ids for o in two.generate(PROMPTS, drafts=drafts, **GREEDY)] == wanted
    assert [o.token_ids for o in two.generate(PROMPTS[:3], drafts=0, **GREEDY)] == wanted[:3]
    long = [[5 + i % 700 for i in range(1500)]]  # a prefill of several steps, whose sums are of another size
    assert len(two.generate(long, max_tokens=8, temperature=0.0, ignore_eos=True)[0].token_ids) == 8


@pytest.mark.parametrize("way", ["nccl", "symmetric"])
def test_both_ways_and_torchrun(way: str, fp32: Path, wanted: list[list[int]]) -> None:
    port = free_port()
    arguments = (fp32, way, json.dumps(PROMPTS), json.dumps(GREEDY))
    ranks = [start(RANK, *arguments, given=environment(rank, 2, port)) for rank in range(2)]
    outputs = [rank.communicate(timeout=KILL_SECONDS * 2)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    (line,) = (line for line in outputs[0].splitlines() if line.startswith('["'))
    told, *tokens = json.loads(line)
    assert told.startswith("symmetric memory" if way == "symmetric" else "NCCL")
    assert tokens == [wanted, wanted]


@pytest.mark.parametrize("name", ["bf16", "wint8", "wint4"])
def test_top_1_where_the_gap_is_wide(name: str, folder: Path, engines: Callable[[str], Path]) -> None:
    """Beside the CPU's engine of two ranks, which rounds partial sums as these do."""
    with runtime.load(compile_ranks(name, 2, folder)) as cpu, runtime.load(engines(name)) as two:
        check_top_1(name, cpu, two)


def in_chunks(engine: Engine) -> Callable[[list[int]], torch.Tensor]:
    """Logits of every token, as many a step as a GPU's engine gives."""
    return lambda tokens: logits_of(engine, [tokens], engine.manifest.limits.sequences, "prefill")[0]


def test_fp8_is_as_near_as_on_the_cpu(folder: Path, engines: Callable[[str], Path]) -> None:
    """Sums of two ranks differ by a last bit, which moves the FP8 codes of activations: on the CPU too, one and two ranks are
    as far from each other as from the unquantized model (KL 0.004). What holds is that distances do not add up to more."""
    windows, unquantized = held_out(2, 256), in_chunks(runtime.load(compile_tiny("tiny-r1-fp32", folder)))
    with runtime.load(compile_ranks("fp8", 2, folder)) as cpu, runtime.load(engines("fp8")) as two:
        ours, theirs = (judge(in_chunks(engine), unquantized, windows) for engine in (two, cpu))
        between = judge(in_chunks(two), in_chunks(cpu), windows)
    print(
        f"fp8 KL {ours.kl:.5f}, on the CPU {theirs.kl:.5f}, between them {between.kl:.5f}; nats {ours.nats:.4f}, {theirs.nats:.4f}"
    )
    assert ours.kl < 1.5 * theirs.kl
    assert between.kl < ours.kl + theirs.kl
    assert abs(ours.nats - theirs.nats) < nats_apart(between.tokens, ours.kl, theirs.kl)


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_are_what_take_gives(rank: int, engines: Callable[[str], Path]) -> None:
    """By the copies of a device, for both ranks' parts: rows, columns, experts, the vocabulary."""
    for path in (engines("fp32"), engines("wint8")):
        engine = EngineFolder.open(path)
        programs = [engine.program(graph, rank) for graph in engine.manifest.graphs]
        place = engine.manifest.parallel.place(rank)
        parts = parts_of(programs, engine.manifest, place)
        loaded = load_parts(path, parts, torch.device("cuda", rank))
        for operand in (o for program in programs for o in program.operands.values() if o.role == "weight"):
            want = take(engine.tensor(operand.tensor), operand.cuts, place).contiguous().view(-1)
            got = loaded.tensors[part_name(operand)].cpu()
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), operand


def generate_until(engine: Engine, until: float) -> None:
    while time.monotonic() < until:
        engine.generate(PROMPTS, drafts=0, max_tokens=1500, temperature=0.0, ignore_eos=True)


def test_a_killed_rank_is_an_error_and_no_hang(fp32: Path) -> None:
    """Rank 0 waits in a sum that rank 1 will not come to."""
    engine = runtime.load(fp32)
    engine.generate(PROMPTS, drafts=0, **GREEDY)
    (process,) = rank_processes()
    threading.Timer(0.5, process.kill).start()
    until = time.monotonic() + KILL_SECONDS
    with pytest.raises(DscError, match="rank 1 of the engine has ended"):
        generate_until(engine, until)
    assert time.monotonic() < until
    wait_until_gone([process])
    with pytest.raises(DscError):
        engine.generate(PROMPTS, drafts=0, **GREEDY)
    del engine
    torch.cuda.synchronize()  # the device is of use to the next engine


def test_a_killed_rank_by_nccl(fp32: Path) -> None:
    port = free_port()
    options = json.dumps({**GREEDY, "max_tokens": 1500})
    arguments = (fp32, "nccl", json.dumps(PROMPTS), options, "forever")
    ranks = [start(RANK, *arguments, given=environment(rank, 2, port)) for rank in range(2)]
    try:
        assert ranks[0].stdout is not None
        assert any(line.startswith('["NCCL') for line in ranks[0].stdout)  # it has loaded and generated
        time.sleep(0.5)
        ranks[1].kill()
        output = rest(ranks[0], KILL_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 1
    assert "rank 1 of the engine has ended" in output
