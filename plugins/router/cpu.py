"""Router on CPUs in few calls.

Legend: T tokens, E experts, G groups, K experts per token.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from dsc.plugins.cpu_node import CpuNode, Run, StepMemo


def bind(node: CpuNode) -> Run:
    """As the reference; constants are tensors, since torch converts Python numbers anew in each call."""
    a = node.attributes
    w, bias = node.constants["w"].float(), node.constants.get("bias")
    top_k, groups, topk_groups = int(a["top_k"]), int(a["groups"]), int(a["topk_groups"])
    score = torch.sigmoid if a["scoring"] == "sigmoid" else _softmax
    limited = a["group_score"] != "none" and topk_groups < groups
    rate = _top2_sum if a["group_score"] == "top2_sum" else torch.amax
    smallest = torch.tensor(1e-20) if a["normalize"] else None
    scale = torch.tensor(float(a["scale"]))

    def run(step: StepMemo, x: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores_TE = score(linear(x.float(), w))
        choice_TE = scores_TE if bias is None else scores_TE + bias
        if limited:
            choice_TGE = choice_TE.view(len(x), groups, w.shape[0] // groups)
            best_TG = _best(rate(choice_TGE, -1), topk_groups)
            kept_TG = choice_TGE.new_full((len(x), groups), -torch.inf).scatter_(1, best_TG, 0.0)
            choice_TE = (choice_TGE + kept_TG.unsqueeze(-1)).view(len(x), w.shape[0])
        ids_TK = _best(choice_TE, top_k)
        weights_TK = scores_TE.gather(1, ids_TK)
        if smallest is not None:
            weights_TK.div_(weights_TK.sum(-1, True).add_(smallest))
        weights_TK.mul_(scale)
        ids_TK = ids_TK.int()
        padding_T1 = step.once("router padding", lambda: _padding(slots))
        if padding_T1 is not None:
            ids_TK.masked_fill_(padding_T1, -1)
            weights_TK.masked_fill_(padding_T1, 0.0)
        return ids_TK, weights_TK

    return run


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the largest values, best first, the lower one first among equals (topk promises no order there)."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


def _top2_sum(choice_TGE: torch.Tensor, dim: int) -> torch.Tensor:
    return choice_TGE.topk(2, dim).values.sum(dim)


def _padding(slots: torch.Tensor) -> torch.Tensor | None:
    """Rows to be masked [T, 1]; None if there are none."""
    padding = slots < 0
    return padding.unsqueeze(1) if bool(padding.any()) else None
