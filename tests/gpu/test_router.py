"""Router on a GPU against its reference: every kind, ties, padding rows, sizes at and around the variants' borders."""

import itertools

import pytest
import torch
from support.tolerances import check_rows

from dsc.plugins.router.reference import reference

pytestmark = pytest.mark.gpu

KINDS = {
    "v3": (256, 8, {"groups": 8, "topk_groups": 4, "scoring": "sigmoid", "group_score": "top2_sum", "normalize": 1}),
    "kimi": (384, 8, {"groups": 1, "topk_groups": 1, "scoring": "sigmoid", "group_score": "top2_sum", "normalize": 1}),
    "v2": (160, 6, {"groups": 8, "topk_groups": 3, "scoring": "softmax", "group_score": "max", "normalize": 0}),
    "lite": (64, 6, {"groups": 1, "topk_groups": 1, "scoring": "softmax", "group_score": "none", "normalize": 0}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(1, 7168), (3, 7168), (4, 2000), (5, 2048), (129, 7168), (300, 160)])
def test_router(kind: str, dtype: torch.dtype, tokens: int, width: int) -> None:
    from support.gpu import GpuOp

    experts, top_k, settings = KINDS[kind]
    # Two experts nearer than float32 tells them apart may change places: such a token is not compared.
    for seed in itertools.count(tokens):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, width, generator=generator).to(dtype)
        w = torch.randn(experts, width, generator=generator) * width**-0.5
        bias = torch.randn(experts, generator=generator) * 0.1
        exact = x.double() @ w.double().mT
        choice = exact.sigmoid() + bias if kind in ("v3", "kimi") else exact
        clear = choice.sort(-1).values.diff(dim=-1).amin(-1) > 2e-6
        if clear.float().mean() > 0.5:
            break
    slots = torch.arange(tokens, dtype=torch.int32)
    slots[1::7] = -1
    inputs = {"x": x, "w": w, "slots": slots} | ({"bias": bias} if kind in ("v3", "kimi") else {})
    attributes = {**settings, "top_k": top_k, "scale": 2.5}
    got = GpuOp("Router", inputs, attributes, bounds={"T": 512})()
    ids, weights = reference(**{"bias": None, **inputs}, **attributes)
    assert torch.equal(got["ids"].cpu()[clear], ids[clear])
    check_rows(got["weights"].cpu()[clear], weights[clear], "router", "float32")


def test_ties_take_the_lower_index() -> None:
    from support.gpu import GpuOp

    w = torch.randn(64, 256).repeat_interleave(4, 0)  # experts in fours alike
    settings = {"groups": 8, "topk_groups": 4, "scoring": "sigmoid", "group_score": "top2_sum", "normalize": 1}
    attributes = {**settings, "top_k": 8, "scale": 1.0}
    x = torch.randn(33, 256, dtype=torch.bfloat16)
    x[5] = 0  # all equal
    inputs = {"x": x, "w": w, "bias": torch.zeros(256), "slots": torch.arange(33, dtype=torch.int32)}
    ids = GpuOp("Router", inputs, attributes)()["ids"].cpu()
    assert torch.equal(ids, reference(**inputs, **attributes)[0])
    assert ids[5].tolist() == list(range(8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_a_map_says_where_the_chosen_experts_are(kind: str, tokens: int) -> None:
    """Places in any order, -1 for experts of other ranks and in padding rows; weights are those without a map, bit for bit."""
    from support.gpu import GpuOp

    experts, top_k, settings = KINDS[kind]
    generator = torch.Generator().manual_seed(tokens)
    places = torch.randperm(experts, generator=generator).int() - experts // 2
    expert_map = places.where(places >= 0, -1).view(1, experts)
    slots = torch.arange(tokens, dtype=torch.int32)
    slots[1::7] = -1
    inputs = {
        "x": torch.randn(tokens, 2048, generator=generator).bfloat16(),
        "w": torch.randn(experts, 2048, generator=generator) * 2048**-0.5,
        "slots": slots,
    }
    if kind in ("v3", "kimi"):
        inputs["bias"] = torch.randn(experts, generator=generator) * 0.1
    attributes = {**settings, "top_k": top_k, "scale": 2.5}
    plain = GpuOp("Router", inputs, attributes, bounds={"T": 512})()
    op = GpuOp("Router", {**inputs, "expert_map": expert_map}, attributes, bounds={"T": 512})
    mapped = op()
    ids = plain["ids"].cpu()
    assert torch.equal(mapped["ids"].cpu(), expert_map[0][ids.long().clamp(0)].where(ids >= 0, -1))
    assert torch.equal(mapped["weights"], plain["weights"])
    assert len(op.calls()) == 2
