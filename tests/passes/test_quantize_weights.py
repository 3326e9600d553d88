from dataclasses import replace

import pytest
from support.breaks import graph_before
from support.families import ABSENT, make_checkpoint
from support.graphs import assert_same, run_pass

from dsc.compiler.ir.graph import expression_of, operand, schema_of, variable, weight_class_of
from dsc.compiler.ir.verify import verify
from dsc.compiler.ir.weight import Concat, Quantize, Stack
from dsc.compiler.recipe import make_pass, parse_recipe
from dsc.passes.quantize_weights import QuantizeWeights
from dsc.passes.set_dtype import SetDtype
from dsc.plugins.schema import Type
from dsc.runtime.errors import DscError

WINT4 = {"format": "wint4", "groups": [128, 64, 32]}
FP8 = {"format": "fp8", "block": [128, 128]}

BEFORE = """
    # layers:
    main (bfloat16[T,192] x, int32[R] rows) => (bfloat16[T,96] y, float[R,40] logits)
    <float[192,192] "model.layers.0.mlp.gate_proj.weight", float[96,192] "model.layers.0.self_attn.o_proj.weight",
     float[40,96] "lm_head.weight", bfloat16[T,192] h>
    {
      [gate] h = dsc.Linear<w_format="fp32">(x, "model.layers.0.mlp.gate_proj.weight", "")
      [o_proj] y = dsc.Linear<w_format="fp32">(h, "model.layers.0.self_attn.o_proj.weight", "")
      [lm_head] logits = dsc.LmHead<w_format="fp32">(y, rows, "lm_head.weight", "")
    }
"""
AFTER = """
    # layers:
    main (bfloat16[T,192] x, int32[R] rows) => (bfloat16[T,96] y, float[R,40] logits)
    <uint8[192,96] "model.layers.0.mlp.gate_proj.packed", bfloat16[192,3] "model.layers.0.mlp.gate_proj.scales",
     float8e4m3fn[96,192] "model.layers.0.self_attn.o_proj.weight", float[1,2] "model.layers.0.self_attn.o_proj.scales",
     bfloat16[40,96] "lm_head.weight", bfloat16[T,192] h>
    {
      [gate] h = dsc.Linear<w_format="wint4:64">(x, "model.layers.0.mlp.gate_proj.packed", "model.layers.0.mlp.gate_proj.scales")
      [o_proj] y = dsc.Linear<w_format="fp8">(h, "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.scales")
      [lm_head] logits = dsc.LmHead<w_format="bf16">(y, rows, "lm_head.weight", "")
    }
"""
OPTIONS = "quantize_weights: {default: {format: wint4, groups: [128, 64, 32]}, attention: {format: fp8}}"


@pytest.fixture(autouse=True)
def three_operands(monkeypatch, request):
    """The texts here are a piece of a model, with three weight operands."""
    if "folders" not in request.fixturenames:
        monkeypatch.setattr(QuantizeWeights, "expected", lambda self, info: 3)


def test_fires():
    graph, run = run_pass(BEFORE, OPTIONS)
    assert_same(graph, AFTER)
    assert (run.found, run.report.declined) == (3, [])
    assert [(site.node, site.note) for site in run.report.changed] == [
        ("gate", "w wint4:64, dense_mlp: 192 is not a multiple of 128"),
        ("o_proj", "w fp8, attention"),
        ("lm_head", "w bf16, lm_head"),
    ]


def test_a_width_that_no_group_divides_stays_unquantized_and_says_so():
    text = BEFORE.replace("192", "96")
    for options, format_, why in (
        ("{format: wint4, group: 128}", "bf16", ": 96 is not a multiple of 128"),
        ("{format: wint4, groups: [128, 64]}", "bf16", ": 96 is not a multiple of 128 or 64"),
        ("{format: wint4, groups: [128, 64, 32]}", "wint4:32", ": 96 is not a multiple of 128 or 64"),
        ("{format: wint8}", "wint8", ""),
    ):
        graph, run = run_pass(text, f"quantize_weights: {{default: {options}, skip: [attention]}}")
        assert [site.note for site in run.report.changed] == [
            f"w {format_}, dense_mlp{why}",
            "w bf16, attention",
            "w bf16, lm_head",
        ]
        assert graph.find("dsc.Linear")[0].attrs["w_format"] == format_


def test_unquantized_is_the_dtype_of_the_activations():
    text = BEFORE.replace("bfloat16", "float")
    graph, run = run_pass(text, "quantize_weights: {default: {format: wint8}, skip: [attention]}")
    assert [site.note for site in run.report.changed] == ["w wint8, dense_mlp", "w fp32, attention", "w fp32, lm_head"]
    assert type(expression_of(operand(graph.find("dsc.LmHead")[0], "w"))) is Quantize


def test_declines():
    stored = BEFORE.replace('<w_format="fp32">(x', '<w_format="bf16">(x').replace(
        '<float[192,192] "model', '<bfloat16[192,192] "model'
    )
    _, run = run_pass(stored, OPTIONS, allow=1)
    (site,) = run.report.declined
    assert (site.node, site.reason) == ("gate", "w is stored in a format already")
    assert (site.wanted, site.got) == ("fp32", "bf16")
    unnamed = BEFORE.replace("model.layers.0.mlp.gate_proj.weight", "strange")
    _, run = run_pass(unnamed, OPTIONS, allow=1)
    (site,) = run.report.declined
    assert (site.node, site.reason, site.got) == ("gate", "w has no class that recipes name", "exact")


def test_fails():
    text = BEFORE.replace("model.layers.0.mlp.gate_proj.weight", "strange")
    with pytest.raises(DscError) as error:
        run_pass(text, OPTIONS)
    assert error.value.text() == (
        "main: quantize_weights found 2 of 3 sites\n"
        "  at      gate: w has no class that recipes name\n"
        "  wanted  experts, attention, kv_b, dense_mlp, shared_experts, embeddings, lm_head, eh_proj\n"
        "  got     exact\n"
        "  try     mend the graph; or, in the recipe, allow: {quantize_weights: {count: 1, reason: ...}}"
    )


def test_an_operand_that_is_computed_is_declined(folders):
    graph = graph_before("quantize_weights", folders["r1"])
    node = graph.find("dsc.Linear")[0]
    slot = schema_of(node).slot("w")
    node.inputs[slot] = variable("made", Type("float32", tuple(node.inputs[slot].shape)))
    pass_ = QuantizeWeights(default=WINT4)
    report = pass_.run(graph)
    assert len(report.changed) == pass_.expected(graph.info) - 1
    (site,) = report.declined
    assert (site.node, site.reason, site.got) == (node.name, "w is no weight", "Variable made")


# -- options


def said(**options):
    with pytest.raises(DscError) as error:
        QuantizeWeights(**options)
    return error.value.text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"default": {"format": "wint4", "group": 100}},
            "default cannot use group [100]\n"
            "  wanted  group: one of 128, 64, 32; or groups: a list of them, largest first\n"
            "  got     [100]\n"
            "  try     group: 128",
        ),
        (
            {"experts": {"format": "wint4"}},
            "experts needs one group or a list\n"
            "  wanted  group: one of 128, 64, 32; or groups: a list of them, largest first\n"
            "  got     neither group nor groups\n"
            "  try     group: 128",
        ),
        (
            {"experts": {"format": "wint4", "groups": [32, 64]}},
            "experts lists its groups in no order\n"
            "  wanted  group: one of 128, 64, 32; or groups: a list of them, largest first\n"
            "  got     [32, 64]",
        ),
        (
            {"kv_b": {"format": "wnt8"}},
            "kv_b has no format wnt8\n  wanted  fp32, bf16, fp8, wint8, wint4\n  got     wnt8\n  try     wint8",
        ),
        (
            {"kv_b": {"format": "wint4:128"}},
            "kv_b has no format wint4:128\n"
            "  wanted  fp32, bf16, fp8, wint8, wint4\n"
            "  got     wint4:128\n"
            "  try     {format: wint4, group: 128}",
        ),
        (
            {"attention": {"format": "fp8", "block": [64, 64]}},
            "attention cannot use this block\n  wanted  block: [128, 128]\n  got     [64, 64]",
        ),
        (
            {"attention": {"format": "fp8", "blok": [128, 128]}},
            "attention: format fp8 has no option blok\n  wanted  block\n  got     blok: [128, 128]\n  try     block",
        ),
        (
            {"lm_head": {"format": "wint8", "group": 128}},
            "lm_head: format wint8 has no option group\n  wanted  no options\n  got     group: 128",
        ),
        (
            {"default": "wint8"},
            "default names no format\n  wanted  {format: fp32 | bf16 | fp8 | wint8 | wint4, ...}\n  got     wint8",
        ),
        (
            {"skip": ["lmhead"]},
            "skip names no class\n"
            "  wanted  experts, attention, kv_b, dense_mlp, shared_experts, embeddings, lm_head, eh_proj\n"
            "  got     lmhead\n"
            "  try     lm_head",
        ),
        ({"skip": "lm_head"}, "skip is not a list\n  wanted  skip: [lm_head, ...]\n  got     lm_head"),
        (
            {"skip": ["kv_b"], "kv_b": {"format": "bf16"}},
            "kv_b has a format and is skipped\n"
            "  wanted  one of both\n"
            "  got     kv_b: {'format': 'bf16'} and skip: ['kv_b']",
        ),
        (
            {"mtp": {"lm_head": {"format": "wint8"}}},
            "mtp.weights cannot choose lm_head: the MTP layer shares the main model's\n"
            "  wanted  experts, attention, kv_b, dense_mlp, shared_experts, eh_proj, default\n"
            "  got     lm_head: {'format': 'wint8'}",
        ),
        (
            {"mtp": {"expert": {"format": "wint8"}}},
            "mtp.weights has no class expert\n"
            "  wanted  experts, attention, kv_b, dense_mlp, shared_experts, eh_proj, default\n"
            "  try     experts",
        ),
    ],
)
def test_faults_of_options(options, text):
    assert said(**options) == text


def test_all_faults_at_once():
    text = said(experts={"format": "wint5"}, default={"format": "fp8", "block": 128}, skip=["head"])
    assert text.splitlines()[0] == "quantize_weights: 3 faults"
    for fault in ("skip names no class", "experts has no format wint5", "default cannot use this block"):
        assert fault in text
    with pytest.raises(DscError, match="quantize_weights has no option expert") as error:
        make_pass("quantize_weights", {"expert": WINT4})
    assert error.value.try_ == "experts"


RECIPE = """
model: examples/tiny-r1
target: cpu
parallel: {tensor: 1, expert: 1, pipeline: 1}
limits: {batch_tokens: 512, sequences: 16, context_tokens: 2048}
decode_buckets: [1, 2]
kv_cache: {dtype: bf16, block_tokens: 64}
mtp: {enabled: true, drafts: 1, weights: {experts: {format: fp8}}}
passes:
  - quantize_weights: {default: {format: wint8}}
"""


def test_a_recipe_gives_the_mtp_layer_its_formats():
    pass_ = parse_recipe(RECIPE, "mine.yaml", "mine").passes[0].instance
    assert pass_ == QuantizeWeights(default={"format": "wint8"}, mtp={"experts": {"format": "fp8"}})
    with pytest.raises(DscError) as error:
        parse_recipe(
            RECIPE.replace("{experts: {format: fp8}}", "{expert: {format: fp8}, default: {format: x}}"),
            "mine.yaml",
            "m",
        )
    assert "mine.yaml:8: mtp.weights has no class expert" in error.value.text()
    assert "mine.yaml:8: mtp.weights: default has no format x" in error.value.text()
    with pytest.raises(DscError, match="no pass stores weights"):
        parse_recipe(RECIPE.replace("- quantize_weights: {default: {format: wint8}}", "- fuse_moe"), "mine.yaml", "m")


def test_classes_without_an_entry():
    pass_ = QuantizeWeights(default=WINT4, attention=FP8, skip=["dense_mlp"])
    kinds = {name: (c := pass_.choice(name)) and c.kind for name in ("experts", "attention", "kv_b", "dense_mlp")}
    assert kinds == {"experts": "wint4", "attention": "fp8", "kv_b": "fp8", "dense_mlp": None}
    assert pass_.choice("embeddings") is None
    assert pass_.choice("lm_head") is None
    assert pass_.choice("eh_proj") is None
    assert QuantizeWeights(lm_head={"format": "wint8"}).choice("lm_head").kind == "wint8"
    assert QuantizeWeights(kv_b=FP8).choice("experts") is None
    assert QuantizeWeights(default=WINT4, skip=["attention"]).choice("kv_b") is None


def test_entries_of_the_mtp_layer():
    pass_ = QuantizeWeights(default=WINT4, kv_b={"format": "bf16"}, skip=["shared_experts"], mtp={"attention": FP8})
    kinds = {name: (c := pass_.choice(name, "mtp")) and c.kind for name in ("experts", "attention", "kv_b")}
    assert kinds == {"experts": "wint4", "attention": "fp8", "kv_b": "fp8"}
    assert pass_.choice("shared_experts", "mtp") is None
    every = replace(pass_, mtp={"default": {"format": "wint8"}})
    assert {every.choice(name, "mtp").kind for name in ("experts", "attention", "kv_b", "shared_experts")} == {"wint8"}
    assert every.choice("kv_b").kind == "bf16"
    assert every.choice("lm_head", "mtp") is None
    assert every.choice("eh_proj", "mtp") is None
    assert replace(pass_, mtp={"eh_proj": FP8}).choice("eh_proj", "mtp").kind == "fp8"


# -- whole graphs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    changes = {"tied": ("v3", {"tie_word_embeddings": True, "num_nextn_predict_layers": 0}),
               "bf16": ("r1", {"quantization_config": ABSENT})}  # fmt: skip
    made = {}
    for name in ("r1", "v2-lite", "v2", "v3.1", "k2", "faults", "tied", "bf16"):
        family, overrides = changes.get(name, (name, {}))
        layers = overrides.get("num_hidden_layers", 2)
        made[name] = make_checkpoint(
            tmp_path_factory.mktemp(name), family, **{**overrides, "num_hidden_layers": layers}
        )
    return made


OF_LAYERS = 3 + 6  # a dense and a MoE layer


@pytest.mark.parametrize(
    ("family", "model", "sites"),
    [
        ("r1", "main", 2 + 2 * 4 + OF_LAYERS),  # qkv, q_b, kv_b, o
        ("r1", "mtp", 3 + 4 + 6),
        ("v2-lite", "main", 2 + 2 * 3 + OF_LAYERS),  # qkv, kv_b, o
        ("v2", "main", 2 + 2 * 4 + OF_LAYERS),
        ("v3.1", "main", 2 + 2 * 4 + OF_LAYERS),
        ("k2", "main", 2 + 2 * 4 + OF_LAYERS),
        ("faults", "main", 2 + 2 * 5 + OF_LAYERS),  # 96 rows of q_a do not fill fp8 blocks: q_a and kv_a apart
        ("faults", "mtp", 3 + 5 + 6),
        ("tied", "main", 2 + 2 * 4 + OF_LAYERS),
        ("bf16", "main", 2 + 2 * 4 + OF_LAYERS),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_weight_operand_is_a_site(folders, family, model, phase, sites):
    graph = graph_before("quantize_weights", folders[family], model, phase)
    SetDtype("bf16").run(graph)
    pass_ = QuantizeWeights(default=WINT4)
    report = pass_.run(graph)
    verify(graph)
    assert (len(report.changed), pass_.expected(graph.info), report.declined) == (sites, sites, [])
    for node in graph.nodes:
        for slot in schema_of(node).weights:
            tensor = operand(node, slot.name)
            if tensor is None:
                continue
            plain = weight_class_of(tensor) in ("embeddings", "lm_head", "eh_proj")
            assert node.attrs[slot.format_attribute].startswith("bf16" if plain else "wint4:")
            assert (operand(node, f"{slot.name}.scales") is None) == plain
            assert tensor.name.endswith(".weight" if plain else ".packed")
    assert all(len(node.inputs) == schema_of(node).slot("shared_down.scales") + 1 for node in graph.find("dsc.Moe"))


def test_moe_of_r1(folders):
    graph = graph_before("quantize_weights", folders["r1"])
    QuantizeWeights(experts={"format": "wint4", "group": 64}, default=FP8).run(graph)
    verify(graph)
    (moe,) = graph.find("dsc.Moe")
    names = {slot: operand(moe, slot).name for slot in ("gate", "gate.scales", "shared_down", "shared_down.scales")}
    assert names == {
        "gate": "model.layers.1.mlp.experts.gate_proj.packed",
        "gate.scales": "model.layers.1.mlp.experts.gate_proj.scales",
        "shared_down": "model.layers.1.mlp.shared_experts.down_proj.weight",
        "shared_down.scales": "model.layers.1.mlp.shared_experts.down_proj.scales",
    }
    gate = expression_of(operand(moe, "gate"))
    assert isinstance(gate, Quantize)
    assert isinstance(gate.x, Stack)
    assert (gate.format, gate.part, len(gate.x.parts)) == ("wint4:64", "data", 16)
    (router,) = graph.find("dsc.Router")
    assert weight_class_of(operand(router, "w")) == "exact"
    assert weight_class_of(operand(router, "bias")) == "exact"


def test_fp8_of_576_rows_has_5_scale_rows_and_kv_b_can_be_quantized(folders):
    graph = graph_before("quantize_weights", folders["r1"], phase="decode")
    QuantizeWeights(default=FP8, kv_b={"format": "wint4", "group": 128}).run(graph)
    verify(graph)
    qkv, attention = graph.find("dsc.Qkv")[0], graph.find("dsc.MlaAttention")[0]
    assert isinstance(expression_of(operand(qkv, "w")).x, Concat)
    assert operand(qkv, "w").shape == (128 + 576, 256)
    assert operand(qkv, "w.scales").shape == (1 + 5, 2)
    assert attention.attrs["kv_b_format"] == "wint4:128"
    assert operand(attention, "kv_b").name == "model.layers.0.self_attn.kv_b_proj.packed"
    assert operand(attention, "kv_b.scales").shape == (4 * 256, 512 // 128)


def test_two_weights_of_qkv_where_blocks_do_not_fit(folders):
    graph = graph_before("quantize_weights", folders["faults"])
    QuantizeWeights(default=FP8).run(graph)
    verify(graph)
    qkv = graph.find("dsc.Qkv")[0]
    assert (qkv.attrs["joint"], qkv.attrs["w_format"], qkv.attrs["w_kv_format"]) == (0, "fp8", "fp8")
    assert operand(qkv, "w.scales").shape == (1, 2)
    assert operand(qkv, "w_kv.scales").shape == (1, 2)


def test_ue8m0_of_the_checkpoint_goes_into_the_format(folders):
    graph = graph_before("quantize_weights", folders["v3.1"])
    QuantizeWeights(default=FP8, kv_b={"format": "wint8"}).run(graph)
    verify(graph)
    assert {node.attrs["w_format"] for node in graph.find("dsc.Linear")} == {"fp8:ue8m0"}
    assert {node.attrs["kv_b_format"] for node in graph.find("dsc.MlaAttention")} == {"wint8"}


def test_tied_embeddings_are_stored_once(folders):
    graph = graph_before("quantize_weights", folders["tied"])
    QuantizeWeights(default=WINT4, embeddings={"format": "wint8"}).run(graph)
    verify(graph)
    table, head = operand(graph.find("dsc.Embedding")[0], "table"), operand(graph.find("dsc.LmHead")[0], "w")
    assert table is head
    assert table.name == "model.embed_tokens.packed"
    assert graph.find("dsc.LmHead")[0].attrs["w_format"] == "wint8"


def test_the_mtp_layer_may_have_its_own_formats(folders):
    pass_ = QuantizeWeights(default=WINT4, embeddings={"format": "wint8"}, mtp={"default": FP8})
    formats = {}
    for model in ("main", "mtp"):
        graph = graph_before("quantize_weights", folders["r1"], model)
        pass_.run(graph)
        verify(graph)
        formats[model] = {
            (node.op, name): value
            for node in graph.nodes
            for name, value in node.attrs.items()
            if name.endswith("_format")
        }
    assert formats["main"]["Moe", "gate_format"] == "wint4:128"
    assert formats["mtp"]["Moe", "gate_format"] == formats["mtp"]["Qkv", "w_format"] == "fp8"
    assert formats["mtp"]["Embedding", "table_format"] == formats["main"]["Embedding", "table_format"] == "wint8"
