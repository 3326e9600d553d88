from dsc.compiler.ir.graph import GraphInfo
from dsc.compiler.ir.match import match
from dsc.compiler.ir.pattern import Any, C, P, W
from dsc.compiler.ir.readers import readers
from dsc.compiler.ir.text import from_text
from dsc.compiler.opt import TINY_R1

TEXT = """
    main (float[T,8] x) => (float[T,8] a, float[T,8] b, float[8,T] c, float[T,8] d)
    <bfloat16[T,8] half, float[T,8] back, float[8,T] turned>
    {
      [half] half = Cast<to=16>(x)
      [back] back = Cast<to=1>(half)
      [far] a = Neg(back)
      [near] b = Neg(x)
      [turned] turned = Transpose<perm=[1, 0]>(x)
      [view] c = Neg(turned)
      [other] d = Neg(b)
    }
"""

SHARED = """
    main (int32[T] positions, float[1,1,T,8] x) => (float[1,1,T,8] a, float[1,1,T,8] b)
    <int64[T] wide, int64[1,T] row, int64[1] zero = {0}, float[16,4] cos, float[16,4] sin>
    {
      [cast] wide = Cast<to=7>(positions)
      [row] row = Unsqueeze(wide, zero)
      [first] a = RotaryEmbedding(x, cos, sin, row)
      [second] b = RotaryEmbedding(x, cos, sin, row)
    }
"""


def test_casts_and_views_are_looked_through_nearest_first():
    graph = from_text(TEXT, GraphInfo(TINY_R1, "main"))
    x = graph.input("x")
    assert [node.name for node in readers(x, "Neg")] == ["near", "view", "far"]
    assert [node.name for node in readers(x, "Transpose")] == ["turned"]
    assert readers(x, "Gemm") == []


def test_a_match_keeps_what_its_shared_nodes_read():
    positions = P("Cast", Any("positions"), to=7, shared=True)
    row = P("Unsqueeze", positions, C([0]), shared=True)
    graph = from_text(SHARED, GraphInfo(TINY_R1, "main"))
    first, second = graph.find("RotaryEmbedding")
    pattern = P("RotaryEmbedding", Any("x"), W("cos"), W("sin"), row)
    found = match(pattern, first, graph)
    assert [node.name for node in found.nodes] == ["first"]
    graph.remove(found.nodes)
    assert {node.name for node in match(pattern, second, graph).nodes} == {"cast", "row", "second"}
