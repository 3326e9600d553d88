from dataclasses import replace

import pytest
from support.breaks import graph_before, passes_before
from support.families import make_checkpoint
from support.graphs import assert_same, run_pass

from dsc.compiler.ir.graph import Graph, Node, constant, operand, variable
from dsc.compiler.ir.verify import verify
from dsc.compiler.ir.weight import ONNX_DTYPES
from dsc.compiler.pipeline import run_passes
from dsc.passes.quantize_norms import QuantizeNorms
from dsc.passes.quantize_weights import QuantizeWeights
from dsc.passes.set_dtype import SetDtype
from dsc.plugins.schema import Type
from dsc.runtime.errors import DscError

# A dense layer's second half, in fp8 but for down.
BEFORE = """
    # layers: 0
    # formats: dense_mlp=fp8
    main (bfloat16[T,192] x, bfloat16[T,192] r) => (bfloat16[T,192] z, bfloat16[T,192] sum)
    <float[192] v, bfloat16[T,192] y, float8e4m3fn[320,192] "gate.weight", float[3,2] "gate.scales",
     float8e4m3fn[320,192] "up.weight", float[3,2] "up.scales", bfloat16[192,320] "down.weight",
     bfloat16[T,320] g, bfloat16[T,320] u, bfloat16[T,320] h>
    {
      [norm] y, sum = dsc.AddRmsNorm<epsilon=1e-6>(x, r, v)
      [gate] g = dsc.Linear<w_format="fp8">(y, "gate.weight", "gate.scales")
      [up] u = dsc.Linear<w_format="fp8">(y, "up.weight", "up.scales")
      [swiglu] h = dsc.Swiglu(g, u)
      [down] z = dsc.Linear<w_format="bf16">(h, "down.weight", "")
    }
"""
AFTER = """
    main (bfloat16[T,192] x, bfloat16[T,192] r) => (bfloat16[T,192] z, bfloat16[T,192] sum)
    <float[192] v, bfloat16[T,192] y, float8e4m3fn[T,192] "norm.codes", float[2,T] "norm.scales",
     float8e4m3fn[320,192] "gate.weight", float[3,2] "gate.scales", float8e4m3fn[320,192] "up.weight", float[3,2] "up.scales",
     bfloat16[192,320] "down.weight", bfloat16[T,320] g, bfloat16[T,320] u, bfloat16[T,320] h>
    {
      [norm] y, sum, "norm.codes", "norm.scales" = dsc.AddRmsNorm<epsilon=1e-6, quantize="fp8">(x, r, v)
      [gate] g = dsc.Linear<w_format="fp8">(y, "gate.weight", "gate.scales", "norm.codes", "norm.scales")
      [up] u = dsc.Linear<w_format="fp8">(y, "up.weight", "up.scales", "norm.codes", "norm.scales")
      [swiglu] h = dsc.Swiglu(g, u)
      [down] z = dsc.Linear<w_format="bf16">(h, "down.weight", "")
    }
"""
UP_BEHIND_A_CAST = (
    BEFORE.replace("bfloat16[T,192] y,", "bfloat16[T,192] y, bfloat16[T,192] same,")
    .replace("[up]", "[n17] same = Cast<to=16>(y)\n[up]")
    .replace('fp8">(y, "up', 'fp8">(same, "up')
)
FP8 = {"format": "fp8", "block": [128, 128]}


def test_fires():
    graph, run = run_pass(BEFORE, "quantize_norms")
    assert_same(graph, AFTER)
    assert (run.expected, run.found, run.report.declined) == (2, 2, [])
    assert [(site.node, site.note) for site in run.report.changed] == [
        ("gate", "x as fp8 codes of norm"),
        ("up", "x as fp8 codes of norm"),
    ]


def test_codes_are_those_of_the_weights():
    """Powers of two where the weights say so; a norm without a sum."""
    before, after = (text.replace('"fp8"', '"fp8:ue8m0"') for text in (BEFORE, AFTER))
    graph, run = run_pass(before, "quantize_norms")
    assert_same(graph, after)
    assert run.report.changed[0].note == "x as fp8:ue8m0 codes of norm"
    before, after = (
        text.replace("AddRmsNorm", "RmsNorm").replace("y, sum", "y").replace("(x, r, v)", "(x, v)")
        .replace(", bfloat16[T,192] sum)", ")") for text in (BEFORE, AFTER)
    )  # fmt: skip
    graph, _ = run_pass(before, "quantize_norms")
    assert_same(graph, after)


def test_other_formats_are_no_sites():
    text = BEFORE.replace('"fp8"', '"bf16"').replace('"gate.scales")', '"")').replace('"up.scales")', '"")')
    text = text.replace('float8e4m3fn[320,192] "gate', 'bfloat16[320,192] "gate').replace("=fp8", "=bf16")
    text = text.replace('float8e4m3fn[320,192] "up', 'bfloat16[320,192] "up')
    text = text.replace('float[3,2] "gate.scales",', "").replace('float[3,2] "up.scales",', "")
    graph, run = run_pass(text, "quantize_norms")
    assert_same(graph, text)
    assert (run.expected, run.found, run.report.declined) == (0, 0, [])


def test_what_no_norm_makes_is_no_near_miss():
    """down's rows are those of another op, which quantizes nothing."""
    text = BEFORE.replace('bfloat16[192,320] "down', 'float[2,3] "down.scales", float8e4m3fn[192,320] "down')
    graph, run = run_pass(text.replace('"bf16">(h, "down.weight", "")', '"fp8">(h, "down.weight", "down.scales")'),
                          "quantize_norms")  # fmt: skip
    assert (run.found, run.report.declined) == (2, [])
    assert operand(graph.find("dsc.Linear")[2], "x_codes") is None


@pytest.mark.parametrize(
    ("text", "nodes", "reason", "wanted", "got"),
    [
        (
            UP_BEHIND_A_CAST,
            ["up"],
            "what it multiplies is no norm's result",
            "dsc.AddRmsNorm or dsc.RmsNorm",
            "Cast n17",
        ),
        (
            BEFORE.replace('"fp8">(y, "up', '"fp8">(r, "up'),
            ["up"],
            "what it multiplies is no norm's result",
            "dsc.AddRmsNorm or dsc.RmsNorm",
            "the input r",
        ),
        (
            BEFORE.replace('"fp8">(y, "up', '"fp8:ue8m0">(y, "up'),
            ["gate", "up"],
            "readers of norm want codes of two kinds",
            "one format",
            "gate fp8, up fp8:ue8m0",
        ),
        (AFTER, ["gate", "up"], "has codes already", "x alone", "dsc.AddRmsNorm norm"),
    ],
    ids=["cast", "input", "two ways", "twice"],
)
def test_declines(text: str, nodes: list[str], reason: str, wanted: str, got: str):
    text = text if "# layers" in text else f"# layers: 0\n# formats: dense_mlp=fp8\n{text}"
    graph, run = run_pass(text, "quantize_norms", allow=len(nodes))
    assert [site.node for site in run.report.declined] == nodes
    assert {(s.reason, s.wanted, s.got) for s in run.report.declined} == {(reason, wanted, got)}
    if text != f"# layers: 0\n# formats: dense_mlp=fp8\n{AFTER}":
        linears = {node.name: operand(node, "x_codes") for node in graph.find("dsc.Linear")}
        assert all(linears[node] is None for node in nodes)
        assert (linears["gate"] is not None) == ("gate" not in nodes)


def test_a_head_in_fp8_is_declined():
    """It quantizes the rows whose logits are wanted, which are few."""
    text = """
    # layers:
    # formats: lm_head=fp8
    main (bfloat16[T,192] x, int32[R] rows) => (float[R,40] logits)
    <float[192] v, bfloat16[T,192] y, float8e4m3fn[40,192] "lm_head.weight", float[1,2] "lm_head.scales">
    {
      [norm] y = dsc.RmsNorm<epsilon=1e-6>(x, v)
      [lm_head] logits = dsc.LmHead<w_format="fp8">(y, rows, "lm_head.weight", "lm_head.scales")
    }
    """
    graph, run = run_pass(text, "quantize_norms")
    assert_same(graph, text)
    (site,) = run.report.declined
    assert (run.expected, site.node, site.reason) == (0, "lm_head", "quantizes only the rows that it takes")


def test_fails():
    with pytest.raises(DscError) as error:
        run_pass(UP_BEHIND_A_CAST, "quantize_norms")
    assert error.value.text() == (
        "main: quantize_norms found 1 of 2 sites\n"
        "  at      up: what it multiplies is no norm's result\n"
        "  wanted  dsc.AddRmsNorm or dsc.RmsNorm\n"
        "  got     Cast n17\n"
        "  try     mend the graph; or, in the recipe, allow: {quantize_norms: {count: 1, reason: ...}}"
    )


# -- whole models


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: make_checkpoint(tmp_path_factory.mktemp(family), family) for family in ("r1", "v3.1", "v2-lite")}


def quantized(folder, model: str = "main", phase: str = "decode", **entries) -> Graph:
    """A model's graph with its weights in formats."""
    graph = graph_before("quantize_weights", folder, model, phase)
    run_passes([graph], [SetDtype(), QuantizeWeights(**entries)])
    return graph


@pytest.mark.parametrize(
    ("family", "model", "entries", "mlps"),
    [
        ("r1", "main", {"default": FP8}, "all"),
        ("r1", "main", {"default": FP8, "experts": {"format": "wint8"}}, "all"),  # the shared expert is in fp8
        ("r1", "main", {"attention": FP8}, "none"),
        ("r1", "main", {"experts": FP8, "attention": FP8}, "moe"),
        ("r1", "mtp", {"default": {"format": "wint8"}, "mtp": {"default": FP8}}, "all"),
        ("r1", "main", {"default": {"format": "wint8"}, "mtp": {"default": FP8}}, ""),
        ("v3.1", "main", {"default": FP8}, "all"),
        ("v2-lite", "main", {"default": FP8}, "all"),
    ],
)
def test_every_norm_before_fp8_weights(folders, family: str, model: str, entries: dict, mlps: str):
    graph = quantized(folders[family], model, **entries)
    (runs,) = run_passes([graph], [QuantizeNorms()]).passes
    (run,) = runs.runs
    norms = [node for node in graph.nodes if node.op in ("AddRmsNorm", "RmsNorm") and "quantize" in node.attrs]
    info = graph.info
    layers = {"all": info.num_layers, "none": 0, "moe": info.num_moe_layers, "": -info.num_layers}[mlps]
    assert len(norms) == info.num_layers + layers
    assert {node.attrs["quantize"] for node in norms} <= {"fp8:ue8m0" if family == "v3.1" else "fp8"}
    dense = 2 * info.num_dense_layers if mlps == "all" else 0
    moe = info.num_moe_layers if mlps in ("all", "moe") else 0
    assert run.found == run.expected == (info.num_layers + dense + moe if mlps else 0)
    assert run.report.declined == []
    assert all(node.name != "norm" for node in norms)


def test_attention_that_is_not_fused(folders):
    """q_a and kv_a read the layer's norm, q_b and kv_b norms of their own."""
    graph = graph_before("fuse_qkv", folders["r1"], "main", "decode")
    names = ("fuse_moe", "insert_rms_norm", "insert_linear")
    run_passes([graph], [pass_ for pass_ in passes_before("set_dtype") if pass_.name in names])
    QuantizeWeights(default=FP8).run(graph)
    wanted, found = QuantizeNorms().expected(graph.info), QuantizeNorms().run(graph).changed
    assert (
        len(found) == wanted == 4 * graph.info.num_layers + 2 * graph.info.num_dense_layers + graph.info.num_moe_layers
    )
    graph.tidy()
    verify(graph)


@pytest.mark.parametrize("op", ["Cast", "Reshape"])
def test_every_site_that_is_broken_is_told(folders, op: str):
    whole = quantized(folders["r1"], default=FP8)
    sites = [site.node for site in QuantizeNorms().run(whole.copy(whole.name)).changed]
    assert len(sites) == QuantizeNorms().expected(whole.info)
    for name in sites:
        graph = whole.copy(whole.name)
        reader = next(node for node in graph.nodes if node.name == name)
        _insert(graph, reader, op)
        report = QuantizeNorms().run(graph)
        assert [site.node for site in report.changed] == [other for other in sites if other != name]
        (declined,) = report.declined
        assert (declined.node, declined.got) == (name, f"{op} extra")
        graph.tidy()
        verify(graph)


def _insert(graph: Graph, reader: Node, op: str) -> None:
    x = reader.inputs[0]
    result = variable("extra", Type("bfloat16", tuple(x.shape)))
    if op == "Cast":
        graph.add(op, [x], [result], "extra", to=ONNX_DTYPES["bfloat16"])
    else:
        graph.add(op, [x, constant("extra_shape", [-1, x.shape[1]], "int64")], [result], "extra")
    reader.inputs[0] = result
    graph.gs.nodes.remove(reader)
    graph.gs.nodes.append(reader)
    graph.tidy()


def test_the_contract_reads_no_graph(folders):
    info = quantized(folders["r1"], default=FP8).info
    pass_ = QuantizeNorms()
    assert pass_.expected(replace(info, formats={})) == 0
    assert pass_.expected(replace(info, formats={"attention": "fp8", "dense_mlp": "wint4"})) == info.num_layers
    assert pass_.expected(replace(info, formats={"shared_experts": "fp8"})) == info.num_moe_layers
    assert pass_.expected(replace(info, formats={"dense_mlp": "fp8"})) == 2 * info.num_dense_layers
    assert pass_.expected(replace(info, formats={"lm_head": "fp8", "kv_b": "fp8", "eh_proj": "fp8"})) == 0
