"""How far rows of an engine are from the reference's: errors by row, and what the two predict.

Legend: T rows, D width, V vocabulary. All sums in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsc.runtime.certificate import EndToEnd, RowErrors


def compare_rows(got_TD: torch.Tensor, want_TD: torch.Tensor) -> RowErrors:
    """Compare rows with the reference's; a row of zeros in the reference has no relative error."""
    got, want = got_TD.double(), want_TD.double()
    non_finite = int((~torch.isfinite(got)).sum())
    got = torch.nan_to_num(got, 0.0, 0.0, 0.0)
    tiny = torch.finfo(torch.float64).tiny
    errors_T, norms_T, lengths_T = ((got - want).square().sum(-1), want.square().sum(-1), got.square().sum(-1))
    products_T = (got * want).sum(-1)
    rows = norms_T > 0
    cosines = products_T / (norms_T * lengths_T).sqrt().clamp_min(tiny)
    return RowErrors(
        relative_error=float((errors_T.sum() / norms_T.sum().clamp_min(tiny)).sqrt()),
        worst_row_error=float((errors_T / norms_T.clamp_min(tiny))[rows].sqrt().max()) if bool(rows.any()) else 0.0,
        cosine=float(products_T.sum() / (norms_T.sum() * lengths_T.sum()).sqrt().clamp_min(tiny)),
        worst_row_cosine=float(cosines[rows].min()) if bool(rows.any()) else 1.0,
        non_finite=non_finite,
        largest=float(got.abs().max()),
    )


@dataclass
class Predictions:
    """Sums over tokens that have a successor: what an engine and the reference predict for it."""

    tokens: int = 0
    nats: float = 0.0
    reference_nats: float = 0.0
    kl: float = 0.0
    worst_kl: float = 0.0
    agreed: int = 0
    non_finite: int = 0

    def add(self, got_RV: torch.Tensor, want_RV: torch.Tensor, targets_R: torch.Tensor) -> None:
        """Logits of some rows, and the tokens that follow them. KL is KL(reference || engine)."""
        self.non_finite += int((~torch.isfinite(got_RV)).sum())
        logp, logq = (
            want_RV.double().log_softmax(-1),
            torch.nan_to_num(got_RV.double(), -1e4, 1e4, -1e4).log_softmax(-1),
        )
        kl_R = (logp.exp() * (logp - logq)).sum(-1)
        self.tokens += len(targets_R)
        self.nats -= float(logq.gather(1, targets_R[:, None]).sum())
        self.reference_nats -= float(logp.gather(1, targets_R[:, None]).sum())
        self.kl += float(kl_R.sum())
        self.worst_kl = max(self.worst_kl, float(kl_R.max()))
        self.agreed += int((got_RV.argmax(-1) == want_RV.argmax(-1)).sum())

    def result(self) -> EndToEnd:
        """What was summed up, a token."""
        count = max(self.tokens, 1)
        return EndToEnd(
            tokens=self.tokens,
            nats=self.nats / count,
            reference_nats=self.reference_nats / count,
            kl=self.kl / count,
            worst_kl=self.worst_kl,
            top1=self.agreed / count,
            non_finite=self.non_finite,
        )
