"""Graphs to text and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.families import make_checkpoint
from support.graphs import import_all

from dsc.compiler.ir.graph import Graph, constant, expression_of, is_weight, type_of, variable, weight, weight_class_of
from dsc.compiler.ir.text import class_of_name, from_text, header, read_header, to_text
from dsc.compiler.ir.verify import verify
from dsc.compiler.ir.weight import Cast, Source
from dsc.compiler.opt import TINY_R1, info_of
from dsc.plugins.schema import Type
from dsc.runtime.errors import DscError

INFO = info_of("", TINY_R1, "decode")
TEXT = """\
"main.decode" (float[T,256] x) => (float[T,8] y)
   <int64[2] shape =  {-1,8},
    float "number.1e-20" =  {1e-20},
    float[T,8] z,
    float[T,8] u,
    float[8,256] "model.layers.0.self_attn.o_proj.weight">
{
   ["layers.0.g"] z = Gemm <alpha: float = 0.13523377, transB: int = 1> (x, "model.layers.0.self_attn.o_proj.weight")
   [r] u = Reshape (z, shape)
   [a] y = Add (u, "number.1e-20")
}
"""


def test_text_is_stable():
    assert to_text(from_text(TEXT, INFO)) == TEXT


def test_a_declaration_without_values_is_a_weight():
    graph = from_text(TEXT, INFO)
    (tensor,) = graph.weights().values()
    assert expression_of(tensor) == Source(tensor.name, "float32", (8, 256))
    assert weight_class_of(tensor) == "attention"
    assert graph.nodes[0].attrs["alpha"] == 0.13523377


def test_an_expression_is_told_by_its_type_only():
    graph = Graph("main", INFO)
    x, y = graph.add_input("x", "bfloat16", ("T", 4)), variable("y", Type("bfloat16", ("T", 4)))
    w = weight("w", Cast(Source("w", "float32", (4, 4)), "bfloat16"))
    graph.add("MatMul", [x, w], [y], "m")
    graph.add_output(y)
    again = from_text(to_text(graph), INFO)
    assert [str(type_of(t)) for t in again.nodes[0].inputs] == ["bfloat16 [T, 4]", "bfloat16 [4, 4]"]


def test_syntax_errors_and_undeclared_tensors_are_told():
    with pytest.raises(DscError, match="this is not a graph"):
        from_text("main (float[T] x", INFO)
    with pytest.raises(DscError) as error:
        from_text("main (float[T] x) => (float[T] y) { [a] y = Add(x, w) }", INFO)
    assert error.value.text() == (
        "a: w is neither an input, nor a result, nor a weight\n"
        '  wanted  a declaration such as <float[8,4] "w">\n'
        "  got     dtype None, shape None"
    )


def test_header_round_trip_and_its_errors():
    given = replace(INFO, model="mtp", layers=(4,), done=("insert_embedding", "fuse_qkv"))
    given = replace(given, formats={"experts": "wint4", "attention": "fp8"})
    assert read_header(header(given) + TEXT, INFO) == given
    assert read_header(TEXT, INFO) == INFO
    with pytest.raises(DscError, match="unknown fact layer\n") as error:
        read_header("# layer: 0\n" + TEXT, INFO)
    assert error.value.try_ == "layers"
    with pytest.raises(DscError, match="layers cannot be 'two'"):
        read_header("# layers: two\n" + TEXT, INFO)


def test_classes_are_the_importer_s(tmp_path):
    for graph in import_all(make_checkpoint(tmp_path / "v3", "v3", num_hidden_layers=2)):
        for name, tensor in graph.weights().items():
            assert class_of_name(name) == weight_class_of(tensor), name


@pytest.mark.parametrize(
    ("name", "weight_class"),
    [
        ("model.layers.1.mlp.experts.gate_proj.weight", "experts"),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", "shared_experts"),
        ("model.layers.0.mlp.down_proj.weight", "dense_mlp"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "attention"),
        ("model.layers.0.self_attn.kv_b_proj.weight", "kv_b"),
        ("model.layers.4.eh_proj.weight", "eh_proj"),
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "lm_head"),
        ("model.layers.1.mlp.gate.weight", "exact"),
        ("model.layers.0.self_attn.q_a_layernorm.weight", "exact"),
        ("rope.cos", "exact"),
    ],
)
def test_class_of_name(name, weight_class):
    assert class_of_name(name) == weight_class


NAMES = st.text("abcXYZ019._/-:,", min_size=1, max_size=12)
FLOATS = st.floats(width=32, allow_nan=False)


@given(
    st.lists(
        st.tuples(st.sampled_from(["Relu", "Add", "Scale", "Project", "Reshape"]), FLOATS), min_size=1, max_size=8
    ),
    st.data(),
)
def test_round_trip(steps, data):
    names = iter(data.draw(st.lists(NAMES, min_size=3 * len(steps) + 1, max_size=3 * len(steps) + 1, unique=True)))
    graph = Graph("main", INFO)
    type_ = Type("float32", ("T", 4))
    x = graph.add_input(next(names), type_.dtype, type_.shape)
    for op, number in steps:
        y = variable(next(names), type_)
        tensor, node = next(names), next(names)
        if op == "Relu":
            graph.add("Relu", [x], [y], node)
        elif op == "Add":
            graph.add("Add", [x, constant(tensor, number, "float32")], [y], node)
        elif op == "Scale":
            graph.add("LeakyRelu", [x], [y], node, alpha=number)
        elif op == "Project":
            graph.add("Gemm", [x, weight(tensor, Source(tensor, "float32", (4, 4)))], [y], node, transB=1, beta=number)
        else:
            graph.add("Reshape", [x, constant(tensor, [-1, 4], "int64")], [y], node)
        x = y
    graph.add_output(x)
    verify(graph)
    text = to_text(graph)
    again = from_text(text, INFO)
    verify(again)
    assert to_text(again) == text
    for one, other in zip(graph.nodes, again.nodes, strict=True):
        assert (one.name, one.op, [t.name for t in one.inputs]) == (
            other.name,
            other.op,
            [t.name for t in other.inputs],
        )
        assert {k: np.float32(v) for k, v in one.attrs.items()} == {k: np.float32(v) for k, v in other.attrs.items()}
        for a, b in zip(one.inputs[1:], other.inputs[1:], strict=True):
            assert type_of(a) == type_of(b)
            if not is_weight(a):
                assert np.array_equal(a.values, b.values)
