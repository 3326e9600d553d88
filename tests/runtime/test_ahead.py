"""Decode in bursts: the loop's half, with a stand-in for the device that runs a step further than anybody looks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import compile_tiny

from dsc import runtime
from dsc.plugins.advance.reference import reference as advance
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.engine import Engine, LoadOptions, make_engine
from dsc.runtime.ranks.loop import RankLoop

STEP = ("tokens", "positions", "slots", "sequence_lengths")


class StandIn:
    """Runs main.decode, sample and Advance's reference; hands tokens over a step late, as a GPU does."""

    def __init__(self, engine: Engine) -> None:
        self._main, self._sample = engine.programs["main.decode"], engine.programs["sample"]
        self._block_tokens = engine.manifest.kv_cache.block_tokens
        self.steps: list[int] = []

    def fits(self, sequences: int) -> bool:
        return True

    def burst(
        self,
        inputs: Mapping[str, torch.Tensor],
        rows: Mapping[str, torch.Tensor],
        steps: int,
        take: Callable[[list[int]], bool],
        busy: list[Any] | None = None,
    ) -> None:
        inputs, rows = ({k: v.clone() for k, v in given.items()} for given in (inputs, rows))
        late: list[list[int]] = []
        for _ in range(steps):
            logits = self._main.run(inputs)["logits"]
            chosen = self._sample.run({**rows, "logits": logits})["tokens"]
            late.append(chosen.tolist())
            state = {name: inputs[name] for name in STEP} | {"places": rows["positions"]}
            advance(chosen=chosen, **state, block_table=inputs["block_table"], block_tokens=self._block_tokens)
            self.steps.append(len(chosen))
            if len(late) == 2 and not take(late.pop(0)):
                return
        while late and take(late.pop(0)):
            pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny("tiny-r1-fp32", tmp_path_factory.mktemp("ahead"))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}])
def test_bursts_change_nothing(folder: Path, options: dict[str, float]) -> None:
    engine = runtime.load(folder)
    prompts = [[5, 6, 7] * n for n in (1, 30, 21, 9, 40)]
    cases = [
        {"max_tokens": 70, "ignore_eos": True},
        {"max_tokens": 40},
        {"max_tokens": 40, "stop": ["e", "("], "min_tokens": 3},
        {"max_tokens": 9, "logprobs": 1},
        {"max_tokens": 9, "repetition_penalty": 1.2},
    ]
    wanted = [engine.generate(prompts, drafts=0, **case, **options) for case in cases]
    engine._loop._ahead = stand_in = StandIn(engine)
    for case, outputs in zip(cases, wanted, strict=True):
        got = engine.generate(prompts, drafts=0, **case, **options)
        assert [(o.token_ids, o.text, o.finish_reason) for o in got] == [
            (o.token_ids, o.text, o.finish_reason) for o in outputs
        ]
    assert len(stand_in.steps) > 90  # bursts did the work
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def test_a_stream_beside_a_batch_and_a_full_cache(folder: Path) -> None:
    engine = runtime.load(folder, cache_tokens=64 * 6)
    prompts = [[5 + i] * 50 for i in range(5)]
    options = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, "drafts": 0}
    wanted = [o.text for o in engine.generate(prompts, **options)]
    engine._loop._ahead = StandIn(engine)
    stream = engine.stream(prompts[0], **options)
    assert [o.text for o in engine.generate(prompts[1:], **options)] == wanted[1:]
    assert "".join(stream) == wanted[0]


def test_bursts_of_several_ranks_end_by_what_all_ranks_know(folder: Path) -> None:
    """Requests that come meanwhile are known to one rank only."""
    engine = make_engine(EngineFolder.open(folder), LoadOptions(), make_loop=RankLoop)
    options = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "drafts": 0}
    wanted = [o.token_ids for o in engine.generate([[5, 6], [7, 8]], **options)]
    engine._loop._ahead = stand_in = StandIn(engine)
    assert isinstance(engine.loop, RankLoop)
    seen, lengths, burst = engine.loop.seen, [], stand_in.burst

    def arrive(inputs: Any, rows: Any, steps: int, take: Callable[[list[int]], bool]) -> None:
        lengths.append(steps)
        if len(lengths) == 1:
            late.append(engine.stream([9] * 3, **options))
        burst(inputs, rows, steps, take)

    late: list[Any] = []
    stand_in.burst = arrive
    assert [o.token_ids for o in engine.generate([[5, 6], [7, 8]], **options)] == wanted
    assert lengths[:5] == [
        8,
        8,
        8,
        8,
        6,
    ]  # and a step of the two prompts, and one of the prompt that came in the first burst
    assert "".join(late[0]) == engine.generate([[9] * 3], **options)[0].text
    assert engine.loop.seen != seen
