"""Every kind of broken graph is told, with the graph, the node and the pass."""

from __future__ import annotations

import onnx_graphsurgeon as gs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.compiler.ir.graph import Graph, constant, variable, weight
from dsc.compiler.ir.text import from_text
from dsc.compiler.ir.verify import VerifyError, verify
from dsc.compiler.ir.weight import Source
from dsc.compiler.opt import TINY_R1, info_of
from dsc.plugins.schema import Type

INFO = info_of("", TINY_R1, "decode")
ROWS = Type("float32", ("T", 8))
TEXT = """
main (float[T,16] x) => (float[T,8] y)
<float[8,16] w, float[8,8] v, float[T,8] z, float[T,8] u, int64[2] shape = {-1,8}>
{
  [g] z = Gemm<transB=1>(x, w)
  [r] u = Reshape(z, shape)
  [lin] y = dsc.Linear<w_format="fp32">(u, v)
}
"""


def parse(*changes: tuple[str, str]) -> Graph:
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return from_text(text, INFO)


def faults(graph: Graph, after: str = "a_pass") -> list[tuple[str, str]]:
    with pytest.raises(VerifyError) as error:
        verify(graph, after)
    return [(fault.node, fault.text) for fault in error.value.faults]


def test_a_sound_graph_passes():
    verify(parse())


def test_the_message_names_graph_and_pass():
    with pytest.raises(VerifyError) as error:
        verify(parse(("[r]", "[g]")), "fuse_qkv")
    assert str(error.value) == "graph main is broken after fuse_qkv\n  g: two nodes have this name"


@pytest.mark.parametrize(
    ("old", "new", "node", "text"),
    [
        ("[T,8] y)", "[T,9] y)", "lin", "y is recorded as float32 [T, 9], its op makes float32 [T, 8]"),
        ('w_format="fp32"', 'w_format="fp32", g=1', "lin", "dsc.Linear: unknown attribute g, known: w_format"),
        ('<w_format="fp32">', "", "lin", "dsc.Linear: attribute w_format is missing"),
        ("float[8,8] v", "float[8,9] v", "lin", "dsc.Linear: I is 8 before and 9 in w"),
        ("(u, v)", '(u, "")', "lin", "dsc.Linear: input w is missing"),
        ("dsc.Linear", "dsc.Liner", "lin", "dsc.Liner: no plugin folder liner, nearest: linear"),
        ("[r]", "", "", "a node Reshape has no name"),
        (", float[T,8] u", "", "r", "u has no type"),
    ],
)
def test_schema_types_and_names(old, new, node, text):
    assert faults(parse((old, new))) == [(node, text)]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("shape = {-1,8}", "shape = {-1,7}", "node name: r"),
        ("float[8,16] w", "float[8,17] w", "node name: g"),
        ("[T,8] z,", "[T,9] z,", "node name: g"),
        ("transB=1", "transB=1, gamma=2", "Unrecognized attribute: gamma"),
        ("Reshape", "Rephase", "No Op registered for Rephase"),
    ],
)
def test_standard_ops_go_through_onnx(old, new, told):
    ((_, text),) = faults(parse((old, new)))
    assert told in text


def test_onnx_sees_types_behind_plugin_ops():
    graph = parse()
    out = variable("out", Type("float32", ("T", 9)))
    graph.add("Relu", [graph.gs.outputs[0]], [out], "relu")
    graph.gs.outputs = [out]
    ((_, text),) = faults(graph)
    assert "node name: relu" in text


def test_two_tensors_of_one_name():
    graph = parse()
    graph.nodes[1].outputs[0].name = "z"
    assert faults(graph) == [("r", "two tensors are named z: float32 [T, 8] and float32 [T, 8]"), *faults(graph)[1:]]


def test_one_weight_name_is_one_expression():
    graph = parse()
    graph.nodes[2].inputs[1] = weight("w", Source("v", "float32", (8, 8)))
    assert faults(graph)[0] == ("lin", "two tensors are named w: float32 [8, 16] and float32 [8, 8]")
    graph.nodes[2].inputs[1] = weight("v", Source("v", "float32", (8, 8)))
    verify(graph)


def test_two_constants_of_one_name_and_value_are_one():
    graph = parse(("[lin]", "[s] s = Reshape(u, shape)\n  [lin]"), ("float[T,8] u", "float[T,8] u, float[T,8] s"))
    graph.gs.outputs.append(graph.nodes[2].outputs[0])
    graph.nodes[2].inputs[1] = constant("shape", [-1, 8], "int64")
    verify(graph)
    graph.nodes[2].inputs[1] = constant("shape", [8, -1], "int64")
    assert faults(graph)[0][1].startswith("two tensors are named shape")


def test_order_and_missing_producers():
    graph = parse()
    graph.gs.nodes.reverse()
    assert faults(graph) == [("lin", "reads u, which r makes later"), ("r", "reads z, which g makes later")]
    graph = parse()
    graph.nodes[1].outputs.clear()
    assert faults(graph) == [("lin", "reads u, which nothing makes")]
    graph = parse()
    graph.gs.outputs.append(variable("lost", ROWS))
    assert faults(graph) == [("", "nothing makes the graph's output lost")]


def test_inputs_are_made_by_nobody():
    graph = parse()
    graph.add("Relu", [graph.nodes[0].outputs[0]], [graph.gs.inputs[0]], "relu")
    assert ("relu", "makes the graph's input x") in faults(graph)


# -- aliases: a layer's cache through dsc.Qkv
QKV = """
main (float[T,8] x, int32[T] positions, int32[T] slots, uint8[N,96] cache)
  => (float[T,12] q, float[T,4] latent, float[T,2] k_rope, uint8[N,96] out)
<float[18,8] w, float[4] norm, float[32,1] cos, float[32,1] sin>
{
  [qkv] q, latent, k_rope, out = dsc.Qkv<w_format="fp32", w_kv_format="fp32", q_width=12, q_lora=0, heads=2, nope=4,
      latent=4, rope=2, epsilon=1e-6, cache_dtype="float32", block_tokens=4, block_bytes=96, joint=1>
      (x, w, "", "", "", "", norm, cos, sin, positions, slots, cache)
}
"""


def test_an_alias_of_a_graph_input_passes():
    verify(from_text(QKV, INFO))


def test_a_second_reader_of_overwritten_memory():
    graph = from_text(QKV, INFO)
    out = variable("peek", Type("uint8", ("N", 96)))
    graph.add("Identity", [graph.input("cache")], [out], "peek")
    graph.add_output(out)
    assert faults(graph) == [("qkv", "overwrites cache, which peek also reads")]


def test_an_alias_of_an_intermediate():
    graph = from_text(QKV, INFO)
    copy = variable("copy", Type("uint8", ("N", 96)))
    node = graph.nodes[0]
    node.inputs[-1] = copy
    graph.gs.nodes.insert(0, gs.Node("Identity", "copy", inputs=[graph.input("cache")], outputs=[copy]))
    assert faults(graph) == [("qkv", "out is the memory of copy, which is no input's")]


# -- tidy
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=30), st.randoms())
def test_tidy_keeps_what_outputs_need_in_a_sound_order(reads, random):
    graph = Graph("main", INFO)
    made = [graph.add_input("x", "float32", (4,))]
    for number, (left, right) in enumerate(reads):
        out = variable(f"t{number}", Type("float32", (4,)))
        graph.add("Add", [made[left % len(made)], made[right % len(made)]], [out], f"n{number}")
        made.append(out)
    graph.add_output(made[-1])
    needed = needed_by(made[-1])
    random.shuffle(graph.gs.nodes)
    graph.tidy()
    verify(graph)
    assert {node.name for node in graph.nodes} == needed
    names = [node.name for node in graph.nodes]
    graph.tidy()
    assert [node.name for node in graph.nodes] == names


def needed_by(tensor) -> set[str]:
    return {tensor.inputs[0].name}.union(*map(needed_by, tensor.inputs[0].inputs)) if tensor.inputs else set()


def test_tidy_goes_deeper_than_python_recurses():
    graph = Graph("main", INFO)
    x = graph.add_input("x", "float32", (4,))
    for number in range(3000):
        out = variable(f"t{number}", Type("float32", (4,)))
        graph.add("Relu", [x], [out], f"n{number}")
        x = out
    graph.add_output(x)
    graph.gs.nodes.reverse()
    graph.tidy()
    assert [node.name for node in graph.nodes] == [f"n{number}" for number in range(3000)]


NORM = """
main (float[T,192] x) => (float[T,192] y)
<float[192] w, float8e4m3fn[T,192] codes, float[2,T] scales>
{
  [norm] y, codes, scales = dsc.RmsNorm<epsilon=1e-6, quantize="fp8">(x, w)
}
"""


def test_outputs_that_an_attribute_brings():
    verify(from_text(NORM, INFO))
    for old, new, text in (
        ('quantize="fp8"', "quantize=1", "dsc.RmsNorm: attribute quantize is 1, wanted fp8 or fp8:ue8m0"),
        ('"fp8"', '"wint8"', "dsc.RmsNorm: attribute quantize is 'wint8', wanted fp8 or fp8:ue8m0"),
        (', quantize="fp8"', "", "dsc.RmsNorm has 1 outputs, the node 3"),
        ("y, codes, scales =", "y =", "dsc.RmsNorm has 3 outputs, the node 1"),
        ("float[2,T]", "float[T,2]", "scales is recorded as float32 [T, 2], its op makes float32 [2, T]"),
        ("quantize", "quantise", "dsc.RmsNorm: unknown attribute quantise, known: epsilon, quantize"),
    ):
        assert old in NORM
        assert faults(from_text(NORM.replace(old, new), INFO)) == [("norm", text)]
