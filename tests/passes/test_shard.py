"""The graph of one rank: its parts of weights, sums and gathered logits; and all ranks together mean what one does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.breaks import graph_before
from support.families import make_checkpoint, read_tensors
from support.graphs import assert_same
from support.interpret import interpret, one_sequence
from support.oracle import worst_row_error
from support.threaded_ranks import run_ranks

from dsc.compiler.config import read_config
from dsc.compiler.ir.graph import Graph
from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.rewrite import Report
from dsc.compiler.ir.text import from_text, header
from dsc.compiler.ir.verify import verify
from dsc.compiler.opt import TINY_R1, info_of
from dsc.compiler.pipeline import run_passes
from dsc.passes.shard import Shard
from dsc.runtime.errors import DscError
from dsc.runtime.shards import Cut, Place
from dsc.runtime.spec import ModelSpec

MLP, MOE = "model.layers.0.mlp", "model.layers.1.mlp"
DENSE = f"""
    main (float[T,256] x) => (float[T,256] y)
    <float[512,256] "{MLP}.gate_proj.weight", float[512,256] "{MLP}.up_proj.weight", uint8[256,256] "{MLP}.down_proj.packed",
     bfloat16[256,16] "{MLP}.down_proj.scales", float[T,512] g, float[T,512] u, float[T,512] h>
    {{
      ["layers.0.mlp.gate_proj"] g = dsc.Linear<w_format="fp32">(x, "{MLP}.gate_proj.weight", "")
      ["layers.0.mlp.up_proj"] u = dsc.Linear<w_format="fp32">(x, "{MLP}.up_proj.weight", "")
      ["layers.0.mlp.swiglu"] h = dsc.Swiglu(g, u)
      ["layers.0.mlp.down_proj"] y = dsc.Linear<w_format="wint4:32">(h, "{MLP}.down_proj.packed", "{MLP}.down_proj.scales")
    }}
"""
DENSE_OF_FOUR = f"""
    main (float[T,256] x) => (float[T,256] y)
    <float[128,256] "{MLP}.gate_proj.weight", float[128,256] "{MLP}.up_proj.weight", uint8[256,64] "{MLP}.down_proj.packed",
     bfloat16[256,4] "{MLP}.down_proj.scales", float[T,128] g, float[T,128] u, float[T,128] h,
     float[T,256] "layers.0.mlp.down_proj.partial">
    {{
      ["layers.0.mlp.gate_proj"] g = dsc.Linear<w_format="fp32">(x, "{MLP}.gate_proj.weight", "")
      ["layers.0.mlp.up_proj"] u = dsc.Linear<w_format="fp32">(x, "{MLP}.up_proj.weight", "")
      ["layers.0.mlp.swiglu"] h = dsc.Swiglu(g, u)
      ["layers.0.mlp.down_proj"] "layers.0.mlp.down_proj.partial" =
         dsc.Linear<w_format="wint4:32">(h, "{MLP}.down_proj.packed", "{MLP}.down_proj.scales")
      ["layers.0.mlp.all_reduce"] y = dsc.AllReduce<ranks=4>("layers.0.mlp.down_proj.partial")
    }}
"""
HEAD = """
    main (float[T,256] hidden, int32[R] logit_rows) => (float[R,515] logits)
    <float8e4m3fn[515,256] "lm_head.weight", float[5,2] "lm_head.scales">
    {
      [lm_head] logits = dsc.LmHead<w_format="fp8">(hidden, logit_rows, "lm_head.weight", "lm_head.scales")
    }
"""
HEAD_OF_FOUR = """
    main (float[T,256] hidden, int32[R] logit_rows) => (float[R,515] logits)
    <float8e4m3fn[256,256] "lm_head.weight", float[2,2] "lm_head.scales", float[R,256] "lm_head.part">
    {
      [lm_head] "lm_head.part" = dsc.LmHead<w_format="fp8">(hidden, logit_rows, "lm_head.weight", "lm_head.scales")
      ["lm_head.gather"] logits = dsc.GatherLogits<ranks=4, vocabulary=515>("lm_head.part")
    }
"""
ROUTER = 'group_score="none", groups=1, normalize=1, scale=2.5, scoring="sigmoid", top_k=4, topk_groups=1'
ABSENT = 'shared_gate_format="fp32", shared_up_format="fp32", shared_down_format="fp32"'
EXPERTS = f"""
    main (float[T,256] x, int32[T] slots) => (float[T,256] y)
    <float[16,256] w, float[16] b, int32[T,4] ids, float[T,4] weights, int8[16,128,256] "{MOE}.experts.gate_proj.packed",
     bfloat16[16,128] "{MOE}.experts.gate_proj.scales", float[16,128,256] "{MOE}.experts.up_proj.weight",
     int8[16,256,128] "{MOE}.experts.down_proj.packed", bfloat16[16,256] "{MOE}.experts.down_proj.scales">
    {{
      ["layers.1.mlp.router"] ids, weights = dsc.Router<{ROUTER}>(x, w, b, slots)
      ["layers.1.mlp.moe"] y = dsc.Moe<gate_format="wint8", up_format="fp32", down_format="wint8", {ABSENT}>(x, ids, weights,
         "{MOE}.experts.gate_proj.packed", "{MOE}.experts.gate_proj.scales", "{MOE}.experts.up_proj.weight", "",
         "{MOE}.experts.down_proj.packed", "{MOE}.experts.down_proj.scales")
    }}
"""
EXPERTS_OF_FOUR = f"""
    main (float[T,256] x, int32[T] slots) => (float[T,256] y)
    <float[16,256] w, float[16] b, int32[T,4] ids, float[T,4] weights, int8[8,64,256] "{MOE}.experts.gate_proj.packed",
     bfloat16[8,64] "{MOE}.experts.gate_proj.scales", float[8,64,256] "{MOE}.experts.up_proj.weight",
     int8[8,256,64] "{MOE}.experts.down_proj.packed", bfloat16[8,256] "{MOE}.experts.down_proj.scales",
     int32[1,16] expert_map, float[T,256] "layers.1.mlp.moe.partial">
    {{
      ["layers.1.mlp.router"] ids, weights = dsc.Router<{ROUTER}>(x, w, b, slots, expert_map)
      ["layers.1.mlp.moe"] "layers.1.mlp.moe.partial" =
         dsc.Moe<gate_format="wint8", up_format="fp32", down_format="wint8", {ABSENT}, expert_groups=2>(x, ids, weights,
         "{MOE}.experts.gate_proj.packed", "{MOE}.experts.gate_proj.scales", "{MOE}.experts.up_proj.weight", "",
         "{MOE}.experts.down_proj.packed", "{MOE}.experts.down_proj.scales")
      ["layers.1.mlp.all_reduce"] y = dsc.AllReduce<ranks=4>("layers.1.mlp.moe.partial")
    }}
"""


def shard(text: str, tensor: int, expert: int, spec: ModelSpec = TINY_R1) -> tuple[Graph, Report]:
    """A text's graph after the pass alone, verified, and the pass's report."""
    info = replace(info_of(text, spec, "prefill"), mesh=Mesh(tensor, expert))
    graph = from_text(text, info)
    report = Shard().run(graph)
    graph.tidy()
    verify(graph, "shard")
    return graph, report


def cuts(graph: Graph) -> dict[str, tuple[Cut, ...]]:
    """Of weights that are cut, by the ends of their names."""
    found = {name: tensor._values.cuts for name, tensor in graph.weights().items() if tensor._values.cuts}
    return {".".join(name.split(".")[-2:]): of for name, of in found.items()}


def notes(report: Report) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for site in report.changed:
        found.setdefault(site.node, []).append(site.note)
    return found


# -- what it makes


def test_rows_and_columns_of_an_mlp() -> None:
    graph, report = shard(DENSE, 4, 1)
    assert_same(graph, DENSE_OF_FOUR)
    assert cuts(graph) == {
        "gate_proj.weight": (Cut(0, "tensor", 128),),
        "up_proj.weight": (Cut(0, "tensor", 128),),
        "down_proj.packed": (Cut(1, "tensor", 64),),  # bytes of two codes
        "down_proj.scales": (Cut(1, "tensor", 4),),  # groups of 32
    }
    assert notes(report) == {
        "layers.0.mlp.gate_proj": ["w: 128 of 512 rows by tensor"],
        "layers.0.mlp.up_proj": ["w: 128 of 512 rows by tensor"],
        "layers.0.mlp.down_proj": ["w: 128 of 512 columns by tensor"],
    }
    assert report.declined == []


def test_a_vocabulary_in_blocks_of_128() -> None:
    """515 rows are five blocks: two on each of four ranks, the last rank's beyond the end."""
    graph, report = shard(HEAD, 4, 4)
    assert_same(graph, HEAD_OF_FOUR)
    assert cuts(graph) == {
        "lm_head.weight": (Cut(0, "tensor", 256),),
        "lm_head.scales": (Cut(0, "tensor", 2),),
    }
    assert notes(report) == {"lm_head": ["w: 256 of 515 rows by tensor, padded"]}
    graph, _ = shard(HEAD.replace("515", "129281").replace("[5,2]", "[1011,2]"), 8, 8)
    assert cuts(graph)["lm_head.weight"] == (Cut(0, "tensor", 127 * 128),)
    assert graph.gs.outputs[0].shape == ["R", 129281]


def test_a_tied_head_stays_whole() -> None:
    """It has the embeddings' table, of which every rank needs every row."""
    text = HEAD.replace("lm_head.weight", "model.embed_tokens.weight").replace("lm_head.s", "model.embed_tokens.s")
    spec = replace(TINY_R1, tie_word_embeddings=True)
    graph, report = shard(text, 4, 4, spec)
    assert_same(graph, text)
    assert report.changed == []
    info = replace(info_of(text, spec, "prefill"), layers=(), mesh=Mesh(4, 4))
    assert Shard().expected(info) == 0


def test_experts_over_fewer_groups_than_ranks() -> None:
    """Two groups of two ranks: eight experts each, of which a rank has half the width."""
    graph, report = shard(EXPERTS, 4, 2)
    assert_same(graph, EXPERTS_OF_FOUR)
    by_group, up = Cut(0, "expert", 8), (Cut(0, "expert", 8), Cut(1, "width", 64))
    assert cuts(graph) == {
        "gate_proj.packed": up,
        "gate_proj.scales": up,
        "up_proj.weight": up,
        "down_proj.packed": (by_group, Cut(2, "width", 64)),
        "down_proj.scales": (by_group,),  # of whole rows
        "expert_map": (Cut(0, "expert", 1),),
    }
    assert notes(report)["layers.1.mlp.moe"][0] == "gate: 8 of 16 experts by expert; 64 of 128 rows by width"
    assert notes(report)["layers.1.mlp.router"] == ["experts to places in 2 groups of ranks"]


def test_all_experts_on_every_rank_need_no_map() -> None:
    graph, report = shard(EXPERTS, 2, 1)
    assert "expert_map" not in graph.weights()
    assert cuts(graph)["up_proj.weight"] == (Cut(1, "width", 64),)
    assert len(report.changed) == 3


def test_one_rank_has_no_sites() -> None:
    for text in (DENSE, HEAD, EXPERTS):
        graph, report = shard(text, 1, 1)
        assert_same(graph, text)
        assert (report.changed, report.declined, Shard().expected(graph.info)) == ([], [], 0)


def test_the_mesh_is_told_in_a_text() -> None:
    graph, _ = shard(DENSE, 4, 2)
    told = header(graph.info)
    assert "# mesh: tensor=4 expert=2\n" in told
    assert info_of(told, TINY_R1, "prefill").mesh == Mesh(4, 2)
    with pytest.raises(DscError, match="mesh cannot be 'tensor=4'"):
        info_of("# mesh: tensor=4\n", TINY_R1, "prefill")


# -- what it declines


@pytest.mark.parametrize(
    ("text", "tensor", "node", "reason", "got"),
    [
        (DENSE, 32, "down_proj", "w cannot be cut as wint4:32", "512 columns = 32 x 16, not in whole groups of 32"),
        (
            DENSE.replace('float[512,256] "model.layers.0.mlp.up_proj.weight"', 'float8e4m3fn[512,256] "model.layers.0.mlp.up_proj.weight", float[4,2] s')
            .replace('"fp32">(x, "model.layers.0.mlp.up_proj.weight", "")', '"fp8">(x, "model.layers.0.mlp.up_proj.weight", s)'),
            8, "up_proj", "w cannot be cut as fp8", "512 rows = 8 x 64, not in whole blocks of 128",
        ),
        (EXPERTS, 32, "moe", "gate cannot be cut as wint8", "16 experts = 32 x 0 + 16"),
    ],
    ids=["group", "block", "experts"],
)  # fmt: skip
def test_declines_and_leaves_the_graph(text: str, tensor: int, node: str, reason: str, got: str) -> None:
    graph, report = shard(text, tensor, tensor)
    assert_same(graph, text)
    assert report.changed == []
    first = next(site for site in report.declined if site.node.endswith(node))
    assert (first.reason, first.got.split(";")[0]) == (reason, got)
    assert first.wanted == f"whole heads, experts, blocks and groups on each of {tensor} ranks"


def test_a_head_of_attention_is_never_cut() -> None:
    name = "model.layers.0.self_attn.q_b_proj.weight"
    text = f"""
        main (float[T,128] x) => (float[T,768] y)
        <float[768,128] "{name}">
        {{
          ["layers.0.self_attn.q_b_proj"] y = dsc.Linear<w_format="fp32">(x, "{name}", "")
        }}
    """
    graph, report = shard(text, 8, 8)
    assert_same(graph, text)
    assert [(site.node, site.got) for site in report.declined] == [
        ("layers.0.self_attn.q_b_proj", "4 heads = 8 x 0 + 4")
    ]


def test_declines_what_is_cut_already() -> None:
    graph, _ = shard(DENSE, 4, 1)
    again = Shard().run(graph)
    assert again.changed == []
    assert {site.reason for site in again.declined} == {"w is cut already"}


def test_declines_other_ops_and_meshes_without_groups() -> None:
    _, report = shard(DENSE.replace("dsc.Swiglu(g, u)", "Mul(g, u)"), 4, 1)
    assert [(site.node, site.reason) for site in report.declined] == [
        ("layers.0.mlp.swiglu", "not a plugin op: no schema says what its weights are")
    ]
    _, report = shard(HEAD, 4, 3)
    assert [site.reason for site in report.declined] == ["the mesh has no whole groups of ranks for experts"]


def test_a_weight_that_another_op_reads_is_declined() -> None:
    text = """
        main (int32[T] tokens) => (float[T,256] y)
        <float[515,256] "lm_head.weight">
        {
          [embed_tokens] y = dsc.Embedding<dtype="float32", table_format="fp32">(tokens, "lm_head.weight", "")
        }
    """
    _, report = shard(text, 2, 2)
    assert [(site.node, site.got) for site in report.declined] == [("embed_tokens", "dsc.Embedding")]


def test_a_contract_that_fails_names_every_reason(tmp_path: Path) -> None:
    graph = graph_before("shard", make_checkpoint(tmp_path / "r1", "r1"))
    graph.info = replace(graph.info, mesh=Mesh(8, 8))
    with pytest.raises(DscError) as caught:
        run_passes([graph], [Shard()])
    text = caught.value.text()
    assert "shard found 0 of 27 sites" in text
    assert "layers.0.self_attn.q_b_proj: w cannot be cut as fp32" in text
    assert "4 heads = 8 x 0 + 4" in text


# -- what it means

MESHES = [
    ("v2-lite", 2, 2), ("v2-lite", 4, 2), ("v2-lite", 4, 1), ("v2", 4, 4), ("v3", 2, 1), ("v3", 4, 2), ("k2", 2, 2),
    ("faults", 4, 4), ("faults", 2, 2),
]  # fmt: skip


@pytest.mark.parametrize(("family", "tensor", "expert"), MESHES)
def test_all_ranks_together_mean_what_one_does(family: str, tensor: int, expert: int, tmp_path: Path) -> None:
    """Every rank gives the same logits, those of one rank but for the order of sums: by the ops' references."""
    folder = make_checkpoint(tmp_path / "checkpoint", family)
    stored, spec = read_tensors(folder), read_config(folder)
    for model in ("main", "mtp") if spec.num_mtp_layers else ("main",):
        graph = graph_before("shard", folder, model)
        inputs = step(graph)
        alone = interpret(graph, stored, inputs)
        graph.info = replace(graph.info, mesh=Mesh(tensor, expert))
        (run,) = run_passes([graph], [Shard()]).passes[0].runs
        assert run.found == run.expected == sites(spec, graph.info.layers, expert)
        ranks = of_all_ranks(graph, stored, inputs)
        for name, value in alone.items():
            assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks), name
            if not name.startswith("cache."):
                assert worst_row_error(ranks[0][name], value) < 1e-4, name


def step(graph: Graph) -> dict[str, torch.Tensor]:
    """Inputs of one sequence."""
    spec = graph.info.spec
    tokens = [(7 * i * i + 3 * i) % spec.vocab_size for i in range(40)]
    hidden = torch.randn(40, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    return one_sequence(graph, tokens, **({"hidden": hidden} if graph.info.model == "mtp" else {}))


def of_all_ranks(
    graph: Graph, stored: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """What each rank gives, with a cache of its own."""
    tensor, expert = graph.info.mesh.tensor, graph.info.mesh.expert

    def rank_of(rank: int) -> dict[str, torch.Tensor]:
        own = {name: value.clone() for name, value in inputs.items()}
        return interpret(graph, stored, own, Place(rank, tensor, expert))

    return run_ranks(tensor, rank_of)


def sites(spec: ModelSpec, layers: tuple[int, ...], expert: int) -> int:
    """Counted by hand: three of attention, three of a dense MLP or of the experts and three of the shared one; the head."""
    of_moe = 3 + 3 * (spec.num_shared_experts > 0) + (expert > 1)
    return 1 + sum(3 + (of_moe if spec.is_moe(layer) else 3) for layer in layers)
