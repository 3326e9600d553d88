import pytest
from support.graphs import assert_same, run_pass

from dsc.runtime.errors import DscError

BEFORE = """
    # layers: 0
    main (float[T,8] gate, float[T,8] up) => (float[T,8] y)
    <float[T,8] sigmoid, float[T,8] silu>
    {
      [sigmoid] sigmoid = Sigmoid(gate)
      [silu] silu = Mul(gate, sigmoid)
      [act] y = Mul(silu, up)
    }
"""
AFTER = """
    main (float[T,8] gate, float[T,8] up) => (float[T,8] y)
    {
      [act] y = dsc.Swiglu(gate, up)
    }
"""


def test_fires():
    graph, run = run_pass(BEFORE, "fuse_swiglu")
    assert_same(graph, AFTER)
    assert (run.expected, run.found, run.report.declined) == (1, 1, [])
    assert run.report.changed[0].node == "act"


def broken(*changes):
    text = BEFORE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


CAST = broken(
    ("float[T,8] silu>", "float[T,8] silu, bfloat16[T,8] half, float[T,8] back>"),
    (
        "[act] y = Mul(silu, up)",
        "[n16] half = Cast<to=16>(silu)\n[n17] back = Cast<to=1>(half)\n[act] y = Mul(back, up)",
    ),
)


@pytest.mark.parametrize(
    ("text", "node", "reason", "wanted", "got"),
    [
        (
            broken(("=> (float[T,8] y)", "=> (float[T,8] y, float[T,8] silu)")),
            "silu",
            "silu has another reader",
            "no reader besides Mul act",
            "graph output silu",
        ),
        (
            broken(
                ("=> (float[T,8] y)", "=> (float[T,8] y, float[T,8] z)"), ("[act]", "[other] z = Relu(silu)\n[act]")
            ),
            "silu",
            "silu has another reader",
            "no reader besides Mul act",
            "Relu other",
        ),
        (CAST, "act", "operand 0 of Mul differs", "Mul", "Cast n17 -> float32"),
        (
            broken(
                ("float[T,8] silu>", "float[T,8] silu, float[T,2,4] view, int64[3] s = {-1,2,4}>"),
                ("float[T,8] up", "float[T,2,4] up"),
                ("=> (float[T,8] y)", "=> (float[T,2,4] y)"),
                ("[act] y = Mul(silu, up)", "[view] view = Reshape(silu, s)\n[act] y = Mul(view, up)"),
            ),
            "act",
            "operand 0 of Mul differs",
            "Mul",
            "Reshape view -> float32 [T, 2, 4]",
        ),
        (
            broken(("Mul(silu, up)", "Mul(up, silu)")),
            "act",
            "the operands of Mul are swapped",
            "Mul(Mul(gate, Sigmoid(gate)), up)",
            "Mul(input up float32 [T, 8], Mul silu)",
        ),
        (
            broken(("Mul(gate, sigmoid)", "Mul(up, sigmoid)")),
            "sigmoid",
            "operand 0 of Sigmoid is another tensor",
            "input up float32 [T, 8] (gate, as elsewhere in the pattern)",
            "input gate float32 [T, 8]",
        ),
    ],
)
def test_declines(text, node, reason, wanted, got):
    graph, run = run_pass(text, "fuse_swiglu", allow=1)
    assert (run.expected, run.found) == (1, 0)
    (site,) = run.report.declined
    assert (site.node, site.reason, site.wanted, site.got) == (node, reason, wanted, got)
    assert not graph.find("dsc.Swiglu")


def test_routed_experts_are_not_its_business():
    text = broken(("# layers: 0", "# layers: 1\n# done: fuse_moe"), ("[T,8]", "[4,T,8]"))
    _, run = run_pass(text, "fuse_swiglu")
    (site,) = run.report.declined
    assert (run.expected, site.node, site.wanted, site.got) == (0, "act", "[T, F]", "float32 [4, T, 8]")


def test_fails():
    with pytest.raises(DscError) as error:
        run_pass(CAST, "fuse_swiglu")
    assert error.value.text() == (
        "main: fuse_swiglu found 0 of 1 sites\n"
        "  at      act: operand 0 of Mul differs\n"
        "  wanted  Mul\n"
        "  got     Cast n17 -> float32\n"
        "  try     mend the graph; or, in the recipe, allow: {fuse_swiglu: {count: 1, reason: ...}}"
    )
