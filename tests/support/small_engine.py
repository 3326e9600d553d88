"""A two-graph engine with a handful of weights, written without a checkpoint: for tests of the folder, not of the model."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsc.compiler.engine_writer import EngineContents, weight_bytes, write_engine
from dsc.compiler.ir.graph import Graph, GraphInfo, weight
from dsc.compiler.ir.weight import Placement, Quantize, Source
from dsc.compiler.phases import StepLimits, sample_graph
from dsc.compiler.recipe import KvCache, Limits, Mtp, Parallel, Recipe
from dsc.compiler.staging import Staging
from dsc.passes.plan_memory import PlanMemory
from dsc.runtime.spec import ModelSpec, SourceFormat, Yarn

WIDTH, VOCAB = 64, 96
LIMITS = StepLimits(batch_tokens=16, sequences=4, context_tokens=64, drafts=0, cache_dtype="bfloat16", block_tokens=16)
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
    graphs = [graph, sample_graph(SPEC, LIMITS)]
    for item in graphs:
        PlanMemory().run(item)
    return graphs


def write_weights(folder: Path, graphs: list[Graph]) -> dict[str, str]:
    """Random bytes for every weight, in one safetensors file; fills placements, gives each tensor's sha256."""
    constants = {name: tensor for graph in graphs for name, tensor in graph.weights().items()}
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, tensor in sorted(constants.items()):
        expression = tensor._values.expression
        raw = torch.randint(0, 60, (expression.nbytes,), generator=generator, dtype=torch.uint8)
        values[name] = raw.view(getattr(torch, expression.dtype)).view(expression.shape)
    (folder / "weights").mkdir()
    file = folder / "weights" / "common-00001.safetensors"
    save_file(values, file)
    content = file.read_bytes()
    (header_bytes,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + header_bytes])
    hashes = {}
    for graph in graphs:
        for name, tensor in graph.weights().items():
            begin, end = (8 + header_bytes + at for at in header[name]["data_offsets"])
            tensor._values.placement = Placement("weights/common-00001.safetensors", begin, end - begin)
            hashes[name] = hashlib.sha256(content[begin:end]).hexdigest()
    return hashes


def make_small_engine(target: Path, checkpoint: Path | None = None) -> Path:
    """The engine at `target`; `checkpoint` gives it a tokenizer."""
    graphs = make_graphs()
    with Staging(target, weight_bytes(graphs)) as stage:
        hashes = write_weights(stage.folder, graphs)
        report = {"passes": [], "ledger": {}, "weights": {}}
        write_engine(stage.folder, EngineContents(SPEC, RECIPE, graphs, hashes, checkpoint or target, report))
        stage.commit()
    return target
