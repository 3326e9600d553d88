"""An engine's choices against those of the CPU engine of the same recipe."""

from __future__ import annotations

import torch

from dsc.runtime.engine import Engine
from support.engines import Sequences
from support.quality import held_out
from support.tolerances import ENGINE_LOGIT_GAPS


def logits_of(engine: Engine, texts: list[list[int]], chunk: int, phase: str) -> torch.Tensor:
    """Logits of every token, `chunk` tokens of each text a step."""
    steps = Sequences(engine, texts)
    rows = []
    while steps.done[0] < len(texts[0]):
        rows.append(torch.stack([r.float().cpu() for r in steps.step([chunk] * len(texts), phase)]))
    return torch.cat(rows, 1)


def check_top_1(name: str, cpu: Engine, gpu: Engine) -> None:
    """Fed the same tokens through prefill in chunks and through decode steps, the choices are the CPU engine's or near."""
    texts = [window[:128] for window in held_out(2)]
    wanted = logits_of(cpu, texts, 128, "prefill")
    first, second = wanted.topk(2).values.unbind(-1)
    wide = first - second > ENGINE_LOGIT_GAPS[name]
    assert wide.float().mean() > 0.25  # else the choices say little
    for chunk, phase in ((16, "prefill"), (1, "decode"), (2, "decode")):
        got = logits_of(gpu, texts, chunk, phase)
        assert torch.isfinite(got).all()
        gap = wanted.max(-1).values - wanted.gather(-1, got.argmax(-1, keepdim=True))[..., 0]
        agree = float((gap == 0).float().mean())
        print(f"{name} {phase} {chunk}: top-1 {agree:.2%}, worst gap {float(gap.max()):.3f}")
        assert not (gap[wide] > 0).any(), (name, phase, chunk)
        assert float(gap.max()) < ENGINE_LOGIT_GAPS[name], (name, phase, chunk)
