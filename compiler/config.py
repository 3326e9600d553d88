"""config.json -> ModelSpec: every fact checked, every fault told at once, no value guessed.

Dispatch is by `architectures`; a model of another shape is refused by name with the reason.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dsc.compiler.config_source import read_source_format
from dsc.compiler.json_fields import REQUIRED, JsonFields, show
from dsc.runtime.codec import read_json
from dsc.runtime.errors import DscError, nearest, raise_all
from dsc.runtime.spec import ModelSpec, Yarn

# architecture -> the model types that are of its shape
ACCEPTED = {
    "DeepseekV2ForCausalLM": ("deepseek_v2",),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "kimi_k2"),
}
# Refused by architecture or model type (a regular expression over both), most specific first.
REFUSED = (
    ("deepseek_?v32", "DeepSeek-V3.2", "its sparse attention needs the lightning indexer, which is not built yet"),
    (
        "deepseek_?v4",
        "DeepSeek-V4",
        "its compressed attention and hash-routed experts are not MLA with MoE",
    ),
    ("kimi_?k3", "Kimi-K3", "its layers are not MLA with MoE"),
    ("kimi_?k25", "Kimi-K2.5", "its vision tower is not built yet"),
    ("kimi_?linear", "Kimi-Linear", "its linear attention layers are not MLA"),
    ("deepseek_?(vl|ocr)", "DeepSeek-VL", "it reads images"),
    ("deepseekforcausallm|^deepseek$", "DeepSeek-MoE (V1)", "its attention is not MLA"),
    ("qwen", "Qwen, also R1-Distill-Qwen", "its grouped-query attention is not built yet"),
    ("llama", "Llama, also R1-Distill-Llama", "its grouped-query attention is not built yet"),
)
SCORINGS = {
    "DeepseekV2ForCausalLM": ("softmax", ("greedy", "group_limited_greedy")),
    "DeepseekV3ForCausalLM": ("sigmoid", ("noaux_tc",)),
}
# Keys that change nothing in inference, as the releases and transformers write them.
IGNORABLE = (
    "auto_map", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "initializer_range", "use_cache",
    "transformers_version", "attention_dropout", "output_router_logits", "router_aux_loss_coef", "pad_token_id",
    "name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "return_dict", "problem_type", "max_length",
    "unsloth_fixed", "unsloth_version",
)  # fmt: skip

MAX_LAYERS, MAX_EXPERTS = 1000, 10_000  # several times those of any model; every tensor of every one is named


def read_config(folder: Path, name: str = "config.json") -> ModelSpec:
    """The spec of the checkpoint in `folder`, from its config.json and the stop tokens of generation_config.json.

    name  of the file, where it is another
    num_mtp_layers is what config.json declares; `Checkpoint.open` compares it with the tensors.
    Raises DscError, one line for each fault of the file.
    """
    path = folder / name
    data = _read_object(path)
    config = JsonFields(data, str(path), [])
    architecture, family = _dispatch(config, data, str(path))
    fields = {
        **_sizes(config),
        **_attention(config),
        **_experts(config, architecture),
        **_rope(config),
        **_tokens(config, folder / "generation_config.json"),
        "source": read_source_format(config),
    }
    _refuse_variants(config)
    config.unknown(IGNORABLE)
    raise_all(f"{path} cannot be used", config.faults)
    return ModelSpec(family=family, architecture=architecture, **fields)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DscError("not found", where=str(path), wanted="the folder of a Hugging Face checkpoint")
    data = read_json(path, str(path))
    if not isinstance(data, dict):
        raise DscError("is not a JSON object", where=str(path), got=show(data))
    return data


def _dispatch(config: JsonFields, data: dict[str, Any], where: str) -> tuple[str, str]:
    """Architecture and model type, or DscError: nothing else of a model that is not of this shape is worth a line."""
    architectures, model_type = config.raw("architectures"), config.raw("model_type")
    names = architectures if isinstance(architectures, list) else [architectures]
    if len(names) != 1 or not isinstance(names[0], str):
        raise DscError(f"architectures is {show(architectures)}", where=where, wanted=f"one of {', '.join(ACCEPTED)}")
    name = names[0]
    for pattern, title, reason in REFUSED:
        if any(re.search(pattern, text.lower()) for text in (name, str(model_type)) if text):
            raise DscError(f"{name} ({title}) is refused: {reason}", where=where, wanted=", ".join(ACCEPTED))
    if name not in ACCEPTED:
        close = nearest(name, ACCEPTED)
        raise DscError(f"{name} is unknown", where=where, wanted=", ".join(ACCEPTED), try_=close and f"nearest {close}")
    family = config.choice("model_type", ACCEPTED[name])
    return name, str(family)


def _sizes(config: JsonFields) -> dict[str, Any]:
    fields = {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer("hidden_size"),
        "num_layers": config.integer("num_hidden_layers"),
        "intermediate_size": config.integer("intermediate_size"),
        "rms_norm_eps": config.number("rms_norm_eps"),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "num_mtp_layers": config.integer(config.alias("num_nextn_predict_layers", "num_mtp_layers"), 0, least=0),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
    }
    if (fields["num_mtp_layers"] or 0) > 1:
        config.fault(f"num_nextn_predict_layers is {fields['num_mtp_layers']}, wanted 0 or 1: one MTP layer is built")
    _at_most(config, "num_hidden_layers", fields["num_layers"], MAX_LAYERS)
    return fields


def _at_most(config: JsonFields, key: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        config.fault(f"{key} is {show(value)}, wanted {most} at most")


def _attention(config: JsonFields) -> dict[str, Any]:
    fields = {
        "num_heads": config.integer("num_attention_heads"),
        "q_lora_rank": None,
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "qk_nope_head_dim": config.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": config.integer("qk_rope_head_dim"),
        "v_head_dim": config.integer("v_head_dim"),
    }
    if "q_lora_rank" in config:
        fields["q_lora_rank"] = config.integer("q_lora_rank")
    elif not config.has_key("q_lora_rank"):
        config.fault("q_lora_rank is missing, wanted a whole number, or null for one q_proj")
    heads, nope, rope = fields["num_heads"], fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
    if rope and rope % 2:
        config.fault(f"qk_rope_head_dim is {rope}, wanted an even number: rotation turns pairs")
    config.equals("num_key_value_heads", heads, "num_attention_heads")
    if nope and rope:
        config.equals("qk_head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
        config.equals("head_dim", rope, "qk_rope_head_dim")
    return fields


def _experts(config: JsonFields, architecture: str) -> dict[str, Any]:
    scoring, methods = SCORINGS[architecture]
    config.choice("scoring_func", (scoring,), scoring)
    # transformers' own V3 config leaves out the one method that V3 has; V2 has two.
    method = config.choice("topk_method", methods, methods[0] if len(methods) == 1 else REQUIRED)
    fields = {
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "num_experts": config.integer(config.alias("n_routed_experts", "num_local_experts")),
        "num_shared_experts": config.integer("n_shared_experts", 0, least=0),
        "experts_per_token": config.integer("num_experts_per_tok"),
        "num_groups": config.integer("n_group", 1),
        "topk_groups": config.integer("topk_group", 1),
        "scoring": scoring,
        "norm_topk_prob": config.flag("norm_topk_prob"),
        "routed_scaling_factor": config.number("routed_scaling_factor"),
        "router_bias": method == "noaux_tc",
        "num_dense_layers": _num_dense_layers(config),
    }
    _at_most(config, "n_routed_experts", fields["num_experts"], MAX_EXPERTS)
    groups = fields["num_groups"] or 1
    fields["group_score"] = "none" if groups == 1 else "top2_sum" if method == "noaux_tc" else "max"
    if method == "greedy" and groups > 1:
        config.fault(f'topk_method "greedy" contradicts n_group {groups}: it knows no groups')
    _check_groups(config, fields)
    _check_normalization(config, fields)
    return fields


def _check_groups(config: JsonFields, fields: dict[str, Any]) -> None:
    experts, groups, kept = fields["num_experts"], fields["num_groups"], fields["topk_groups"]
    top_k = fields["experts_per_token"]
    if not (experts and groups and kept and top_k):
        return
    if kept > groups:
        config.fault(f"topk_group {kept} exceeds n_group {groups}")
    if experts % groups:
        left = f"{experts} = {experts // groups} x {groups} + {experts % groups}"
        config.fault(f"n_routed_experts {experts} does not divide into n_group {groups}: {left}")
    elif groups > 1 and fields["group_score"] == "top2_sum" and experts // groups < 2:
        config.fault(f"n_group {groups} of {experts} experts leaves one a group, and a group's score sums its two best")
    elif top_k > min(kept, groups) * (experts // groups):
        reach = min(kept, groups) * (experts // groups)
        config.fault(f"num_experts_per_tok {top_k} exceeds the {reach} experts of topk_group {kept} groups")


def _check_normalization(config: JsonFields, fields: dict[str, Any]) -> None:
    """Where DeepSeek's own code and transformers compute different things, no choice is made for the user."""
    if not fields["norm_topk_prob"]:
        return
    if fields["scoring"] == "softmax":
        config.fault("norm_topk_prob is true, wanted false: V2's implementations disagree on what it then means")
    elif fields["experts_per_token"] == 1:
        config.fault(
            "norm_topk_prob is true with num_experts_per_tok 1: implementations disagree on what it then means"
        )


def _num_dense_layers(config: JsonFields) -> Any:
    """first_k_dense_replace, checked against the number of layers and transformers' list of layer kinds."""
    layers, kinds = config.raw("num_hidden_layers"), config.raw("mlp_layer_types")
    count: Any = None
    if kinds is not None:
        count = kinds.count("dense") if isinstance(kinds, list) else 0
        if (
            isinstance(kinds, list)
            and kinds == ["dense"] * count + ["sparse"] * (len(kinds) - count)
            and len(kinds) == layers
        ):
            config.equals("first_k_dense_replace", count, "the dense ones of mlp_layer_types")
        else:
            config.fault(f"mlp_layer_types is {show(kinds)}, wanted dense layers, then sparse ones, {layers} in all")
    dense = config.integer("first_k_dense_replace", REQUIRED if count is None else count, least=0)
    if type(layers) is int and dense is not None and dense > layers:
        config.fault(f"first_k_dense_replace {dense} exceeds num_hidden_layers {layers}")
    return dense


def _rope(config: JsonFields) -> dict[str, Any]:
    """Theta and YaRN, from rope_theta with rope_scaling or from transformers 5's rope_parameters."""
    scaling, parameters = config.object("rope_scaling"), config.object("rope_parameters")
    if parameters is not None and "rope_theta" in parameters:
        theta = parameters.number("rope_theta", least=1.0)
        config.equals("rope_theta", theta, "rope_parameters.rope_theta")
    else:
        theta = config.number("rope_theta", least=1.0)
    found = [_yarn(fields) for fields in (scaling, parameters) if fields is not None]
    if len(found) == 2 and found[0] != found[1]:
        config.fault("rope_scaling contradicts rope_parameters")
    return {"rope_theta": theta, "yarn": found[0] if found else None}


def _yarn(fields: JsonFields) -> Yarn | None:
    """The YaRN of one object, None for plain rope. Factor and original length have no default; the others have one."""
    kind = fields.choice(fields.alias("type", "rope_type"), ("yarn", "default"))
    if kind != "yarn":
        fields.raw("rope_theta")
        if kind == "default":
            fields.unknown(())
        return None
    values = {
        "factor": fields.number("factor", least=1.0, above=False),
        "original_max_position_embeddings": fields.integer("original_max_position_embeddings"),
        "beta_fast": fields.number("beta_fast", 32.0),
        "beta_slow": fields.number("beta_slow", 1.0),
        "mscale": fields.number("mscale", 1.0, above=False),
        "mscale_all_dim": fields.number("mscale_all_dim", 0.0, above=False),
    }
    fields.raw("rope_theta")
    fields.unknown(())
    if None in values.values():
        return None
    yarn = Yarn(**values)
    if yarn.beta_fast < yarn.beta_slow:
        fields.fault(f"{fields.name('beta_fast')} {yarn.beta_fast:g} is under beta_slow {yarn.beta_slow:g}")
    # With one of the two 0, DeepSeek's code and transformers scale cos and sin differently, except at (1, 0).
    if not (yarn.mscale and yarn.mscale_all_dim) and (yarn.mscale, yarn.mscale_all_dim) != (1.0, 0.0):
        both = f"mscale {yarn.mscale:g} with mscale_all_dim {yarn.mscale_all_dim:g}"
        fields.fault(f"{fields.path}: {both}: implementations disagree on what it means")
    return yarn


def _tokens(config: JsonFields, generation_path: Path) -> dict[str, Any]:
    """First and stop tokens; generation_config.json's stop tokens first, as generation obeys those."""
    generation = JsonFields({}, str(generation_path), config.faults)
    if generation_path.is_file():
        generation = JsonFields(_read_object(generation_path), str(generation_path), config.faults)
    vocab, bos = config.raw("vocab_size"), config.integer("bos_token_id", None, least=0)
    eos = dict.fromkeys([*_token_ids(generation, "eos_token_id"), *_token_ids(config, "eos_token_id")])
    if type(vocab) is int:
        for name, ids in (("bos_token_id", [bos]), ("eos_token_id", eos)):
            for token in ids:
                if token is not None and token >= vocab:
                    config.fault(f"{name} {token} is outside vocab_size {vocab}")
    return {"bos_token_id": bos, "eos_token_ids": tuple(eos)}


def _token_ids(fields: JsonFields, key: str) -> list[int]:
    value = fields.raw(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if all(type(token) is int and token >= 0 for token in ids):
        return ids
    fields.fault(f"{key} is {show(value)}, wanted a token id or a list of them")
    return []


def _refuse_variants(config: JsonFields) -> None:
    """Switches that have one built position."""
    config.choice("hidden_act", ("silu",), "silu")
    config.choice("moe_layer_freq", (1,), 1)
    config.choice("attention_bias", (False,), False)
    config.choice("mlp_bias", (False,), False)
    config.choice("rope_interleave", (True,), True)
