"""config.json: released shapes are accepted with the right facts; every fault is one line, all told at once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.families import ABSENT, FAMILIES, change_config, dequantize_checkpoint, make_checkpoint
from transformers import AutoConfig

from dsc.compiler.config import read_config
from dsc.runtime.errors import DscError
from dsc.runtime.spec import ModelSpec, SourceFormat


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """family -> a folder with its checkpoint, made once and never changed."""
    root = tmp_path_factory.mktemp("config")
    return {family: make_checkpoint(root / family, family) for family in FAMILIES}


@pytest.fixture
def folder(tmp_path, made):
    """A folder with R1's small config.json and generation_config.json, free to be changed."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((made["r1"] / name).read_text())
    return tmp_path


def faults(folder) -> list[str]:
    """What read_config says, one entry a fault, without the file's name."""
    with pytest.raises(DscError) as caught:
        read_config(folder)
    errors = getattr(caught.value, "errors", (caught.value,))
    assert all(error.where.startswith(str(folder)) for error in errors)
    return [error.what for error in errors]


# -- accepted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_read_and_survives_json(made, family):
    spec = read_config(made[family])
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_5_writes_the_same_model_in_other_words(made, family, tmp_path):
    plain = read_config(dequantize_checkpoint(made[family], tmp_path / "float32"))
    AutoConfig.from_pretrained(tmp_path / "float32").save_pretrained(tmp_path / "saved")
    assert "rope_parameters" in (tmp_path / "saved" / "config.json").read_text()
    assert read_config(tmp_path / "saved") == replace(plain, eos_token_ids=(1,))


def test_facts_that_tell_the_families_apart(made):
    lite, v2, r1, v31, k2 = (read_config(made[f]) for f in ("v2-lite", "v2", "r1", "v3.1", "k2"))
    assert (lite.q_lora_rank, lite.scoring, lite.group_score, lite.router_bias) == (None, "softmax", "none", False)
    assert (v2.group_score, v2.routed_scaling_factor, v2.norm_topk_prob) == ("max", 16.0, False)
    assert (r1.group_score, r1.scoring, r1.router_bias, r1.num_mtp_layers) == ("top2_sum", "sigmoid", True, 1)
    assert (k2.family, k2.group_score, k2.num_mtp_layers, k2.rope_theta) == ("kimi_k2", "none", 0, 50000.0)
    assert [spec.source for spec in (lite, r1, v31)] == [
        SourceFormat("bf16"),
        SourceFormat("fp8", (128, 128)),
        SourceFormat("fp8", (128, 128), "ue8m0"),
    ]
    # Real head sizes: the softmax scales of the releases.
    assert r1.softmax_scale == pytest.approx(0.135234, abs=1e-6)
    assert lite.softmax_scale == pytest.approx(0.11472, abs=1e-5)


@pytest.mark.parametrize("absent", [None, ABSENT, {"type": "default"}, {"rope_type": "default"}])
def test_no_rope_scaling_is_plain_rope(folder, absent):
    change_config(folder, rope_scaling=absent)
    spec = read_config(folder)
    assert spec.yarn is None
    assert spec.softmax_scale == 192**-0.5


def test_stop_tokens_of_both_files_generation_first(folder):
    change_config(folder, eos_token_id=[1, 3])
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 1]}')
    assert read_config(folder).eos_token_ids == (4, 1, 3)
    (folder / "generation_config.json").unlink()
    assert read_config(folder).eos_token_ids == (1, 3)


def test_mlp_layer_types_may_stand_for_first_k_dense_replace(folder):
    change_config(folder, first_k_dense_replace=ABSENT, mlp_layer_types=["dense", "sparse", "sparse"])
    assert read_config(folder).num_dense_layers == 1


def test_mtp_undeclared_is_none(folder):
    change_config(folder, num_nextn_predict_layers=ABSENT)
    assert read_config(folder).num_mtp_layers == 0


# -- refused by name


@pytest.mark.parametrize(
    ("architecture", "model_type", "title", "reason"),
    [
        ("DeepseekV32ForCausalLM", "deepseek_v32", "V3.2", "indexer"),
        ("DeepseekV4ForCausalLM", "deepseek_v4", "V4", "compressed attention"),
        ("DeepseekV41ForCausalLM", "deepseek_v41", "V4", "compressed attention"),
        ("KimiK3ForCausalLM", "kimi_k3", "K3", "not MLA with MoE"),
        ("KimiLinearForCausalLM", "kimi_linear", "Kimi-Linear", "linear attention"),
        ("KimiK25ForConditionalGeneration", "kimi_k25", "K2.5", "vision"),
        ("Qwen2ForCausalLM", "qwen2", "R1-Distill-Qwen", "grouped-query"),
        ("LlamaForCausalLM", "llama", "R1-Distill-Llama", "grouped-query"),
        ("DeepseekForCausalLM", "deepseek", "V1", "not MLA"),
    ],
)
def test_other_shapes_are_refused_by_name(folder, architecture, model_type, title, reason):
    change_config(folder, architectures=[architecture], model_type=model_type, hidden_size=-1)
    [fault] = faults(folder)  # nothing but the refusal, whatever else is wrong
    assert architecture in fault
    assert title in fault
    assert "refused" in fault
    assert reason in fault


def test_an_unknown_architecture_gets_the_nearest(folder):
    change_config(folder, architectures=["DeepseekV3ForCausaLM"])
    with pytest.raises(DscError, match="nearest DeepseekV3ForCausalLM"):
        read_config(folder)
    change_config(folder, architectures=["Mamba"])
    assert faults(folder) == ["Mamba is unknown"]
    change_config(folder, architectures=[])
    assert faults(folder) == ["architectures is []"]


def test_dispatch_is_by_architecture_and_the_model_type_must_fit(folder):
    change_config(folder, model_type="deepseek_v2")
    assert faults(folder) == ['model_type is "deepseek_v2", wanted "deepseek_v3" or "kimi_k2", nearest "deepseek_v3"']


# -- faults

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
}

# What GPTQModel writes beside, whichever the method.
GPTQMODEL = {
    "desc_act": False,
    "dynamic": {"-:.*kv_b.*": {}},
    "lm_head": False,
    "meta": {"act_group_aware": True, "quantizer": ["gptqmodel:6.0.0"]},
    "pack_dtype": "int32",
}


def compressed(group=None, **weights):
    """A quantization_config of compressed-tensors, as Kimi-K2-Thinking has it."""
    made = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    scheme = {"targets": ["Linear"], "input_activations": None, "weights": {**made, **weights}, **(group or {})}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": scheme}, "ignore": ["lm_head", "re:.*self_attn.*"]}  # fmt: skip


TWO_SCHEMES = compressed()
TWO_SCHEMES["config_groups"]["group_1"] = compressed(num_bits=8)["config_groups"]["group_0"]
ONE_FAULT = [
    # a key of one kind
    ({"hidden_size": "7168"}, 'hidden_size is "7168", wanted a whole number, 1 or more'),
    ({"hidden_size": 256.0}, "hidden_size is 256.0, wanted a whole number, 1 or more"),
    ({"num_attention_heads": ABSENT, "num_key_value_heads": 4}, "num_attention_heads is missing"),
    ({"kv_lora_rank": None}, "kv_lora_rank is null"),
    ({"vocab_size": True}, "vocab_size is true"),
    ({"q_lora_rank": ABSENT}, "q_lora_rank is missing, wanted a whole number, or null for one q_proj"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0, wanted a number above 0"),
    ({"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false", wanted true or false'),
    ({"norm_topk_prob": ABSENT}, "norm_topk_prob is missing"),
    # rope
    ({"rope_scaling": {**YARN, "factor": "40"}}, 'rope_scaling.factor is "40", wanted a number of at least 1'),
    ({"rope_scaling": {**YARN, "factor": 0.5}}, "rope_scaling.factor is 0.5"),
    (
        {"rope_scaling": {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}},
        "rope_scaling.original_max_position_embeddings is missing",
    ),
    ({"rope_scaling": {**YARN, "type": "linear"}}, 'rope_scaling.type is "linear", wanted "yarn" or "default"'),
    ({"rope_scaling": {**YARN, "rope_type": "default"}}, 'rope_scaling.type "yarn" contradicts rope_scaling.rope_type'),
    ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}}, "rope_scaling.beta_fast 1 is under beta_slow 32"),
    ({"rope_scaling": {**YARN, "mscale_all_dim": 0}, "x": None}, None),
    (
        {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0}},
        "mscale 0.7 with mscale_all_dim 0: implementations",
    ),
    (
        {"rope_scaling": {**YARN, "mscale_all_dmi": 1}},
        "unknown key rope_scaling.mscale_all_dmi = 1, nearest known mscale",
    ),
    ({"rope_scaling": 40}, "rope_scaling is 40, wanted an object"),
    ({"rope_parameters": {"rope_type": "yarn", **YARN, "factor": 4}}, "rope_scaling contradicts rope_parameters"),
    (
        {"rope_parameters": {**YARN, "rope_theta": 5e4}},
        "rope_theta 10000 contradicts rope_parameters.rope_theta 50000.0",
    ),
    ({"rope_theta": ABSENT}, "rope_theta is missing"),
    ({"rope_interleave": False}, "rope_interleave is false, wanted true"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63, wanted an even number"),
    # layers, experts, groups
    ({"first_k_dense_replace": 4}, "first_k_dense_replace 4 exceeds num_hidden_layers 3"),
    ({"moe_layer_freq": 2}, "moe_layer_freq is 2, wanted 1"),
    ({"mlp_layer_types": ["dense", "sparse", "dense"]}, 'mlp_layer_types is ["dense", "sparse", "dense"]'),
    ({"mlp_layer_types": ["dense", "dense", "sparse"]}, "first_k_dense_replace 1 contradicts the dense ones"),
    ({"topk_group": 5}, "topk_group 5 exceeds n_group 4"),
    ({"n_routed_experts": 18}, "n_routed_experts 18 does not divide into n_group 4: 18 = 4 x 4 + 2"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8 experts of topk_group 2 groups"),
    ({"n_group": 16, "topk_group": 8}, "n_group 16 of 16 experts leaves one a group"),
    ({"scoring_func": "softmax"}, 'scoring_func is "softmax", wanted "sigmoid"'),
    ({"topk_method": "noaux"}, 'topk_method is "noaux", wanted "noaux_tc"'),
    ({"num_experts_per_tok": 1}, "norm_topk_prob is true with num_experts_per_tok 1"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, wanted 0 or 1"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
    # switches and redundant keys
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu", wanted "silu"'),
    ({"attention_bias": True}, "attention_bias is true, wanted false"),
    ({"num_key_value_heads": 1}, "num_key_value_heads 1 contradicts num_attention_heads 4"),
    ({"head_dim": 128}, "head_dim 128 contradicts qk_rope_head_dim 64"),
    ({"qk_head_dim": 128}, "qk_head_dim 128 contradicts qk_nope_head_dim + qk_rope_head_dim 192"),
    ({"n_routed_experts": 16, "num_local_experts": 8}, "n_routed_experts 16 contradicts num_local_experts 8"),
    ({"index_topk": 2048}, "unknown key index_topk = 2048"),
    ({"routed_scaling_facter": 1.0}, "nearest known routed_scaling_factor"),
    # tokens
    ({"eos_token_id": 512}, "eos_token_id 512 is outside vocab_size 512"),
    ({"eos_token_id": "</s>"}, 'eos_token_id is "</s>", wanted a token id or a list of them'),
    # storage
    ({"torch_dtype": "float16"}, 'torch_dtype is "float16", wanted "bfloat16" or "float32"'),
    ({"dtype": "float32"}, 'torch_dtype "bfloat16" contradicts dtype "float32"'),
    ({"quantization_config": {"quant_method": "fp6"}}, 'quant_method "fp6" is unknown, nearest known "fp8"'),
    (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "known are fp8 (e4m3 in 128x128 blocks), awq (gemm), gptq",
    ),
    # packed
    ({"quantization_config": AWQ, "torch_dtype": "float16"}, None),
    ({"quantization_config": {**AWQ, "group_size": -1, "version": "GEMM", "backend": "autoawq"}}, None),
    ({"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 128}}, None),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config.group_size is missing"),
    ({"quantization_config": {**AWQ, "bits": 3}}, "quantization_config.bits is 3, wanted 4"),
    ({"quantization_config": {**AWQ, "group_size": 0}}, "quantization_config.group_size is 0, wanted a whole number"),
    ({"quantization_config": {**AWQ, "version": "gemv"}}, 'version is "gemv", wanted "gemm"'),
    ({"quantization_config": {**AWQ, "modules_to_not_convert": "o_proj"}}, 'is "o_proj", wanted a list of modules'),
    ({"quantization_config": {**AWQ, "x": 1}}, "unknown key quantization_config.x"),
    (
        {"quantization_config": {**GPTQMODEL, **AWQ, "method": "awq", "checkpoint_format": "gemm", "format": "gemm"}},
        None,
    ),
    ({"quantization_config": {**AWQ, "checkpoint_format": "gemv_fast"}}, 'checkpoint_format is "gemv_fast", wanted'),
    ({"quantization_config": {**AWQ, "method": "gptq"}}, 'quantization_config.method is "gptq", wanted "awq"'),
    ({"quantization_config": {**AWQ, "dynamic": {"+:x": {"bits": 8}}}}, "gives modules settings of their own"),
    ({"quantization_config": {**GPTQ, **GPTQMODEL, "method": "gptq", "format": "gptq"}}, None),
    ({"quantization_config": {**GPTQ, "method": "qqq"}}, 'quantization_config.method is "qqq", wanted "gptq"'),
    ({"quantization_config": GPTQ}, None),
    ({"quantization_config": {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2", "dynamic": {"-:.*kv_b.*": {}}}}, None),
    ({"quantization_config": {**GPTQ, "bits": 3}}, "quantization_config.bits is 3, wanted 4 or 8"),
    ({"quantization_config": {**GPTQ, "bits": "four"}}, 'quantization_config.bits is "four", wanted 4 or 8'),
    ({"quantization_config": {**GPTQ, "desc_act": True}}, "desc_act is true, wanted false: columns out of the order"),
    ({"quantization_config": {**GPTQ, "checkpoint_format": "marlin"}}, 'is "marlin", wanted "gptq" or "gptq_v2"'),
    ({"quantization_config": {**GPTQ, "format": "gptq_v2"}}, "contradicts quantization_config.format"),
    ({"quantization_config": {**GPTQ, "lm_head": True}}, "quantization_config.lm_head is true, wanted false"),
    ({"quantization_config": {**GPTQ, "pack_dtype": "int64"}}, 'pack_dtype is "int64", wanted "int32"'),
    ({"quantization_config": {**GPTQ, "dynamic": {"+:x": {"bits": 8}}}}, "gives modules settings of their own"),
    ({"quantization_config": {**GPTQ, "dynamic": ["x"]}}, 'dynamic is ["x"], wanted an object'),
    ({"quantization_config": {**GPTQ, "dynamic": {"-:(": {}}}}, 'dynamic "re:(" is no regular expression'),
    ({"quantization_config": compressed()}, None),
    ({"quantization_config": compressed(strategy="channel", group_size=None, num_bits=8, symmetric=False)}, None),
    ({"quantization_config": {**compressed(), "format": "float-quantized"}}, 'wanted "pack-quantized"'),
    ({"quantization_config": {**compressed(), "ignore": ["re:*"]}}, 'ignore "re:*" is no regular expression'),
    ({"quantization_config": {**compressed(), "config_groups": {}}}, "config_groups is missing, wanted one scheme"),
    ({"quantization_config": compressed(num_bits=3)}, "group_0.weights.num_bits is 3, wanted 4 or 8"),
    ({"quantization_config": compressed(type="float")}, 'weights.type is "float", wanted "int"'),
    ({"quantization_config": compressed(actorder="group")}, 'weights.actorder is "group", wanted "weight"'),
    ({"quantization_config": compressed(strategy="block")}, 'strategy is "block", wanted "group" or "channel"'),
    ({"quantization_config": compressed(group_size=None)}, "weights.group_size is null"),
    ({"quantization_config": compressed(strategy="channel")}, "weights.group_size 32 contradicts"),
    (
        {"quantization_config": compressed({"input_activations": {"num_bits": 8}})},
        "unknown key quantization_config.config_groups.group_0.input_activations",
    ),
    ({"quantization_config": TWO_SCHEMES}, "quantization_config.config_groups has 2 schemes of weights, wanted one"),
    (
        {"quantization_config": {**compressed(), "kv_cache_scheme": {"num_bits": 8}}},
        "unknown key quantization_config.kv_",
    ),
    ({"quantization_config": {}}, "quant_method null is unknown"),
    (
        {"quantization_config": {**FP8, "weight_block_size": [64, 128]}},
        "quantization_config.weight_block_size is [64, 128], wanted [128, 128]",
    ),
    ({"quantization_config": {**FP8, "fmt": "e5m2"}}, 'quantization_config.fmt is "e5m2", wanted "e4m3"'),
    ({"quantization_config": {**FP8, "activation_scheme": "static"}}, 'activation_scheme is "static"'),
    ({"quantization_config": {**FP8, "scale_fmt": "ue8m1"}}, 'scale_fmt is "ue8m1", wanted "ue8m0" or "float"'),
    ({"quantization_config": {**FP8, "modules_to_not_convert": ["o_proj"]}}, "every linear but lm_head is FP8"),
    ({"quantization_config": {**FP8, "kv_cache": "fp8"}}, "unknown key quantization_config.kv_cache"),
]


@pytest.mark.parametrize(("changes", "text"), ONE_FAULT)
def test_one_fault_is_one_line(folder, changes, text):
    change_config(folder, **changes)
    if text is None:
        read_config(folder)  # the neighbour of a fault, which is none
        return
    told = faults(folder)
    assert len(told) == 1, told
    assert text in told[0]
    assert "\n" not in told[0]


def test_all_faults_at_once_each_on_its_line(folder):
    change_config(
        folder,
        rope_scaling={"type": "yarn", "factor": "40"},
        first_k_dense_replace=9,
        topk_group=5,
        n_routed_experts=18,
        hidden_act="gelu",
    )
    with pytest.raises(DscError) as caught:
        read_config(folder)
    lines = str(caught.value).splitlines()
    where = str(folder / "config.json")
    assert lines[0] == f"{where} cannot be used: 6 faults"
    assert sorted(lines[1:]) == sorted(
        f"{where}: {text}"
        for text in (
            'rope_scaling.factor is "40", wanted a number of at least 1',
            "rope_scaling.original_max_position_embeddings is missing, wanted a whole number, 1 or more",
            "first_k_dense_replace 9 exceeds num_hidden_layers 3",
            "topk_group 5 exceeds n_group 4",
            "n_routed_experts 18 does not divide into n_group 4: 18 = 4 x 4 + 2",
            'hidden_act is "gelu", wanted "silu"',
        )
    )


def test_v2_variants_that_implementations_read_differently(tmp_path, made):
    (tmp_path / "config.json").write_text((made["v2"] / "config.json").read_text())
    change_config(tmp_path, norm_topk_prob=True, topk_method="greedy")
    assert faults(tmp_path) == [
        'topk_method "greedy" contradicts n_group 8: it knows no groups',
        "norm_topk_prob is true, wanted false: V2's implementations disagree on what it then means",
    ]
    change_config(tmp_path, norm_topk_prob=False, topk_method=ABSENT)
    assert faults(tmp_path) == ['topk_method is missing, wanted "greedy" or "group_limited_greedy"']


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "not found"), ("{", "not valid JSON"), ("[]", "not a JSON object"), ('{"a": 1, "a": 2}', "stands twice")],
)
def test_files_that_are_no_config(tmp_path, content, text):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(DscError, match=text):
        read_config(tmp_path)


def test_what_only_packed_sources_have_is_left_out_of_other_specs(tmp_path: Path) -> None:
    """Readers of engines from before know no such fields."""
    for family in ("r1", "v2-lite"):
        spec = read_config(make_checkpoint(tmp_path / family, family))
        assert spec.to_json()["source"].keys() == {"kind", "block", "scale_fmt"}
        assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
