"""A rank is killed at random moments of loading and of the first step: rank 0 says so, soon, and loads again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.ranks import compile_ranks, rest, start

KILLS = 40
SECONDS = 30.0  # within which rank 0 must have said it, and be able to go on

# Arguments: the engine, the number of kills, seconds of a hang. Prints what became of each.
KILL = """
    import faulthandler, json, random, sys, threading, time
    import psutil
    from dsc import runtime
    from dsc.runtime.errors import DscError
    folder, kills, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

    def kill(delay, hit):
        time.sleep(delay)
        for child in psutil.Process().children():
            if child.status() != psutil.STATUS_ZOMBIE and "dsc.runtime.ranks.follow" in child.cmdline():
                child.kill()
                hit.append(time.monotonic())

    begin = time.monotonic()
    with runtime.load(folder) as engine:
        span = 1.1 * (time.monotonic() - begin)  # the first step too
        engine.generate(["def "], max_tokens=4)
    random.seed(3)
    for _ in range(kills):
        hit, told, delay = [], "nothing", random.uniform(0.05, span)
        killing = threading.Thread(target=kill, args=(delay, hit))
        faulthandler.dump_traceback_later(limit + span, exit=True)
        killing.start()
        try:
            with runtime.load(folder) as engine:
                killing.join()
                engine.generate(["def "], max_tokens=4)
        except DscError as error:
            told = error.what
        took = time.monotonic() - hit[0] if hit else 0.0
        killing.join()
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps([told, bool(hit), round(took, 2)]), flush=True)
    with runtime.load(folder) as engine:
        print(json.dumps(len(engine.generate(["def "], max_tokens=4, ignore_eos=True)[0].token_ids)), flush=True)
"""


@pytest.mark.parametrize(
    "target",
    [
        "cpu",
        pytest.param("sm_90a", marks=[
            pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ]),
    ],
)  # fmt: skip
def test_a_rank_killed_at_any_moment(target: str, tmp_path: Path) -> None:
    leader = start(KILL, compile_ranks("fp32", 2, tmp_path, target), KILLS, SECONDS)
    text = rest(leader, KILLS * (SECONDS + 10))
    assert leader.returncode == 0, text[-3000:]
    *found, tokens = [json.loads(line) for line in text.splitlines() if line[:1] in "[4"]
    assert tokens == 4
    assert len(found) == KILLS
    hit = [(told, took) for told, was_hit, took in found if was_hit]
    print(f"{len(hit)} kills, told within {max(took for _, took in hit):.2f} s: {sorted({told for told, _ in hit})}")
    assert len(hit) > KILLS // 2
    assert {told for told, _ in hit} == {"rank 1 of the engine has ended"}, text
