"""Sample on a GPU: the tokens the reference chooses, at a vocabulary of real size and at small ones, in every kind of row."""

import pytest
import torch
from support.sample_cases import KINDS, differences, make_case

from dsc.plugins.sample.reference import reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [515, 8192, 129280])
def test_tokens_are_the_references(vocabulary: int, kind: str) -> None:
    from support.gpu import GpuOp

    op = None
    for seed in range(2):
        case = make_case(16 if vocabulary > 10000 else 48, vocabulary, kind, seed)
        op = op or GpuOp("Sample", case, {})
        assert differences(op(**case), reference(**case)) == []


@pytest.mark.parametrize("rows", [1, 3, 129])
def test_any_number_of_rows(rows: int) -> None:
    from support.gpu import GpuOp

    case = {name: values[:rows].contiguous() for name, values in make_case(129, 2048, "normal", rows).items()}
    op = GpuOp("Sample", case, {}, bounds={"R": 160})
    assert differences(op(), reference(**case)) == []


def test_draws_follow_the_distribution() -> None:
    """Many positions of one row: the share of each token is its probability."""
    from support.gpu import GpuOp

    rows, vocabulary = 4096, 64
    case = {name: values[:1].repeat(rows, *[1] * (values.dim() - 1)) for name, values in
            make_case(8, vocabulary, "normal", 0).items()}  # fmt: skip
    case |= {
        "temperature": torch.full((rows,), 0.8), "top_p": torch.ones(rows), "top_k": torch.zeros(rows).int(),
        "min_p": torch.zeros(rows), "positions": torch.arange(rows).int(), "token_mask": torch.full((rows, 2), -1).int(),
        "drafts": torch.full((rows,), -1).int(),
    }  # fmt: skip
    tokens = GpuOp("Sample", case, {})()["tokens"].cpu().long()
    expected = torch.softmax(case["logits"][0].double() / 0.8, 0) * rows
    got = torch.bincount(tokens, minlength=vocabulary)
    assert float(((got - expected) ** 2 / expected.clamp_min(1)).sum()) < 64 + 6 * 128**0.5
