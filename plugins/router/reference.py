"""Router in plain torch.

T tokens, E experts, G groups, K experts per token.
"""

from __future__ import annotations

import torch


def reference(
    *,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    top_k: int,
    groups: int,
    topk_groups: int,
    scoring: str,
    group_score: str,
    normalize: int,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """(ids int32 [T, K], weights float32 [T, K]) as `op.py` defines them."""
    logits_TE = x.float() @ w.float().mT
    scores_TE = logits_TE.sigmoid() if scoring == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = scores_TE if bias is None else scores_TE + bias
    if group_score != "none":
        choice_TE = _keep_best_groups(choice_TE, groups, topk_groups, group_score)
    ids_TK = _best(choice_TE, top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    padding_T1 = (slots < 0).unsqueeze(1)
    if expert_map is not None:
        ids_TK = expert_map[0][ids_TK]
    ids_TK = ids_TK.masked_fill(padding_T1, -1).to(torch.int32)
    return ids_TK, (weights_TK * scale).masked_fill(padding_T1, 0.0)


def _keep_best_groups(choice_TE: torch.Tensor, groups: int, topk_groups: int, group_score: str) -> torch.Tensor:
    """Experts outside the best groups become -inf."""
    choice_TGE = choice_TE.view(len(choice_TE), groups, choice_TE.shape[1] // groups)
    score_TG = choice_TGE.topk(2, -1).values.sum(-1) if group_score == "top2_sum" else choice_TGE.amax(-1)
    dropped_TG = torch.ones_like(score_TG, dtype=torch.bool).scatter_(1, _best(score_TG, topk_groups), False)
    return choice_TGE.masked_fill(dropped_TG.unsqueeze(-1), -torch.inf).flatten(1)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the `count` largest values of each row, best first, the lower column first among equals."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]
