"""Run passes on a graph given as text: what `dsc opt` does, and the door that the tests of passes use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from dsc.compiler.config import read_config
from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.rewrite import Pass
from dsc.compiler.ir.text import from_text, header, read_header, to_text
from dsc.compiler.phases import StepLimits
from dsc.compiler.pipeline import PipelineReport, run_passes
from dsc.compiler.recipe import Allowance, make_pass
from dsc.runtime.errors import DscError
from dsc.runtime.spec import ModelSpec, SourceFormat, Yarn

# The facts of examples/tiny-r1 (a test compares them with its config.json): every part that R1 has.
TINY_R1 = ModelSpec(
    family="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    vocab_size=2048,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    q_lora_rank=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_experts=16,
    num_shared_experts=1,
    experts_per_token=4,
    num_groups=4,
    topk_groups=2,
    scoring="sigmoid",
    group_score="top2_sum",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    router_bias=True,
    num_dense_layers=1,
    num_mtp_layers=1,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    yarn=Yarn(4.0, 512, 32.0, 1.0, 1.0, 1.0),
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_ids=(1,),
    source=SourceFormat("fp8"),
)
LIMITS = StepLimits(
    batch_tokens=256,
    sequences=8,
    context_tokens=2048,
    drafts=1,
    logit_rows=256,
    cache_dtype="bfloat16",
    block_tokens=64,
)


def run_opt(
    graph: Path, pass_names: Sequence[str], config: Path | None = None, phase: str = "prefill"
) -> tuple[str, dict[str, Any]]:
    """Run passes on the graph of a file, contract and all; returns the graph's text and the report as JSON.

    pass_names   `fuse_swiglu`, `set_dtype:activations=bf16`, or YAML as in a recipe: `set_dtype: {activations: bf16}`
    config       the model's config.json or its folder; TINY_R1 without
    phase        unless the file's header tells it, as it may tell the model, the layers and the passes already run
    raises       DscError, also where a contract is broken
    """
    if not graph.is_file():
        raise DscError(
            "no such file", where=str(graph), wanted="a graph as text, such as one from `dsc compile --dump`"
        )
    spec = TINY_R1 if config is None else read_config(config.parent if config.is_file() else config)
    try:
        text = graph.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DscError("this is not a graph", where=str(graph), wanted="UTF-8 text", got=str(error)) from error
    done, report = opt(text, [parse_pass(name) for name in pass_names], info_of(text, spec, phase))
    return header(done.info) + to_text(done), report.to_json()


def opt(
    text: str, passes: Sequence[Pass], info: GraphInfo | None = None, allow: Mapping[str, Allowance] | None = None
) -> tuple[Graph, PipelineReport]:
    """Run passes on a graph's text and return what became of it; without `info`, TINY_R1 and the text's header say."""
    graph = from_text(text, info if info is not None else info_of(text, TINY_R1, "prefill"))
    report = run_passes([graph], passes, allow)
    return graph, report


def info_of(text: str, spec: ModelSpec, phase: str) -> GraphInfo:
    """What passes may know of a graph's text: a spec, LIMITS, and what its header tells. All layers unless that says else."""
    blank = GraphInfo(
        spec,
        "main",
        phase,
        bounds=LIMITS.bounds(phase),
        cache_dtype=LIMITS.cache_dtype,
        block_tokens=LIMITS.block_tokens,
    )
    info = read_header(text, blank)
    if not re.search(r"^\s*# layers:", text, re.M):
        info = replace(info, layers=(spec.num_layers,) if info.model == "mtp" else tuple(range(spec.num_layers)))
    return replace(info, bounds=LIMITS.bounds(info.phase))


def parse_pass(text: str) -> Pass:
    """A pass with its options from one argument of the command line."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), dict):
        ((name, options),) = value.items()
        return make_pass(str(name), options)
    name, _, rest = text.partition(":")
    options = {}
    for item in re.split(r",(?=\w+=)", rest) if rest else []:
        key, equals, content = item.partition("=")
        if not equals:
            raise DscError(f"{item!r} is no option of {name}", wanted=f"{name}:key=value,key=value", got=text)
        try:
            options[key] = yaml.safe_load(content)
        except yaml.YAMLError as error:
            raise DscError(f"the value of {key} is not YAML", wanted=f"{name}:{key}=value", got=content) from error
    return make_pass(name, options)
