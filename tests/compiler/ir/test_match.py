"""The matcher: what binds, what is told of a site that differs; and for random patterns, that every change is told."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dsc.compiler.ir.graph import Graph, variable
from dsc.compiler.ir.match import Match, Mismatch, attribute, match
from dsc.compiler.ir.pattern import ANY, Any, C, Either, P, Pattern, W
from dsc.compiler.ir.text import from_text
from dsc.compiler.opt import TINY_R1, info_of
from dsc.plugins.schema import Type


def parse(text: str) -> Graph:
    return from_text(text, info_of(text, TINY_R1, ""))


def node_of(graph: Graph, name: str):
    return next(node for node in graph.nodes if node.name == name)


TOP_K = """
    main (float[T,8] x, float[T,8] scores) => (int64[T,2] ids, float[T,2] picked)
    <int64[1] k = {2}, float[T,2] values>
    {
      [topk] values, ids = TopK<axis=-1>(x, k)
      [pick] picked = GatherElements<axis=1>(scores, ids)
    }
"""


def test_outputs_constants_and_free_attributes():
    top = P("TopK", Any("x"), C([2]), axis=-1, shared=True)
    graph = parse(TOP_K)
    found = match(P("GatherElements", Any("scores"), top[1], axis=ANY), node_of(graph, "pick"), graph)
    assert isinstance(found, Match)
    assert found["x"] is graph.input("x")
    assert found["scores"] is graph.input("scores")
    # ids is a graph output: TopK stays where it is
    assert [n.name for n in found.nodes] == ["pick"]
    assert {n.name for n in found.matched.values()} == {"pick", "topk"}


def test_another_output_and_another_constant_are_told():
    graph = parse(TOP_K)
    wrong = P("GatherElements", Any("scores"), P("TopK", Any("x"), C([3]), axis=-1, shared=True)[0], axis=1)
    found = match(wrong, node_of(graph, "pick"), graph)
    assert isinstance(found, Mismatch)
    assert found.near
    assert [(f.node.name, f.wanted, f.got) for f in found.faults] == [
        ("pick", "output 0 of TopK", "TopK topk"),
        ("topk", "the constant [3]", "constant k = [2]"),
    ]


def test_an_output_that_is_not_shared_must_stay_inside():
    graph = parse(TOP_K)
    closed = P("GatherElements", Any("scores"), P("TopK", Any("x"), C(2), axis=-1)[1], axis=1)
    found = match(closed, node_of(graph, "pick"), graph)
    assert isinstance(found, Mismatch)
    assert (found.node.name, found.got) == ("topk", "graph output ids")


def test_weights_by_rank():
    graph = parse("main (float[T,8] x) => (float[T,4] y) <float[4,8] w> { [g] y = Gemm<transB=1>(x, w) }")
    gemm = node_of(graph, "g")
    assert isinstance(match(P("Gemm", Any("x"), W("w", rank=2), transB=1), gemm, graph), Match)
    wrong = match(P("Gemm", Any("x"), W("w", rank=3), transB=1), gemm, graph)
    assert isinstance(wrong, Mismatch)
    assert (wrong.wanted, wrong.got) == ("a weight of 3 dimensions (w)", "weight w float32 [4, 8]")


def test_defaults_of_attributes():
    graph = parse("main (float[4,8] x) => (float[4,8] y) <float[8] w> { [n] y = RMSNormalization(x, w) }")
    assert attribute(node_of(graph, "n"), "axis") == -1
    assert isinstance(match(P("RMSNormalization", Any("x"), W("w"), axis=-1), node_of(graph, "n"), graph), Match)


def test_either_reports_the_nearest():
    graph = parse(
        "main (float[T] x) => (float[T] y) <float[T] s, float[T] r> { [s] s = Sigmoid(x) [r] r = Relu(s) [n] y = Neg(r) }"
    )
    x = Any("x")
    option = Either(x, P("Relu", x))  # the first fits anything
    found = match(P("Neg", option), node_of(graph, "n"), graph)
    assert isinstance(found, Match)
    assert found["x"].name == "r"
    near = Either(P("Exp", x), P("Relu", P("Exp", x)))
    wrong = match(P("Neg", near), node_of(graph, "n"), graph)
    assert isinstance(wrong, Mismatch)
    assert (wrong.node.name, wrong.wanted, wrong.got) == ("r", "Exp", "Sigmoid s")


def test_several_roots_share_bindings_and_nodes():
    text = """
        main (float[T,8] x) => (float[T,4] a, float[T,2] b)
        <float[6,8] w, int64[2] parts = {4,2}, float[T,6] z, float[T,4] l, float[T,2] r>
        { [g] z = Gemm<transB=1>(x, w) [s] l, r = Split<axis=1>(z, parts) [a] a = Relu(l) [b] b = Neg(r) }
    """
    graph = parse(text)
    split = P("Split", P("Gemm", Any("x"), W("w"), transB=1), C([4, 2]), axis=1)
    left, right = P("Relu", split[0]), P("Neg", split[1])
    alone = match(left, node_of(graph, "a"), graph)
    assert isinstance(alone, Mismatch)
    assert (alone.node.name, alone.got) == ("s", "Neg b")
    first = match(left, node_of(graph, "a"), graph, closed=False)
    assert isinstance(first, Match)
    both = match(right, node_of(graph, "b"), graph, given=first)
    assert isinstance(both, Match)
    assert {n.name for n in both.nodes} == {"g", "s", "a", "b"}
    assert [n.name for n in both.roots] == ["a", "b"]


# -- random patterns: trees of these ops over distinct tensors
UNARY, BINARY = ("Relu", "Neg", "Exp"), ("Add", "Mul", "Sub")
LEAF = st.just(None)
TREES = st.recursive(
    LEAF,
    lambda inner: st.one_of(st.tuples(st.sampled_from(UNARY), inner), st.tuples(st.sampled_from(BINARY), inner, inner)),
    max_leaves=8,
).filter(lambda tree: tree is not None and any(item is not None for item in tree[1:]))


def pattern_of(tree, names) -> Pattern:
    if tree is None:
        return Any(next(names))
    return P(tree[0], *(pattern_of(item, names) for item in tree[1:]))


def graph_of(tree) -> Graph:
    """One node per tree node, named n0, n1, ... from the leaves on; the root is last."""
    graph = Graph("main", info_of("", TINY_R1, ""))
    type_ = Type("float32", ("T", 4))
    leaves, nodes = itertools.count(), itertools.count()

    def build(item):
        if item is None:
            return graph.add_input(f"x{next(leaves)}", type_.dtype, type_.shape)
        inputs = [build(part) for part in item[1:]]
        name = f"n{next(nodes)}"
        out = variable(f"{name}.out", type_)
        graph.add(item[0], inputs, [out], name)
        return out

    graph.add_output(build(tree))
    return graph


def setup(tree) -> tuple[P, Graph]:
    pattern = pattern_of(tree, (f"x{i}" for i in itertools.count()))
    assert isinstance(pattern, P)
    return pattern, graph_of(tree)


@given(TREES)
def test_a_pattern_matches_its_own_graph(tree):
    pattern, graph = setup(tree)
    found = match(pattern, graph.nodes[-1], graph)
    assert isinstance(found, Match)
    assert {name: tensor.name for name, tensor in found.tensors.items()} == {t.name: t.name for t in graph.gs.inputs}
    assert {n.name for n in found.nodes} == {n.name for n in graph.nodes}


@given(TREES, st.data())
def test_an_extra_cast_is_named(tree, data):
    pattern, graph = setup(tree)
    edges = [(node, i) for node in graph.nodes for i, tensor in enumerate(node.inputs) if tensor.inputs]
    node, index = data.draw(st.sampled_from(edges))
    half = variable("half", Type("bfloat16", ("T", 4)))
    root = graph.nodes[-1]
    graph.add("Cast", [node.inputs[index]], [half], "n99", to=16)
    node.inputs[index] = half
    found = match(pattern, root, graph)
    assert isinstance(found, Mismatch)
    assert found.near
    assert (found.node.name, found.got) == (node.name, "Cast n99 -> bfloat16")


@given(TREES, st.data())
def test_a_second_reader_is_named(tree, data):
    pattern, graph = setup(tree)
    node = data.draw(st.sampled_from([n for n in graph.nodes if n.outputs[0].outputs]))
    root, out = graph.nodes[-1], variable("other", Type("float32", ("T", 4)))
    graph.add("Tanh", [node.outputs[0]], [out], "reader")
    found = match(pattern, root, graph)
    assert isinstance(found, Mismatch)
    assert found.near
    assert (found.node.name, found.got) == (node.name, "Tanh reader")


@given(TREES, st.data())
def test_swapped_operands_are_told(tree, data):
    pattern, graph = setup(tree)
    pairs = [node for node in graph.nodes if len(node.inputs) == 2]
    if not pairs:
        return
    node = data.draw(st.sampled_from(pairs))
    one, other = list(node.inputs)
    node.inputs[0], node.inputs[1] = other, one
    found = match(pattern, graph.nodes[-1], graph)
    if shape_of(one) == shape_of(other):
        assert isinstance(found, Match)  # only the names of equal parts changed places
    else:
        assert isinstance(found, Mismatch)
        assert found.near
        assert f"the operands of {node.op} are swapped" in [fault.reason for fault in found.faults]


def shape_of(tensor):
    """A tensor's tree of ops."""
    return (tensor.inputs[0].op, *map(shape_of, tensor.inputs[0].inputs)) if tensor.inputs else None
