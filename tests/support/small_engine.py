"""A two-graph engine with a handful of weights, written without a checkpoint: for tests of the folder, not of the model."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from dsc.compiler.emission_plan import plan_emission
from dsc.compiler.emit import emit, gather, place
from dsc.compiler.engine_writer import EngineContents, weight_bytes, write_engine
from dsc.compiler.ir.graph import Graph, GraphInfo, weight
from dsc.compiler.ir.weight import Quantize, Source
from dsc.compiler.ledger import Entry, Ledger
from dsc.compiler.phases import StepLimits, sample_graph
from dsc.compiler.pipeline import PipelineReport, run_passes
from dsc.compiler.recipe import KvCache, Mtp, Recipe
from dsc.compiler.staging import Staging
from dsc.compiler.targets import CpuTarget
from dsc.passes.plan_memory import PlanMemory
from dsc.runtime.manifest import Limits, Parallel
from dsc.runtime.spec import ModelSpec, SourceFormat, Yarn

WIDTH, VOCAB = 64, 96
LIMITS = StepLimits(
    batch_tokens=16, sequences=4, context_tokens=64, drafts=0, logit_rows=16, cache_dtype="bfloat16", block_tokens=16
)
SPEC = ModelSpec(
    family="deepseek_v3", architecture="DeepseekV3ForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, num_layers=1,
    num_heads=1, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    intermediate_size=128, moe_intermediate_size=32, num_experts=0, num_shared_experts=0, experts_per_token=0,
    num_groups=1, topk_groups=1, scoring="sigmoid", group_score="none", norm_topk_prob=True, routed_scaling_factor=1.0,
    router_bias=False, num_dense_layers=1, num_mtp_layers=0, rms_norm_eps=1e-6, rope_theta=1e4,
    yarn=Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0), max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=0,
    eos_token_ids=(1,), source=SourceFormat("bf16"),
)  # fmt: skip
RECIPE = Recipe(
    name="small", where="recipes/small.yaml", model="none", target="cpu", parallel=Parallel(1, 1, 1),
    limits=Limits(16, 4, 64), decode_buckets=(1, 4), kv_cache=KvCache("bfloat16", 16), mtp=Mtp(False, 0), passes=(),
    allow={},
)  # fmt: skip

LEDGER = Ledger((Entry("a", 8, "consumed"), Entry("b", 16, "derived"), Entry("c", 32, "dropped", "MTP is off")))


def make_graphs() -> list[Graph]:
    """`main.decode`: embedding, norm, a wint8 linear layer, norm, head; and `sample`."""
    info = GraphInfo(SPEC, "main", "decode", layers=(0,), bounds=LIMITS.bounds("decode"))
    graph = Graph("main.decode", info)
    tokens, rows = graph.add_input("tokens", "int32", ("T",)), graph.add_input("logit_rows", "int32", ("R",))
    inner = Source("linear", "float32", (WIDTH, WIDTH))
    table = weight("embed.weight", Source("embed", "bfloat16", (VOCAB, WIDTH)), "embeddings")
    norm = weight("norm.weight", Source("norm", "float32", (WIDTH,)))
    packed = weight("linear.packed", Quantize(inner, "wint8", "data"), "attention")
    scales = weight("linear.scales", Quantize(inner, "wint8", "scales"), "attention")
    eps = {"epsilon": 1e-6}
    x = graph.plugin(
        "Embedding",
        {"tokens": tokens, "table": table},
        {"dtype": "float32", "table_format": "bf16"},
        "embed_tokens",
        {},
    ).outputs[0]
    x = graph.plugin("RmsNorm", {"x": x, "weight": norm}, eps, "layers.0.norm", {}).outputs[0]
    x = graph.plugin(
        "Linear", {"x": x, "w": packed, "w.scales": scales}, {"w_format": "wint8"}, "layers.0.linear", {}
    ).outputs[0]
    hidden = graph.plugin("RmsNorm", {"x": x, "weight": norm}, eps, "norm", {"y": "hidden"}).outputs[0]
    head = {"hidden": hidden, "logit_rows": rows, "w": table}
    logits = graph.plugin("LmHead", head, {"w_format": "bf16"}, "lm_head", {"logits": "logits"}).outputs[0]
    graph.add_output(logits)
    graph.add_output(hidden)
    return [graph, sample_graph(SPEC, LIMITS)]


def planned_graphs() -> list[Graph]:
    """The same, with their memory planned."""
    graphs = make_graphs()
    for graph in graphs:
        PlanMemory().run(graph)
    return graphs


def read_source(name: str, rows: slice | None) -> torch.Tensor:
    """A source tensor of random values that depend on its name alone."""
    expressions = [t._values.expression for graph in make_graphs() for t in graph.weights().values()]
    source = next(s for e in expressions for s in e.sources() if s.name == name)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randint(-99, 99, source.shape, generator=generator).to(getattr(torch, source.dtype)) / 64
    return values if rows is None else values[rows]


def make_small_engine(target: Path, checkpoint: Path | None = None, pipeline: PipelineReport | None = None) -> Path:
    """The engine at `target`; `checkpoint` gives it a tokenizer, `pipeline` stands in its report instead of the truth."""
    graphs = make_graphs()
    ran = run_passes(graphs, [PlanMemory()])
    with Staging(target, weight_bytes(graphs)) as stage:
        emission = emit(plan_emission(gather(graphs)), read_source, stage.folder)
        place(graphs, emission.placements)
        contents = EngineContents(SPEC, RECIPE, graphs, emission, pipeline or ran, LEDGER, checkpoint or stage.folder)
        write_engine(stage.folder, contents, CpuTarget())
        stage.commit()
    return target
