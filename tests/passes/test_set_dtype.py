import pytest
from support.breaks import graph_before
from support.families import make_checkpoint
from support.graphs import assert_same, run_pass

from dsc.compiler.ir.graph import dtype_of, is_weight, op_name
from dsc.compiler.ir.text import from_text
from dsc.compiler.opt import TINY_R1, info_of
from dsc.passes.set_dtype import SetDtype
from dsc.runtime.errors import DscError

# A layer cut down to a few nodes: what begins activations, what follows them, what stays float32.
BEFORE = """
    # layers:
    # model: main
    main (int32[T] tokens, int32[T] slots, int32[R] logit_rows) => (float[R,32] logits, float[T,8] h, int32[T,2] ids, float[T,2] weights)
    <float[32,8] "model.embed_tokens.weight", float[8] norm, float[4,8] router, float[32,8] "lm_head.weight",
     float[T,8] x>
    {
      [embed_tokens] x = dsc.Embedding<dtype="float32", table_format="fp32">(tokens, "model.embed_tokens.weight", "")
      [norm] h = dsc.RmsNorm<epsilon=0.5>(x, norm)
      [router] ids, weights = dsc.Router<top_k=2, groups=1, topk_groups=1, scoring="sigmoid", group_score="none",
                                         normalize=1, scale=2.5>(h, router, "", slots)
      [lm_head] logits = dsc.LmHead<w_format="fp32">(h, logit_rows, "lm_head.weight", "")
    }
"""
AFTER = (
    BEFORE.replace("float[T,8] h,", "bfloat16[T,8] h,")
    .replace("float[T,8] x", "bfloat16[T,8] x")
    .replace('dtype="float32"', 'dtype="bfloat16"')
)
MTP = """
    # model: mtp
    mtp (float[T,8] embedding, float[T,8] hidden, float[R,32] logits, float[R] temperature, int64[R] seeds, float[R] top_p,
         int32[R] top_k, float[R] min_p, int32[R] positions, int32[R,1] mask, int32[R] drafts) => (float[T,16] y, int32[R] t)
    <float[8] enorm, float[8] hnorm, int32[R] accepted, float[R] logprobs>
    {
      [input] y = dsc.MtpInput<epsilon=0.5>(embedding, hidden, enorm, hnorm)
      [sample] t, accepted, logprobs = dsc.Sample(logits, temperature, top_p, top_k, min_p, seeds, positions, mask, drafts)
    }
"""


def test_fires():
    graph, run = run_pass(BEFORE, "set_dtype:activations=bf16")
    assert_same(graph, AFTER)
    assert (run.expected, run.found, run.report.declined) == (2, 2, [])
    assert [(site.node, site.note) for site in run.report.changed] == [
        ("embed_tokens", "y bfloat16"),
        ("norm", "y bfloat16"),
    ]


def test_float32_leaves_the_graph_alone():
    graph, run = run_pass(BEFORE, "set_dtype:activations=fp32")
    assert_same(graph, BEFORE)
    assert (run.expected, run.found) == (0, 0)


def test_inputs_follow_where_every_reader_takes_them():
    """MTP's hidden comes from the main model as it left there; an input that a float32 op reads stays."""
    graph = from_text(MTP, info_of(MTP, TINY_R1, "decode"))
    report = SetDtype("bf16").run(graph)
    assert {tensor.name: dtype_of(tensor) for tensor in graph.gs.inputs if "int" not in dtype_of(tensor)} == {
        "embedding": "bfloat16",
        "hidden": "bfloat16",
        "logits": "float32",
        "temperature": "float32",
        "top_p": "float32",
        "min_p": "float32",
    }
    assert [site.node for site in report.changed] == ["input"]
    assert not report.declined


ODD = (
    BEFORE.replace("float[T,8] x>", "float[T,8] x, float[T,8] z>")
    .replace("RmsNorm<epsilon=0.5>(x", "RmsNorm<epsilon=0.5>(z")
    .replace("      [norm]", "      [odd] z = Relu(x)\n      [norm]")
)


def test_declines():
    graph, run = run_pass(ODD, "set_dtype:activations=bf16", allow=2)
    (site,) = run.report.declined
    assert (site.node, site.reason) == ("odd", "not a plugin op: no schema says what stays float32")
    assert_same(graph, ODD)


def test_fails():
    with pytest.raises(DscError) as error:
        run_pass(ODD, "set_dtype:activations=bf16")
    assert error.value.text() == (
        "main: set_dtype found 0 of 2 sites\n"
        "  at      odd: not a plugin op: no schema says what stays float32\n"
        "  wanted  dsc.*\n"
        "  got     Relu\n"
        "  try     mend the graph; or, in the recipe, allow: {set_dtype: {count: 2, reason: ...}}"
    )


def test_unknown_dtype():
    with pytest.raises(DscError) as error:
        SetDtype("bf61")
    assert error.value.text() == (
        "set_dtype: unknown dtype of activations\n  wanted  fp32 or bf16\n  got     bf61\n  try     bf16"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {f: make_checkpoint(tmp_path_factory.mktemp(f), f, num_hidden_layers=2) for f in ("r1", "v2-lite")}


@pytest.mark.parametrize(
    ("family", "model", "phase", "sites"),
    [
        ("r1", "main", "prefill", 2 + 2 * 6 + 4 + 1),
        ("r1", "mtp", "decode", 4 + 6 + 1),
        ("v2-lite", "main", "decode", 2 + 2 * 5 + 4 + 1),
    ],
)
def test_a_whole_graph(folders, family, model, phase, sites):
    """In every graph all activations become bfloat16; what stays is what must: routers, logits, weights, tables."""
    graph = graph_before("set_dtype", folders[family], model, phase)
    pass_ = SetDtype("bf16")
    report = pass_.run(graph)
    assert pass_.expected(graph.info) == sites == len(report.changed)
    assert not report.declined
    tensors = [tensor for node in graph.nodes for tensor in (*node.inputs, *node.outputs) if not tensor.is_empty()]
    floats = {tensor.name for tensor in tensors if not is_weight(tensor) and dtype_of(tensor) == "float32"}
    routers = {node.outputs[1].name for node in graph.find("dsc.Router")}
    assert floats == {"logits"} | routers
    assert len(routers) == 1
    assert all(dtype_of(tensor) == "float32" for tensor in tensors if is_weight(tensor))
    hidden = [t for t in (*graph.gs.inputs, *graph.gs.outputs) if t.name.startswith("hidden")]
    assert [dtype_of(tensor) for tensor in hidden] == ["bfloat16"] * (2 if model == "mtp" else 1)
    assert all(op_name(node).startswith("dsc.") for node in graph.nodes)
