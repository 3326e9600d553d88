import pytest
from support.graphs import assert_same, run_pass

from dsc.runtime.errors import DscError

BEFORE = """
    # layers: 0
    # done: fuse_add_rms_norm fuse_qkv
    main (float[T,8] x) => (float[T,8] y)
    <float[8] w>
    {
      [norm] y = RMSNormalization<axis=1, epsilon=1e-6>(x, w)
    }
"""
AFTER = """
    main (float[T,8] x) => (float[T,8] y)
    <float[8] w>
    {
      [norm] y = dsc.RmsNorm<epsilon=1e-6>(x, w)
    }
"""
NOT_A_WEIGHT = BEFORE.replace("float[T,8] x)", "float[T,8] x, float[8] w)").replace("<float[8] w>", "")


def test_fires():
    graph, run = run_pass(BEFORE, "insert_rms_norm")
    assert_same(graph, AFTER)
    assert (run.expected, run.found) == (1, 1)


def test_the_default_epsilon_is_onnx_s():
    graph, _ = run_pass(BEFORE.replace(", epsilon=1e-6", ""), "insert_rms_norm")
    assert graph.find("dsc.RmsNorm")[0].attrs["epsilon"] == pytest.approx(1e-5)


def test_declines():
    text = BEFORE.replace("axis=1", "axis=0").replace("[T,8]", "[4,8]").replace("float[8] w", "float[4,8] w")
    _, run = run_pass(text, "insert_rms_norm", allow=1)
    (site,) = run.report.declined
    assert (site.node, site.reason) == ("norm", "attribute axis of RMSNormalization differs")
    assert (site.wanted, site.got) == ("-1 or 1", "0")


def test_fails():
    with pytest.raises(DscError) as error:
        run_pass(NOT_A_WEIGHT, "insert_rms_norm")
    assert error.value.text() == (
        "main: insert_rms_norm found 0 of 1 sites\n"
        "  left  RMSNormalization norm\n"
        "  try   mend the graph; or, in the recipe, allow: {insert_rms_norm: {count: 1, reason: ...}}"
    )
