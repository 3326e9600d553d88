"""Programs survive JSON, and a damaged one is refused with every fault's place in the file."""

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsc.runtime import codec
from dsc.runtime.errors import DscError
from dsc.runtime.program import Operand, Program, ProgramNode
from dsc.runtime.steps import (
    Collective,
    Copy,
    Fill,
    Gemm,
    Kernel,
    Matrix,
    Null,
    Pointer,
    Repeat,
    Scalar,
    TensorMap,
    Variant,
)

WHERE = "toy.engine/program/main.decode.rank0.json"


def steps():
    """One step of every kind, with every kind of argument."""
    x, y = Pointer("x"), Pointer("y", "T*4")
    tma = TensorMap("w", "float32", dims=(4, "T"), strides=(16,), box=(4, 64), swizzle=16)
    arguments = (y, Scalar("i32", "ceil_div(T,64)"), Scalar("f32", 0.135234), Scalar("i64", 3), Null(), tma)
    kernel = Kernel(
        "kernels/a.cubin", "sm90_toy", ("min(T, SMS*2)", 1, 1), (128, 1, 1), arguments, (2, 1, 1), 102400, True
    )
    pieces = Repeat("ceil_div(T,2)", (Copy(Pointer("x", "I*8"), y, 8), Repeat(2, (Fill(Pointer("y", "I+J"), 1),), "J")))
    gemm = Gemm(Matrix(x, "float32", 4), Matrix(Pointer("w"), "float32", 4, True), Matrix(y, "float32", 4), "T", 4, 4)
    codes = [Matrix(Pointer(name), "float8_e4m3fn", 512, name == "w") for name in ("x", "w")]
    scales = {"a_scales": Pointer("x"), "b_scales": Pointer("w")}
    scaled = Gemm(*codes, Matrix(y, "bfloat16", 16), "ceil_div(T,4)*4", 16, 512, **scales)
    gather = Collective("all_gather", "tensor", Pointer("far", rank=1), Pointer("far"), "float32", "T")
    return (kernel, pieces, gemm, gather, Fill(Pointer("clear"), "T*4", 255), scaled)


def program():
    operands = {
        "tokens": Operand("int32", ("T",), "input", 32),
        "cache.0": Operand("uint8", ("N", 64), "state", 256),
        "cache.0.out": Operand("uint8", ("N", 64), "state", 256, alias="cache.0"),
        "w": Operand("float32", (4, 4), "weight", 64, tensor="linear.weight"),
        "x": Operand("float32", ("T", 4), "activation", 128, offset=0),
        "y": Operand("float32", ("T", 4), "activation", 128, offset=256),
        "work": Operand("int32", ("T*2",), "scratch", 64, offset=128),
        "clear": Operand("int32", (8,), "zeroed", 32),
        "far": Operand("float32", ("T",), "peer", 32),
        "logits": Operand("float32", ("T", 4), "output", 128),
    }
    nodes = (
        ProgramNode("qkv", "Qkv", ("tokens", "w", "", "cache.0"), ("x", "cache.0.out"), {"epsilon": 1e-6, "heads": 4}),
        ProgramNode("linear", "Linear", ("x", "w"), ("y",), {"w_format": "fp32"}, (Variant(steps(), "T <= 64"), Variant(()))),
        ProgramNode("head", "LmHead", ("y",), ("logits",)),
    )  # fmt: skip
    letters, inputs, outputs = {"T": 8, "N": 4}, ("tokens", "cache.0"), ("logits", "cache.0.out")
    return Program("main.decode", "0" * 64, letters, inputs, outputs, operands, nodes, 384)


def test_json_there_and_back():
    one = program()
    text = codec.dump_json(one.to_json())
    two = Program.from_json(json.loads(text), WHERE)
    assert two == one
    assert codec.dump_json(two.to_json()) == text
    assert isinstance(two.nodes[0].attributes["epsilon"], float)
    assert isinstance(two.nodes[0].attributes["heads"], int)


def damage(path, value):
    """The program's JSON with one value set (or deleted: `...`), and the message reading it gives."""
    data = json.loads(codec.dump_json(program().to_json()))
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    with pytest.raises(DscError) as caught:
        Program.from_json(data, WHERE)
    assert WHERE in str(caught.value)
    return str(caught.value)


STEP = ("nodes", 1, "variants", 0, "steps", 0)
SCALED = ("nodes", 1, "variants", 0, "steps", 5)
GATHER = ("nodes", 1, "variants", 0, "steps", 3)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("name",), ..., "name is missing"),
        (("nodez",), 1, "nodez is unknown"),
        (("nodes",), {}, "nodes is of the wrong kind"),
        (("nodes", 0, "inputs", 0), "token", "nodes[0] (qkv) names no operand: 'token'"),
        (("nodes", 0, "inputs", 0), "y", "nodes[0] (qkv) reads y before it is written"),
        (("nodes", 2, "outputs", 0), "x", "nodes[2] (head) writes x, which is written already"),
        (("nodes", 2, "name"), "qkv", "nodes[2] (qkv): a node before has the same name"),
        (("nodes", 0, "attributes", "heads"), [1], "nodes[0].attributes['heads'] is of the wrong kind"),
        (("operands", "x", "bytes"), 127, "operands['x'].bytes does not follow from its shape"),
        (("operands", "x", "bytes"), True, "operands['x'].bytes is of the wrong kind"),
        (("operands", "x", "dtype"), "float", "operands['x'].dtype is unknown"),
        (("operands", "x", "role"), "temp", "operands['x'].role is of the wrong kind"),
        (("operands", "x", "offset"), 257, "operands['x'] leaves the arena"),
        (("operands", "x", "offset"), -1, "operands['x'] leaves the arena"),
        (("operands", "x", "offset"), ..., "operands['x'].offset does not fit role activation"),
        (("operands", "tokens", "offset"), 0, "operands['tokens'].offset does not fit role input"),
        (("operands", "x", "shape"), ["P", 4], "operands['x'].shape[0] reads a letter that has no bound"),
        (("operands", "x", "shape"), ["T*", 4], "operands['x'].shape[0]: 'T*' is no expression"),
        (("operands", "x", "shape"), ["T-9", 4], "operands['x'].shape[0] is negative"),
        (("operands", "x", "shape"), ["SMS", 4], "operands['x'].shape[0] reads a letter"),
        (("operands", "w", "tensor"), "", "operands['w'].tensor"),
        (("operands", "x", "cuts"), [{"axis": 0, "by": "tensor", "size": 4}], "operands['x'].cuts: a weight has parts"),
        (
            ("operands", "w", "cuts"),
            [{"axis": 0, "by": "heads", "size": 4}],
            "operands['w'].cuts[0].by is of the wrong kind",
        ),
        (("operands", "cache.0.out", "alias"), "cache.1", "is an alias of cache.1, which is no operand"),
        (("operands", "cache.0", "alias"), "cache.0.out", "is an alias of itself"),
        (("operands", "cache.0.out", "alias"), "x", "differ in bytes"),
        (("letters", "T"), -1, "letters['T'] is negative"),
        (("letters", "X"), 1, "letters['X'] is unknown"),
        (("inputs",), ["tokens"], "cache.0 is of role state"),
        (("outputs", 0), "x", "outputs holds an operand of another role"),
        (("outputs", 0), "logit", "outputs: logit is no operand"),
        ((*STEP, "kind"), "kernl", "nodes[1].variants[0].steps[0] is of the wrong kind"),
        ((*STEP, "cubin"), "kernels/../../x", "variants[0].steps[0].cubin is not a file of the engine"),
        ((*STEP, "cubin"), "/etc/passwd", "steps[0].cubin is not a file of the engine"),
        ((*STEP, "grid", 0), "P", "nodes[1] (linear).variants[0].steps[0].grid[0] reads a letter that has no bound"),
        ((*STEP, "grid", 0), "I", "grid[0] reads a letter that has no bound"),
        ((*STEP, "grid"), [1, 1], "grid is of the wrong kind"),
        ((*STEP, "arguments", 0, "operand"), "z", "arguments[0] names no operand: 'z'"),
        ((*STEP, "arguments", 0, "rank"), 1, "arguments[0] names a rank"),
        ((*SCALED, "a_scales"), None, "steps[5] has scales of one side only"),
        ((*SCALED, "b_scales"), ..., "steps[5] has scales of one side only"),
        ((*SCALED, "b_scales", "operand"), "z", "steps[5].b_scales names no operand: 'z'"),
        ((*SCALED, "a_scales", "offset"), "P", "steps[5].a_scales.offset reads a letter that has no bound"),
        ((*SCALED, "a", "dtype"), "bfloat16", "steps[5] has scales and other matrices than they are for"),
        ((*SCALED, "b", "transposed"), False, "steps[5] has scales and other matrices than they are for"),
        ((*SCALED, "k"), 640, "steps[5] has scales and no size for them"),
        ((*SCALED, "n"), "T", "steps[5] has scales and no size for them"),
        ((*SCALED, "alpha"), 2, "steps[5] has scales and is no plain product"),
        ((*GATHER, "dtype"), "float", "steps[3].dtype is unknown"),
        ((*GATHER, "count"), "P", "steps[3].count reads a letter that has no bound"),
        ((*GATHER, "count"), "T+1", "steps[3].source leaves far"),
        ((*GATHER, "count"), -1, "steps[3].source leaves far"),
        ((*GATHER, "destination", "offset"), 4, "steps[3].destination leaves far"),
        ((*GATHER, "source", "offset"), -4, "steps[3].source leaves far"),
        (("nodes", 1, "variants", 0, "guard"), "T <", "variants[0].guard: "),
        (("nodes", 1, "variants", 0, "guard"), "Q < 2", "variants[0].guard reads a letter that has no bound"),
        (("nodes", 1, "variants", 0, "steps", 1, "steps", 1, "letter"), "I", "letter counts a loop around it"),
    ],
)
def test_refuses(path, value, message):
    assert message in damage(path, value)


def test_a_gemm_of_an_engine_from_before_there_were_scales():
    data = json.loads(codec.dump_json(program().to_json()))
    gemm = data["nodes"][1]["variants"][0]["steps"][2]
    assert {gemm.pop("a_scales", None), gemm.pop("b_scales", None)} == {None}
    assert Program.from_json(data, WHERE) == program()


def test_all_faults_at_once():
    data = json.loads(codec.dump_json(program().to_json()))
    data["extra"], data["operands"]["x"]["bytes"] = 1, "128"
    del data["onnx_sha256"]
    with pytest.raises(DscError) as caught:
        Program.from_json(data, WHERE)
    text = str(caught.value)
    assert "3 faults" in text
    assert all(part in text for part in ("extra is unknown", "operands['x'].bytes", "onnx_sha256 is missing"))


JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2), max_leaves=4)  # fmt: skip


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_fuzzed_json_is_read_or_refused(data):
    tree = copy.deepcopy(json.loads(codec.dump_json(program().to_json())))
    at, key = tree, None
    while isinstance(at, dict | list) and at:
        parent, key = (
            at,
            data.draw(st.sampled_from(sorted(at)) if isinstance(at, dict) else st.integers(0, len(at) - 1)),
        )
        at = at[key]
        if data.draw(st.integers(0, 3)) == 0:
            break
    parent[key] = data.draw(JSON)
    told = WHERE
    try:
        Program.from_json(tree, WHERE)
    except DscError as error:
        told = str(error)
    assert WHERE in told


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100000, "{", "", '{"a": Infinity}', "\x00"])
def test_bad_json_names_the_file(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DscError, match=r"program/x\.json: is not valid JSON"):
        codec.read_json(tmp_path / "x.json", "program/x.json")


def test_json_in_another_encoding_names_the_file(tmp_path):
    (tmp_path / "x.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(DscError, match=r"x\.json: is not valid JSON"):
        codec.read_json(tmp_path / "x.json", "x.json")


def test_root_follows_aliases():
    assert program().root("cache.0.out") == "cache.0"
    assert program().root("x") == "x"
