import pytest
from support.graphs import assert_same, run_pass

from dsc.runtime.errors import DscError

BEFORE = """
    # layers:
    main (float[R,8] x) => (float[R,32] y)
    <float[32,8] "lm_head.weight">
    {
      [lm_head] y = Gemm<transB=1>(x, "lm_head.weight")
    }
"""
AFTER = """
    main (float[R,8] x) => (float[R,32] y)
    <float[32,8] "lm_head.weight">
    {
      [lm_head] y = dsc.Linear<w_format="fp32">(x, "lm_head.weight", "")
    }
"""
BIAS = BEFORE.replace("<float[32,8]", "<float[32] b, float[32,8]").replace('weight")', 'weight", b)')


def test_fires():
    graph, run = run_pass(BEFORE, "insert_linear")
    assert_same(graph, AFTER)
    assert (run.expected, run.found) == (1, 1)


@pytest.mark.parametrize(
    ("text", "reason", "wanted", "got"),
    [
        (
            BIAS,
            "Gemm has another number of operands",
            "2 operands",
            "3: input x float32 [R, 8], weight lm_head.weight float32 [32, 8], weight b float32 [32]",
        ),
        (
            BEFORE.replace("transB=1", "transB=1, alpha=2.0"),
            "attribute alpha of Gemm is not part of the pattern",
            "1.0",
            "2.0",
        ),
        (BEFORE.replace("<transB=1>", "").replace("[32,8]", "[8,32]"), "attribute transB of Gemm differs", "1", "0"),
    ],
)
def test_declines(text, reason, wanted, got):
    graph, run = run_pass(text, "insert_linear", allow=1)
    (site,) = run.report.declined
    assert (site.node, site.reason, site.wanted, site.got) == ("lm_head", reason, wanted, got)
    assert not graph.find("dsc.Linear")


def test_fails():
    with pytest.raises(DscError) as error:
        run_pass(BIAS, "insert_linear")
    assert error.value.text() == (
        "main: insert_linear found 0 of 1 sites\n"
        "  at      lm_head: Gemm has another number of operands\n"
        "  wanted  2 operands\n"
        "  got     3: input x float32 [R, 8], weight lm_head.weight float32 [32, 8], weight b float32 [32]\n"
        "  try     mend the graph; or, in the recipe, allow: {insert_linear: {count: 1, reason: ...}}"
    )
