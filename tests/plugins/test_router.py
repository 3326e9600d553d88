"""Router: transformers' own routers agree, ties go to the lower index, padding chooses nobody."""

import pytest
import torch
from support.cpu_op import IMPLEMENTATIONS, CpuOp
from support.tolerances import check_rows
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

T, D = 129, 64
V3 = {"scoring": "sigmoid", "group_score": "top2_sum", "normalize": 1, "scale": 2.5}
V2 = {"scoring": "softmax", "normalize": 0, "scale": 16.0}
KINDS = {  # experts, attributes; sizes as the models divide them
    "V3": (32, V3 | {"top_k": 8, "groups": 8, "topk_groups": 4}),
    "K2": (24, V3 | {"top_k": 8, "groups": 1, "topk_groups": 1, "scale": 2.827}),
    "V2": (40, V2 | {"top_k": 6, "groups": 8, "topk_groups": 3, "group_score": "max"}),
    "V2-Lite": (16, V2 | {"top_k": 6, "groups": 1, "topk_groups": 1, "group_score": "none", "scale": 1.0}),
}


def transformers_router(kind, w, bias):
    experts, attributes = KINDS[kind]
    sizes = {
        "hidden_size": D,
        "n_routed_experts": experts,
        "num_experts_per_tok": attributes["top_k"],
        "n_group": attributes["groups"],
        "topk_group": attributes["topk_groups"],
        "routed_scaling_factor": attributes["scale"],
        "norm_topk_prob": bool(attributes["normalize"]),
    }
    if attributes["scoring"] == "sigmoid":
        router = DeepseekV3TopkRouter(DeepseekV3Config(**sizes))
        router.e_score_correction_bias.copy_(bias)
    else:
        method = "greedy" if attributes["group_score"] == "none" else "group_limited_greedy"
        router = DeepseekV2TopkRouter(DeepseekV2Config(**sizes, topk_method=method))
    router.weight.data.copy_(w)
    return router


def route(implementation, kind, x, w, bias=None, slots=None, expert_map=None):
    operands = {"x": x, "w": w, "slots": torch.zeros(len(x), dtype=torch.int32) if slots is None else slots}
    constants = ["w"]
    if bias is not None:
        operands["bias"] = bias
        constants.append("bias")
    if expert_map is not None:
        operands["expert_map"] = expert_map
        constants.append("expert_map")
    return CpuOp(implementation, "Router", operands, KINDS[kind][1], constants)()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(implementation, kind):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, D, generator=generator)
    w = torch.randn(KINDS[kind][0], D, generator=generator) / D**0.5
    bias = torch.randn(len(w), generator=generator) * 0.2 if kind in ("V3", "K2") else None
    got = route(implementation, kind, x, w, bias)
    with torch.no_grad():
        _, weights, ids = transformers_router(kind, w, bias)(x)
    ids, order = ids.sort(-1)  # transformers leaves them in any order
    own_ids, own_order = got["ids"].long().sort(-1)
    assert torch.equal(own_ids, ids)
    check_rows(got["weights"].gather(1, own_order), weights.gather(1, order), "router", "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_bias_chooses_and_does_not_weigh(implementation):
    x, w = torch.zeros(1, D), torch.zeros(32, D)
    bias = torch.zeros(32)
    bias[[3, 9, 10]] = torch.tensor([0.1, 0.3, 0.2])
    got = route(implementation, "V3", x, w, bias)
    assert got["ids"].tolist() == [[9, 10, 3, 0, 1, 2, 4, 5]]  # of groups 0..3: 2 and 0 by bias, then the first
    assert torch.equal(got["weights"], torch.full((1, 8), 2.5 / 8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_go_to_the_lower_index(implementation, kind):
    experts, attributes = KINDS[kind]
    got = route(implementation, kind, torch.zeros(3, D), torch.zeros(experts, D))
    assert got["ids"].tolist() == [list(range(attributes["top_k"]))] * 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_best_of_every_kept_group_come_in_order(implementation):
    """Scores that differ by less than bfloat16 sees still order the experts: nothing is rounded on the way."""
    w = torch.zeros(24, D)
    w[:, 0] = 1 + torch.arange(24).flip(0) * 2.0**-14
    got = route(implementation, "K2", torch.ones(1, D, dtype=torch.bfloat16), w)
    assert got["ids"].tolist() == [list(range(8))]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_chooses_nobody(implementation):
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(6, D, generator=generator), torch.randn(32, D, generator=generator)
    slots = torch.tensor([5, -1, 7, -1, -1, 0], dtype=torch.int32)
    x[slots < 0] = torch.nan  # whatever a bucket's padding holds
    got, alone = route(implementation, "V3", x, w, slots=slots), route(implementation, "V3", x[slots >= 0], w)
    assert bool((got["ids"][slots < 0] == -1).all())
    assert torch.equal(got["weights"][slots < 0], torch.zeros(3, 8))
    assert torch.equal(got["ids"][slots >= 0], alone["ids"])
    assert bool((alone["ids"] >= 0).all())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_map_says_where_the_chosen_experts_are(implementation, kind):
    """Places in any order, none for experts of other ranks; weights are of all chosen ones, and padding still chooses nobody."""
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(T, D, generator=generator), torch.randn(KINDS[kind][0], D, generator=generator)
    slots = torch.arange(T, dtype=torch.int32).masked_fill(torch.arange(T) % 9 == 2, -1)
    places = torch.randperm(len(w), generator=generator).int() - len(w) // 2
    expert_map = places.where(places >= 0, -1).view(1, -1)
    plain = route(implementation, kind, x, w, slots=slots)
    mapped = route(implementation, kind, x, w, slots=slots, expert_map=expert_map)
    want = expert_map[0][plain["ids"].long().clamp(0)].where(plain["ids"] >= 0, -1)
    assert torch.equal(mapped["ids"], want)
    assert torch.equal(mapped["weights"], plain["weights"])
    assert 0.2 < float((mapped["ids"] < 0).float().mean()) < 0.8
