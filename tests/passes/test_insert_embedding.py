import pytest
from support.graphs import assert_same, run_pass

from dsc.runtime.errors import DscError

BEFORE = """
    # layers:
    main (int32[T] tokens, int32[R] logit_rows) => (float[R,8] y)
    <float[32,8] "model.embed_tokens.weight", float[T,8] x>
    {
      [embed_tokens] x = Gather<axis=0>("model.embed_tokens.weight", tokens)
      [rows] y = Gather<axis=0>(x, logit_rows)
    }
"""
AFTER = """
    main (int32[T] tokens, int32[R] logit_rows) => (float[R,8] y)
    <float[32,8] "model.embed_tokens.weight", float[T,8] x>
    {
      [embed_tokens] x = dsc.Embedding<dtype="float32", table_format="fp32">(tokens, "model.embed_tokens.weight", "")
      [rows] y = Gather<axis=0>(x, logit_rows)
    }
"""
SWAPPED_AXIS = (
    BEFORE.replace('Gather<axis=0>("', 'Gather<axis=1>("')
    .replace("float[T,8] x", "float[32,T] x")
    .replace("float[R,8] y", "float[R,T] y")
)


def test_fires_and_leaves_rows_of_activations():
    graph, run = run_pass(BEFORE, "insert_embedding")
    assert_same(graph, AFTER)
    assert (run.expected, run.found, run.report.declined) == (1, 1, [])


def test_declines():
    _, run = run_pass(SWAPPED_AXIS, "insert_embedding", allow=1)
    (site,) = run.report.declined
    assert (site.node, site.reason, site.wanted, site.got) == (
        "embed_tokens",
        "attribute axis of Gather differs",
        "0",
        "1",
    )


def test_fails():
    with pytest.raises(DscError) as error:
        run_pass(SWAPPED_AXIS, "insert_embedding")
    assert error.value.text() == (
        "main: insert_embedding found 0 of 1 sites\n"
        "  at      embed_tokens: attribute axis of Gather differs\n"
        "  wanted  0\n"
        "  got     1\n"
        "  try     mend the graph; or, in the recipe, allow: {insert_embedding: {count: 1, reason: ...}}"
    )
