"""One output of an op's case against the reference's, by the tolerance of its kind."""

from __future__ import annotations

import torch

from dsc.plugins.latent_cache import cache_rows
from support.op_cases import Case
from support.tolerances import check_rows

ALWAYS_FLOAT32 = ("router", "logprob")


def compare(case: Case, name: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Outputs by their kind's tolerance; a cache row by row, in its own dtype, poison included."""
    kind = case.kinds[name]
    computed_in = str(dtype).removeprefix("torch.") if kind not in ALWAYS_FLOAT32 else "float32"
    if name == "cache_out":
        width = int(case.attributes["latent"]) + int(case.attributes["rope"])
        got, want = (cache_rows(cache, str(case.attributes["cache_dtype"]), width) for cache in (got, want))
    assert got.dtype == want.dtype, what
    if want.is_floating_point():
        check_rows(got, want, kind, computed_in, what)
    else:
        assert torch.equal(got, want), f"{what}: {int((got != want).sum())} of {want.numel()} differ"
