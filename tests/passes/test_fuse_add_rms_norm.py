import pytest
from support.graphs import assert_same, run_pass

from dsc.runtime.errors import DscError

BEFORE = """
    # layers: 0
    main (float[T,8] x, float[T,8] attention, float[T,8] mlp) => (float[T,8] y, float[T,8] z)
    <float[T,8] sum, float[T,8] last, float[8] w, float[8] v>
    {
      [sum] sum = Add(x, attention)
      [norm] y = RMSNormalization<axis=-1, epsilon=1e-6>(sum, w)
      [last] last = Add(sum, mlp)
      [final] z = RMSNormalization<axis=-1, epsilon=1e-5>(last, v)
    }
"""
AFTER = """
    main (float[T,8] x, float[T,8] attention, float[T,8] mlp) => (float[T,8] y, float[T,8] z)
    <float[T,8] sum, float[T,8] last, float[8] w, float[8] v>
    {
      [norm] y, sum = dsc.AddRmsNorm<epsilon=1e-6>(attention, x, w)
      [final] z, last = dsc.AddRmsNorm<epsilon=1e-5>(mlp, sum, v)
    }
"""
CAST = (
    BEFORE.replace("float[T,8] sum,", "float[T,8] sum, float[T,8] same,")
    .replace("[norm]", "[n17] same = Cast<to=1>(sum)\n[norm]")
    .replace("(sum, w)", "(same, w)")
)


def test_fires_and_the_sum_keeps_its_other_readers():
    graph, run = run_pass(BEFORE, "fuse_add_rms_norm")
    assert_same(graph, AFTER)
    assert (run.expected, run.found, run.report.declined) == (2, 2, [])


def test_a_sum_that_is_a_graph_output_stays_one():
    graph, _run = run_pass(BEFORE.replace("float[T,8] z)", "float[T,8] z, float[T,8] last)"), "fuse_add_rms_norm")
    assert_same(graph, AFTER.replace("float[T,8] z)", "float[T,8] z, float[T,8] last)"))


@pytest.mark.parametrize(
    ("old", "new", "node", "reason", "wanted", "got"),
    [
        (
            "axis=-1, epsilon=1e-6",
            "axis=0, epsilon=1e-6",
            "norm",
            "attribute axis of RMSNormalization differs",
            "-1 or 1",
            "0",
        ),
        (
            "axis=-1, epsilon=1e-6",
            "axis=-1, epsilon=1e-6, stash_type=16",
            "norm",
            "attribute stash_type of RMSNormalization is not part of the pattern",
            "1",
            "16",
        ),
    ],
)
def test_declines(old, new, node, reason, wanted, got):
    text = BEFORE.replace(old, new).replace("float[8] w", "float[T,8] w" if "axis=0" in new else "float[8] w")
    text = text.replace("float[T,8] w,", "float[4,8] w,").replace("[T,8]", "[4,8]") if "axis=0" in new else text
    graph, run = run_pass(text, "fuse_add_rms_norm", allow=1)
    assert [(s.node, s.reason, s.wanted, s.got) for s in run.report.declined] == [(node, reason, wanted, got)]
    assert len(graph.find("dsc.AddRmsNorm")) == 1


def test_a_norm_of_something_else_is_no_near_miss():
    _, run = run_pass(BEFORE.replace("(sum, w)", "(x, w)"), "fuse_add_rms_norm", allow=1)
    assert run.report.declined == []


def test_a_second_norm_of_one_sum_is_left_and_a_surplus_site_is_told():
    text = (
        BEFORE.replace("# layers: 0", "# layers:")
        .replace("[last] last = Add(sum, mlp)", "")
        .replace("(last, v)", "(sum, v)")
    )
    with pytest.raises(DscError, match=r"found 1 of 0 sites\n  changed  norm$"):
        run_pass(text.replace("float[T,8] last, ", ""), "fuse_add_rms_norm")


def test_fails():
    with pytest.raises(DscError) as error:
        run_pass(CAST, "fuse_add_rms_norm")
    assert error.value.text() == (
        "main: fuse_add_rms_norm found 1 of 2 sites\n"
        "  at      norm: operand 0 of RMSNormalization differs\n"
        "  wanted  Add\n"
        "  got     Cast n17 -> float32\n"
        "  try     mend the graph; or, in the recipe, allow: {fuse_add_rms_norm: {count: 1, reason: ...}}"
    )
