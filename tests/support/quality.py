"""How far an engine's predictions are from the reference's on the same tokens: nats per token, KL, top-1 agreement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsc.compiler.held_out import held_out_windows
from dsc.runtime.engine import Engine
from support.engines import TINY_R1, Sequences

Logits = Callable[[list[int]], torch.Tensor]  # tokens [T] -> logits [T, V]


@dataclass(frozen=True)
class Quality:
    """Over all tokens but the first of each window. `kl` is KL(reference || engine) in nats a token.

    disagreements  where top-1 differs: the reference's gap between its best logit and the engine's choice
    """

    nats: float
    kl: float
    top1: float
    disagreements: tuple[float, ...]
    tokens: int

    @property
    def worst_gap(self) -> float:
        return max(self.disagreements, default=0.0)


def nats_apart(tokens: int, *kls: float) -> float:
    """How far apart the nats a token of two models may be, three deviations: of models this near the reference, by these KLs,
    log-probabilities of a token differ from its by a variance of about twice their KL.
    """
    return 3 * math.sqrt(2 * sum(kls) / tokens)


def engine_logits(engine: Engine) -> Logits:
    """One window through the engine's prefill graph."""

    def run(tokens: list[int]) -> torch.Tensor:
        return Sequences(engine, [tokens]).step([len(tokens)], "prefill")[0].float()

    return run


def judge(engine: Logits, reference: Logits, windows: Sequence[list[int]]) -> Quality:
    """Feed both the same tokens and compare every next-token distribution."""
    nats = kl = agree = 0.0
    gaps: list[float] = []
    count = 0
    for window in windows:
        got_TV, want_TV = engine(window)[:-1].double(), reference(window)[:-1].double()
        targets = torch.tensor(window[1:])
        logp, logq = want_TV.log_softmax(-1), got_TV.log_softmax(-1)
        nats -= float(logq.gather(1, targets[:, None]).sum())
        kl += float((logp.exp() * (logp - logq)).sum())
        choice, best = got_TV.argmax(-1), want_TV.argmax(-1)
        agree += float((choice == best).sum())
        gap = want_TV.gather(1, best[:, None]) - want_TV.gather(1, choice[:, None])
        gaps += gap[choice != best].flatten().tolist()
        count += len(targets)
    return Quality(nats / count, kl / count, agree / count, tuple(gaps), count)


def held_out(count: int, length: int = 512) -> list[list[int]]:
    """Windows of the text that examples/tiny-r1 never saw."""
    return held_out_windows(TINY_R1 / "tokenizer.json", 0, 1, count, length)
