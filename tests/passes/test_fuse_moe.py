import pytest
from support.breaks import assert_every_break_is_told, graph_before, said
from support.families import make_checkpoint

from dsc.compiler.ir.graph import constant, operands
from dsc.compiler.pipeline import run_passes
from dsc.passes.fuse_moe import FuseMoe
from dsc.runtime.errors import DscError

MLP = "layers.1.mlp"
EXPERTS = {
    part: f"model.{MLP}.experts.{part}_proj.weight" for part in ("gate", "up", "down")
}  # fmt: skip
SHARED = {f"shared_{part}": f"model.{MLP}.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}
V3 = {
    "top_k": 4,
    "groups": 4,
    "topk_groups": 2,
    "scoring": "sigmoid",
    "group_score": "top2_sum",
    "normalize": 1,
    "scale": 2.5,
}
SOFTMAX = {"scoring": "softmax", "normalize": 0}


def v3_graph(folder):
    return graph_before("fuse_moe", make_checkpoint(folder, "v3"))


def node_of(graph, name):
    return next(node for node in graph.nodes if node.name == name)


def names(node):
    return {slot: tensor.name for slot, tensor in operands(node)}


@pytest.mark.parametrize(
    ("family", "overrides", "attributes", "bias", "shared"),
    [
        ("v3", {}, V3, True, True),
        ("v2", {}, V3 | SOFTMAX | {"top_k": 6, "groups": 8, "topk_groups": 3, "group_score": "max", "scale": 16.0}, False, True),
        ("v2-lite", {}, V3 | SOFTMAX | {"top_k": 3, "groups": 1, "topk_groups": 1, "group_score": "none", "scale": 1.0}, False, True),
        ("k2", {}, V3 | {"groups": 1, "topk_groups": 1, "group_score": "none", "scale": 2.827}, True, True),
        ("v3", {"n_shared_experts": 0}, V3, True, False),
    ],
)  # fmt: skip
def test_fires(family, overrides, attributes, bias, shared, tmp_path):
    graph = graph_before("fuse_moe", make_checkpoint(tmp_path, family, **overrides))
    x = node_of(graph, f"{MLP}.gate").inputs[0].name
    result = node_of(graph, f"{MLP}.sum" if shared else f"{MLP}.routed").outputs[0].name
    report = run_passes([graph], [FuseMoe()]).passes[0].runs[0].report
    assert [changed.node for changed in report.changed] == ["layers.1.mlp.moe", "layers.2.mlp.moe"]
    router, moe = node_of(graph, f"{MLP}.router"), node_of(graph, f"{MLP}.moe")
    assert router.attrs == attributes
    wanted = {"x": x, "w": f"model.{MLP}.gate.weight", "slots": "slots"}
    wanted |= {"bias": f"model.{MLP}.gate.e_score_correction_bias"} if bias else {}
    assert names(router) == wanted
    ids, weights = (tensor.name for tensor in router.outputs)
    assert names(moe) == {"x": x, "ids": ids, "weights": weights} | EXPERTS | (SHARED if shared else {})
    assert moe.outputs[0].name == result
    assert not [node.name for node in graph.nodes if MLP in node.name and node not in (router, moe)]


def test_a_dense_model_has_none(tmp_path):
    graph = graph_before("fuse_moe", make_checkpoint(tmp_path, "v3", first_k_dense_replace=3))
    report = FuseMoe().run(graph)
    assert (FuseMoe().expected(graph.info), report.changed, report.declined) == (0, [], [])


def weigh_by_the_biased_scores(graph):
    node_of(graph, f"{MLP}.gate.chosen").inputs[0] = node_of(graph, f"{MLP}.gate.choice").outputs[0]


def scale_otherwise(graph):
    node_of(graph, f"{MLP}.gate.weights").inputs[1] = constant("one", 1.0, "float32")


def choose_fewer(graph):
    node_of(graph, f"{MLP}.gate.ids").inputs[1] = constant("three", [3], "int64")


def choose_the_least(graph):
    node_of(graph, f"{MLP}.gate.ids").attrs["largest"] = 0


def mask_groups_with_zero(graph):
    node_of(graph, f"{MLP}.gate.limited_groups").inputs[2] = constant("zero", 0.0, "float32")


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            weigh_by_the_biased_scores,
            "layers.1.mlp.gate.chosen: operand 0 of GatherElements differs; wanted Sigmoid; got Add layers.1.mlp.gate.choice",
        ),
        (
            scale_otherwise,
            "layers.1.mlp.gate.weights: operand 1 of Mul differs; wanted the constant routed_scaling_factor; got constant one = 1.0",
        ),
        (
            choose_fewer,
            "layers.1.mlp.gate.ids: operand 1 of TopK differs; wanted the constant 4; got constant three = [3]",
        ),
        (
            choose_the_least,
            "layers.1.mlp.gate.ids: attribute largest of TopK is not part of the pattern; wanted 1; got 0",
        ),
        (
            mask_groups_with_zero,
            "layers.1.mlp.gate.limited_groups: operand 2 of Where differs; wanted the constant -inf; got constant zero = 0.0",
        ),
    ],
)
def test_declines(edit, text, tmp_path):
    graph = v3_graph(tmp_path)
    edit(graph)
    report = FuseMoe().run(graph)
    assert [changed.node for changed in report.changed] == ["layers.2.mlp.moe"]
    assert said(report) == text


@pytest.mark.parametrize(
    ("family", "model"), [("v3", "main"), ("v3", "mtp"), ("v2", "main"), ("v2-lite", "main"), ("k2", "main")]
)
def test_every_break_is_told(family, model, tmp_path):
    graph = graph_before("fuse_moe", make_checkpoint(tmp_path, family), model)
    assert_every_break_is_told(graph, FuseMoe(), f"layers.{graph.info.layers[-1]}.")


def test_fails(tmp_path):
    graph = v3_graph(tmp_path)
    weigh_by_the_biased_scores(graph)
    with pytest.raises(DscError) as error:
        run_passes([graph], [FuseMoe()])
    assert error.value.text() == (
        "main.prefill: fuse_moe found 1 of 2 sites\n"
        "  at      layers.1.mlp.gate.chosen: operand 0 of GatherElements differs\n"
        "  wanted  Sigmoid\n"
        "  got     Add layers.1.mlp.gate.choice\n"
        "  try     mend the graph; or, in the recipe, allow: {fuse_moe: {count: 1, reason: ...}}"
    )
