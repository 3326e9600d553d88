"""Router on CPUs.

Legend: T tokens, E experts, G groups, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear

from dsc.plugins.cpu_node import CpuNode, Run, StepMemo


def bind(node: CpuNode) -> Run:
    """Scores by torch, choices by numpy, whose calls on a few rows cost a fraction of torch's."""
    a = node.attributes
    w = node.constants["w"].float()
    scores: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"sigmoid": torch.sigmoid, "softmax": _softmax}
    score = scores[str(a["scoring"])]
    choose = Choose(
        bias=node.constants["bias"].float().numpy() if "bias" in node.constants else None,
        top_k=int(a["top_k"]),
        groups=int(a["groups"]),
        topk_groups=int(a["topk_groups"]),
        group_score=str(a["group_score"]),
    )
    places_E = node.constants["expert_map"][0].numpy() if "expert_map" in node.constants else None
    normalize, scale, smallest = bool(a["normalize"]), np.float32(a["scale"]), np.float32(1e-20)

    def run(step: StepMemo, x: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores_TE = score(linear(x.float(), w)).numpy()
        ids_TK = choose(scores_TE)
        firsts_T1 = step.once(("router", w.shape), lambda: np.arange(0, scores_TE.size, len(w))[:, None])
        weights_TK = scores_TE.ravel().take(ids_TK + firsts_T1)
        if normalize:
            weights_TK /= weights_TK.sum(-1, keepdims=True) + smallest
        weights_TK *= scale
        ids_TK = ids_TK.astype(np.int32) if places_E is None else places_E.take(ids_TK)
        padding_T = step.once("router padding", lambda: _padding(slots))
        if padding_T is not None:
            ids_TK[padding_T], weights_TK[padding_T] = -1, 0.0
        return torch.from_numpy(ids_TK), torch.from_numpy(weights_TK)

    return run


@dataclass(frozen=True)
class Choose:
    """The experts of each row of scores [T, E]: int64 [T, K], best first."""

    bias: NDArray[np.float32] | None
    top_k: int
    groups: int
    topk_groups: int
    group_score: str

    def __call__(self, scores_TE: NDArray[np.float32]) -> NDArray[np.int64]:
        choice_TE = scores_TE if self.bias is None else scores_TE + self.bias
        if self.group_score != "none" and self.topk_groups < self.groups:
            choice_TGE = choice_TE.reshape(len(choice_TE), self.groups, choice_TE.shape[1] // self.groups)
            dropped_TG = _best_first(self._rate(choice_TGE))[:, self.topk_groups :]
            kept_TG1 = np.zeros((len(choice_TE), self.groups, 1), np.float32)
            kept_TG1[np.arange(len(choice_TE))[:, None], dropped_TG] = -np.inf
            choice_TE = (choice_TGE + kept_TG1).reshape(scores_TE.shape)
        return _best_first(choice_TE)[:, : self.top_k]

    def _rate(self, choice_TGE: NDArray[np.float32]) -> NDArray[np.float32]:
        """[T, G]"""
        if self.group_score == "max":
            highest: NDArray[np.float32] = choice_TGE.max(-1)
            return highest
        best = np.partition(choice_TGE, -2, -1)
        two_best: NDArray[np.float32] = best[..., -1] + best[..., -2]
        return two_best


def _best_first(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Columns of the largest values, best first, the lower one first among equals."""
    return np.argsort(np.negative(values), -1, "stable")


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


def _padding(slots: torch.Tensor) -> NDArray[np.bool_] | None:
    """Rows to be masked [T]; None if there are none."""
    padding = slots.numpy() < 0
    return padding if padding.any() else None
