import pytest
from support.breaks import assert_every_break_is_told, graph_before
from support.families import make_checkpoint
from support.graphs import assert_same, run_pass

from dsc.passes.fuse_lm_head import FuseLmHead
from dsc.runtime.errors import DscError

BEFORE = """
    main (float[T,8] hidden, int32[R] logit_rows) => (float[R,16] logits)
    <float[R,8] chosen, float[16,8] "lm_head.weight">
    {
      [lm_head.rows] chosen = Gather<axis=0>(hidden, logit_rows)
      [lm_head] logits = Gemm<transB=1>(chosen, "lm_head.weight")
    }
""".replace("[lm_head.rows]", '["lm_head.rows"]')
AFTER = """
    main (float[T,8] hidden, int32[R] logit_rows) => (float[R,16] logits)
    <float[16,8] "lm_head.weight">
    {
      [lm_head] logits = dsc.LmHead<w_format="fp32">(hidden, logit_rows, "lm_head.weight", "")
    }
"""


def test_fires():
    graph, run = run_pass(BEFORE, "fuse_lm_head")
    assert_same(graph, AFTER)
    assert (run.expected, run.found, run.report.declined) == (1, 1, [])


def test_declines_other_rows():
    text = BEFORE.replace("int32[R] logit_rows)", "int32[R] logit_rows, int32[R] others)").replace(
        "(hidden, logit_rows)", "(hidden, others)"
    )
    graph, run = run_pass(text, "fuse_lm_head", allow=1)
    (site,) = run.report.declined
    assert (site.node, site.reason) == ("lm_head.rows", "the rows are not those asked for")
    assert (site.wanted, site.got) == ("input logit_rows", "input others int32 [R]")
    assert not graph.find("dsc.LmHead")


@pytest.mark.parametrize("model", ["main", "mtp"])
def test_every_break_is_told(model, tmp_path):
    folder = make_checkpoint(tmp_path, "v3")
    assert_every_break_is_told(graph_before("fuse_lm_head", folder, model), FuseLmHead())


def test_fails():
    text = BEFORE.replace("float[R,8] chosen,", "float[R,8] chosen, bfloat16[R,8] half, float[R,8] back,").replace(
        "[lm_head] logits = Gemm<transB=1>(chosen,",
        "[n1] half = Cast<to=16>(chosen)\n[n2] back = Cast<to=1>(half)\n[lm_head] logits = Gemm<transB=1>(back,",
    )
    with pytest.raises(DscError) as error:
        run_pass(text, "fuse_lm_head")
    assert error.value.text() == (
        "main: fuse_lm_head found 0 of 1 sites\n"
        "  at      lm_head: operand 0 of Gemm differs\n"
        "  wanted  Gather\n"
        "  got     Cast n2 -> float32\n"
        "  try     mend the graph; or, in the recipe, allow: {fuse_lm_head: {count: 1, reason: ...}}"
    )
