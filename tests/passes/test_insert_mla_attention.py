import pytest
from support.breaks import assert_every_break_is_told, graph_before
from support.families import make_checkpoint
from support.graphs import assert_same, run_pass

from dsc.passes.insert_mla_attention import InsertMlaAttention
from dsc.runtime.errors import DscError

INPUTS = """(float[T,256] x, float[T,768] q, int32[T] positions, int32[T] slots, int32[B1] query_starts,
      int32[B] sequence_lengths, int32[B,P] block_table, uint8[N,73728] "cache.0")
      => (float[T,512] o, uint8[N,73728] "cache.0.out")"""
FRONT = """float[704,256] "qkv_proj.weight", float[128] q_norm, float[512] kv_norm, float[1024,512] "kv_b_proj.weight",
      float[2048,32] "rope.cos", float[2048,32] "rope.sin",
      float[T,128] q_latent, float[T,512] latent, float[T,64] k_rope"""
QKV = """["layers.0.self_attn.qkv"] q_latent, latent, k_rope, "cache.0.out" = dsc.Qkv<
          q_width=128, q_lora=128, heads=4, nope=128, latent=512, rope=64, epsilon=1e-6, cache_dtype="bfloat16",
          block_tokens=64, block_bytes=73728, joint=1, w_format="fp32", w_kv_format="fp32"
        >(x, "qkv_proj.weight", "", "", "", q_norm, kv_norm, "rope.cos", "rope.sin", positions, slots, "cache.0")"""
BEFORE = f"""
    # phase: decode
    # layers: 0
    main {INPUTS}
    <
      {FRONT},
      float[1,T,4,192] q_view, float[1,4,T,192] q_heads, float[1,4,T,128] q_nope, float[1,4,T,64] q_pe, float[1,4,T,64] q_rope,
      float[1,4,T,192] query, float[T,1024] kv, float[1,T,4,256] kv_view, float[1,4,T,256] kv_heads, float[1,4,T,128] k_nope,
      float[1,4,T,128] value, float[1,1,T,64] k_head, float[1,4,T,64] k_shared, float[1,4,T,192] key, float[1,4,T,128] heads,
      float[1,T,4,128] rows, int64[T] wide, int64[1,T] row, int64[1] zero = {{0}}, int64[4] to_q = {{1,-1,4,192}},
      int64[2] q_widths = {{128,64}}, int64[4] to_kv = {{1,-1,4,256}}, int64[2] kv_widths = {{128,128}},
      int64[4] to_head = {{1,1,-1,64}}, int64[4] to_all = {{1,4,1,1}}, int64[2] to_rows = {{-1,512}}
    >
    {{
      {QKV}
      [wide] wide = Cast<to=7>(positions)
      [row] row = Unsqueeze(wide, zero)
      [q_view] q_view = Reshape(q, to_q)
      [q_heads] q_heads = Transpose<perm=[0, 2, 1, 3]>(q_view)
      [q_split] q_nope, q_pe = Split<axis=3>(q_heads, q_widths)
      [q_rope] q_rope = RotaryEmbedding<interleaved=1>(q_pe, "rope.cos", "rope.sin", row)
      [query] query = Concat<axis=3>(q_nope, q_rope)
      [kv_b] kv = Gemm<transB=1>(latent, "kv_b_proj.weight")
      [kv_view] kv_view = Reshape(kv, to_kv)
      [kv_heads] kv_heads = Transpose<perm=[0, 2, 1, 3]>(kv_view)
      [kv_split] k_nope, value = Split<axis=3>(kv_heads, kv_widths)
      [k_view] k_head = Reshape(k_rope, to_head)
      [k_shared] k_shared = Expand(k_head, to_all)
      [key] key = Concat<axis=3>(k_nope, k_shared)
      [attention] heads = Attention<is_causal=1, scale=0.09356517>(query, key, value)
      [rows] rows = Transpose<perm=[0, 2, 1, 3]>(heads)
      [flat] o = Reshape(rows, to_rows)
    }}
"""
AFTER = f"""
    # phase: decode
    # layers: 0
    main {INPUTS}
    <{FRONT}>
    {{
      {QKV}
      [attention] o = dsc.MlaAttention<
          heads=4, nope=128, rope=64, v=128, latent_dim=512, scale=0.09356517, mode="absorbed", cache_dtype="bfloat16",
          block_tokens=64, block_bytes=73728, kv_b_format="fp32"
        >(q, "kv_b_proj.weight", "", "rope.cos", "rope.sin", positions, query_starts, sequence_lengths, block_table,
          "cache.0.out", latent, k_rope)
    }}
"""


def broken(*changes):
    text = BEFORE
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


WITHOUT_MSCALE = broken(("scale=0.09356517", "scale=0.0721688"))  # 192^-0.5


def test_fires():
    graph, run = run_pass(BEFORE, "insert_mla_attention")
    assert_same(graph, AFTER)
    assert (run.expected, run.found, run.report.declined) == (1, 1, [])
    assert run.report.changed[0].note == "absorbed"


@pytest.mark.parametrize(
    ("phase", "options", "mode"),
    [
        ("prefill", {}, "expanded"),
        ("decode", {}, "absorbed"),
        ("prefill", {"prefill": "absorbed"}, "absorbed"),
        ("decode", {"decode": "expanded"}, "expanded"),
    ],
)
def test_mode_follows_the_phase(phase, options, mode, tmp_path):
    graph = graph_before("insert_mla_attention", make_checkpoint(tmp_path, "v3"), phase=phase)
    InsertMlaAttention(**options).run(graph)
    assert [node.attrs["mode"] for node in graph.find("dsc.MlaAttention")] == [mode] * 3


@pytest.mark.parametrize(
    ("text", "node", "reason", "wanted", "got"),
    [
        (WITHOUT_MSCALE, "attention", "the softmax scale is not the model's", "0.0935652", "0.0721688"),
        (broken(("is_causal=1, ", "")), "attention", "attribute is_causal of Attention differs", "1", "0"),
        (
            broken(("(query, key, value)", "(key, query, value)")),
            "attention",
            "operands 0 and 1 of Attention are swapped",
            "Attention(Concat<axis=3>(...), Concat<axis=3>(...), Split<axis=3>(...)[1])",
            "Attention(Concat key, Concat query, Split kv_split)",
        ),
        (
            broken(("Gemm<transB=1>(latent,", "Gemm<transB=1>(other,"), ("(float[T,256] x,", "(float[T,256] x, float[T,512] other,")),
            "attention",
            "the latent is not a dsc.Qkv's",
            "fuse_qkv to run before",
            "input other float32 [T, 512]",
        ),
        (
            broken(("Reshape(k_rope,", "Reshape(other,"), ("(float[T,256] x,", "(float[T,256] x, float[T,64] other,")),
            "k_view",
            "the key's rotated part is not the latent's",
            "k_rope of dsc.Qkv layers.0.self_attn.qkv",
            "input other float32 [T, 64]",
        ),
        (
            broken(("Cast<to=7>(positions)", "Cast<to=7>(slots)")),
            "attention",
            "queries and keys rotate by different positions",
            "input positions int32 [T]",
            "input slots int32 [T]",
        ),
        (
            broken(('(q_pe, "rope.cos", "rope.sin", row)', '(q_pe, "rope.sin", "rope.cos", row)')),
            "attention",
            "queries and keys rotate by different cos",
            "weight rope.cos float32 [2048, 32]",
            "weight rope.sin float32 [2048, 32]",
        ),
        (
            broken(("[flat] o = Reshape(rows, to_rows)", "[flat] o = Squeeze(rows, zero)"), ("=> (float[T,512] o,", "=> (float[T,4,128] o,"), (", int64[2] to_rows = {-1,512}", "")),
            "attention",
            "nobody flattens the heads",
            "Reshape",
            "Transpose rows",
        ),
    ],
)  # fmt: skip
def test_declines(text, node, reason, wanted, got):
    graph, run = run_pass(text, "insert_mla_attention", allow=1)
    (site,) = run.report.declined
    assert (site.node, site.reason, site.wanted, site.got) == (node, reason, wanted, got)
    assert not graph.find("dsc.MlaAttention")


@pytest.mark.parametrize("family", ["v3", "v2-lite"])
def test_every_break_is_told(family, tmp_path):
    graph = graph_before("insert_mla_attention", make_checkpoint(tmp_path, family))
    assert_every_break_is_told(graph, InsertMlaAttention(), "layers.1.")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"prefill": "sage"},
            "insert_mla_attention: prefill: sage is not built yet\n  wanted  expanded or absorbed\n  got     sage",
        ),
        (
            {"decode": "dense"},
            "insert_mla_attention: decode: dense is unknown\n  wanted  absorbed or expanded\n  got     dense",
        ),
    ],
)
def test_options_that_are_not_built(options, text):
    with pytest.raises(DscError) as error:
        InsertMlaAttention(**options)
    assert error.value.text() == text


def test_fails():
    with pytest.raises(DscError) as error:
        run_pass(WITHOUT_MSCALE, "insert_mla_attention")
    assert error.value.text() == (
        "main: insert_mla_attention found 0 of 1 sites\n"
        "  at      attention: the softmax scale is not the model's\n"
        "  wanted  0.0935652\n"
        "  got     0.0721688\n"
        "  try     mend the graph; or, in the recipe, allow: {insert_mla_attention: {count: 1, reason: ...}}"
    )
