import pytest
import torch
from support.breaks import assert_every_break_is_told, graph_before
from support.families import ABSENT, change_tensors, make_checkpoint
from support.graphs import assert_same, run_pass

from dsc.compiler.ir.graph import expression_of, operand
from dsc.compiler.ir.weight import Concat, Dequantize
from dsc.passes.fuse_qkv import FuseQkv
from dsc.runtime.errors import DscError

BEFORE = """
    # phase: decode
    # layers: 0
    main (float[T,256] x, int32[T] positions, int32[T] slots, uint8[N,73728] "cache.0")
      => (float[T,128] q, float[T,512] latent, float[1,1,T,64] key)
    <
      float[128,256] "model.layers.0.self_attn.q_a_proj.weight", float[128] q_norm,
      float[576,256] "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", float[512] kv_norm,
      float[2048,32] "rope.cos", float[2048,32] "rope.sin",
      int64[T] wide, int64[1,T] row, float[T,128] q_a, float[T,576] kv_a, float[T,512] c, float[T,64] k, float[1,1,T,64] head,
      int64[1] zero = {0}, int64[2] widths = {512,64}, int64[4] one_head = {1,1,-1,64}
    >
    {
      [wide] wide = Cast<to=7>(positions)
      [row] row = Unsqueeze(wide, zero)
      [q_a] q_a = Gemm<transB=1>(x, "model.layers.0.self_attn.q_a_proj.weight")
      [q_a_norm] q = RMSNormalization<axis=-1, epsilon=1e-6>(q_a, q_norm)
      [kv_a] kv_a = Gemm<transB=1>(x, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight")
      [split] c, k = Split<axis=1>(kv_a, widths)
      [kv_a_norm] latent = RMSNormalization<axis=-1, epsilon=1e-6>(c, kv_norm)
      [k_head] head = Reshape(k, one_head)
      [k_rope] key = RotaryEmbedding<interleaved=1>(head, "rope.cos", "rope.sin", row)
    }
"""
AFTER = """
    # phase: decode
    # layers: 0
    main (float[T,256] x, int32[T] positions, int32[T] slots, uint8[N,73728] "cache.0")
      => (float[T,128] q, float[T,512] latent, float[1,1,T,64] key, uint8[N,73728] "cache.0.out")
    <
      float[704,256] "model.layers.0.self_attn.qkv_proj.weight", float[128] q_norm, float[512] kv_norm,
      float[2048,32] "rope.cos", float[2048,32] "rope.sin", float[T,64] "layers.0.self_attn.qkv.k_rope",
      int64[4] "layers.0.self_attn.qkv.k_rope_shape" = {1,1,-1,64}
    >
    {
      ["layers.0.self_attn.qkv"] q, latent, "layers.0.self_attn.qkv.k_rope", "cache.0.out" = dsc.Qkv<
          q_width=128, q_lora=128, heads=4, nope=128, latent=512, rope=64, epsilon=1e-6, cache_dtype="bfloat16",
          block_tokens=64, block_bytes=73728, joint=1, w_format="fp32", w_kv_format="fp32"
        >(x, "model.layers.0.self_attn.qkv_proj.weight", "", "", "", q_norm, kv_norm, "rope.cos", "rope.sin", positions, slots,
          "cache.0")
      ["layers.0.self_attn.qkv.k_rope_view"] key = Reshape(
          "layers.0.self_attn.qkv.k_rope", "layers.0.self_attn.qkv.k_rope_shape")
    }
"""


def broken(*changes):
    text = BEFORE
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


EPSILONS = broken(("1e-6>(c,", "1e-5>(c,"))


def test_fires():
    graph, run = run_pass(BEFORE, "fuse_qkv")
    assert_same(graph, AFTER)
    assert (run.expected, run.found, run.report.declined) == (1, 1, [])


@pytest.mark.parametrize(
    ("text", "node", "reason", "wanted", "got"),
    [
        (
            EPSILONS,
            "q_a_norm",
            "the norms of q and of the latent have different epsilons",
            "one epsilon",
            "1e-06 and 1e-05",
        ),
        (
            broken(
                ("float[512] kv_norm", "float[576] kv_norm"),
                ("float[T,512] c,", "float[T,576] normed,"),
                ("[split] c, k = Split<axis=1>(kv_a, widths)\n", ""),
                (
                    "latent = RMSNormalization<axis=-1, epsilon=1e-6>(c, kv_norm)",
                    "normed = RMSNormalization<axis=-1, epsilon=1e-6>(kv_a, kv_norm)\n[split] latent, k = Split<axis=1>(normed, widths)",
                ),
            ),
            "split",
            "operand 0 of Split differs",
            "Gemm",
            "RMSNormalization kv_a_norm",
        ),
        (
            broken(
                (
                    'transB=1>(x, "model.layers.0.self_attn.q_a_proj',
                    'transB=1, alpha=0.5>(x, "model.layers.0.self_attn.q_a_proj',
                )
            ),
            "q_a",
            "attribute alpha of Gemm is not part of the pattern",
            "1.0",
            "0.5",
        ),
        (
            broken(
                ('(head, "rope.cos", "rope.sin", row)', '(head, "rope.sin", "rope.cos", row)'),
                ("<interleaved=1>", "<interleaved=0>"),
            ),
            "k_rope",
            "attribute interleaved of RotaryEmbedding differs",
            "1",
            "0",
        ),
        (
            broken(
                (
                    "[kv_a_norm] latent = RMSNormalization<axis=-1, epsilon=1e-6>(c, kv_norm)",
                    "[kv_a_norm] latent = Neg(c)",
                ),
                ("float[512] kv_norm,", ""),
            ),
            "split",
            "the latent is not read by its norm",
            "RMSNormalization",
            "Neg kv_a_norm",
        ),
        (
            broken(
                ("[q_a] q_a = Gemm<transB=1>(x,", "[other] y = Neg(x)\n[q_a] q_a = Gemm<transB=1>(y,"),
                ("int64[T] wide,", "int64[T] wide, float[T,256] y,"),
            ),
            "kv_a_norm",
            "nothing else of the site reads x",
            "RMSNormalization<axis=-1>(Gemm<transB=1>(x, q), q_norm)",
            "Neg other, Gemm kv_a",
        ),
    ],
)
def test_declines(text, node, reason, wanted, got):
    graph, run = run_pass(text, "fuse_qkv", allow=1)
    (site,) = run.report.declined
    assert (site.node, site.reason) == (node, reason)
    assert (site.wanted, site.got) == (wanted, got)
    assert not graph.find("dsc.Qkv")


def test_queries_without_lora_in_bf16_are_joint(tmp_path):
    graph = graph_before("fuse_qkv", make_checkpoint(tmp_path, "v2-lite"))
    report = FuseQkv().run(graph)
    assert [changed.note for changed in report.changed] == [""] * 3
    node = graph.find("dsc.Qkv")[1]
    assert (node.attrs["joint"], node.attrs["q_lora"], node.attrs["q_width"]) == (1, 0, 4 * 192)
    assert operand(node, "q_norm") is None
    assert operand(node, "w").shape == (4 * 192 + 576, 256)


def test_fp8_blocks_concatenate(tmp_path):
    graph = graph_before("fuse_qkv", make_checkpoint(tmp_path, "v3"))
    FuseQkv().run(graph)
    joint = expression_of(operand(graph.find("dsc.Qkv")[0], "w"))
    assert isinstance(joint, Concat)
    assert all(isinstance(part, Dequantize) for part in joint.parts)
    assert [next(part.sources()).name.split(".")[-2] for part in joint.parts] == ["q_a_proj", "kv_a_proj_with_mqa"]


def test_parts_of_different_schemes_stay_apart(tmp_path):
    def unquantize(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.self_attn.q_a_proj.weight"
        tensors[name] = tensors[name].bfloat16()
        del tensors[f"{name}_scale_inv"]

    folder = make_checkpoint(tmp_path, "v3")
    change_tensors(folder, unquantize)
    graph = graph_before("fuse_qkv", folder)
    report = FuseQkv().run(graph)
    notes = [changed.note for changed in report.changed]
    assert notes == ["two weights: q is stored as bfloat16 and kv_a as float8_e4m3fn in blocks of 128 x 128", "", ""]
    first, second, _ = graph.find("dsc.Qkv")
    assert (first.attrs["joint"], second.attrs["joint"]) == (0, 1)
    assert graph.info.apart == 1
    assert operand(first, "w").name == "model.layers.0.self_attn.q_a_proj.weight"
    assert operand(first, "w_kv").name == "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


def test_rows_that_do_not_fill_a_block_stay_apart(tmp_path):
    graph = graph_before("fuse_qkv", make_checkpoint(tmp_path, "faults"))
    report = FuseQkv().run(graph)
    assert {changed.note for changed in report.changed} == {
        "two weights: q has 96 rows, which do not fill blocks of 128"
    }
    folder = make_checkpoint(tmp_path / "bf16", "faults", quantization_config=ABSENT)
    assert {changed.note for changed in FuseQkv().run(graph_before("fuse_qkv", folder)).changed} == {""}


@pytest.mark.parametrize("family", ["v3", "v2-lite"])
def test_every_break_is_told(family, tmp_path):
    graph = graph_before("fuse_qkv", make_checkpoint(tmp_path, family))
    assert_every_break_is_told(graph, FuseQkv(), "layers.1.")


def test_fails():
    with pytest.raises(DscError) as error:
        run_pass(EPSILONS, "fuse_qkv")
    assert error.value.text() == (
        "main: fuse_qkv found 0 of 1 sites\n"
        "  at      q_a_norm: the norms of q and of the latent have different epsilons\n"
        "  wanted  one epsilon\n"
        "  got     1e-06 and 1e-05\n"
        "  try     mend the graph; or, in the recipe, allow: {fuse_qkv: {count: 1, reason: ...}}"
    )
