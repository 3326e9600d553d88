"""Small random checkpoints exactly as DeepSeek and Moonshot release them, one per family, for every test that needs a model.

Use from any test (tests/conftest.py puts the tests folder on sys.path):

    from support.families import dequantize_checkpoint, make_checkpoint

    folder = make_checkpoint(tmp_path / "r1", "r1", num_hidden_layers=4)
    reference = dequantize_checkpoint(folder, tmp_path / "r1-float32")     # what transformers loads

Head and latent sizes are the real ones (128 + 64 per query head, latent 512), except in `faults`; widths, layers and experts
are few. A tensor's values depend on its name and the seed only, so changing one option leaves the other tensors as they were.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FAMILIES = ("v2-lite", "v2", "v3", "r1", "v3.1", "k2", "faults")
TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "tiny-r1"
BLOCK = 128
ABSENT = object()  # as an override: the key is not written at all

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
         "original_max_position_embeddings": 4096, "type": "yarn"}  # fmt: skip
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
# Every key that the releases have, at R1's value where size does not matter.
_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": _FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 512,
}
_V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_nextn_predict_layers": ABSENT,
    "quantization_config": ABSENT,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "scoring_func": "softmax",
}
_CHANGES: dict[str, dict[str, Any]] = {
    "v2-lite": {
        **_V2, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "n_routed_experts": 8, "num_experts_per_tok": 3,
    },
    "v2": {
        **_V2, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0, "num_experts_per_tok": 6,
    },
    "v3": {},
    "r1": {},
    "v3.1": {"quantization_config": {**_FP8, "scale_fmt": "ue8m0"}},
    "k2": {
        "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 12, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
        "max_position_embeddings": 131072, "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    },
    "faults": {
        "num_hidden_layers": 4, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "intermediate_size": 320, "moe_intermediate_size": 96, "vocab_size": 515,
    },
}  # fmt: skip


def make_checkpoint(folder: Path, family: str, *, seed: int = 0, shards: int = 3, **overrides: Any) -> Path:
    """Write a random checkpoint of `family` (one of FAMILIES) into `folder` and return it.

    overrides  config.json keys; ABSENT leaves a key out. `quantization_config=ABSENT` stores bfloat16 weights.
    A weight and its scale always lie in different shards when there are two shards or more.
    """
    config = {**_COMMON, **_CHANGES[family], **overrides}
    config = {key: value for key, value in config.items() if value is not ABSENT}
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    write_tensors(folder, _tensors(config, seed), shards)
    _write_tokenizer(folder, config)
    generation = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1,
                  "do_sample": True, "temperature": 0.6, "top_p": 0.95}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    return folder


def dequantize_checkpoint(folder: Path, out: Path) -> Path:
    """The same model in float32, without scales, quantization_config and MTP layer: what the transformers oracle loads.

    kimi_k2, which transformers does not know, becomes the deepseek_v3 that it is.
    """
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    config.pop("auto_map", None)
    config["torch_dtype"] = "float32"
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0
    out.mkdir(parents=True, exist_ok=True)
    write_config(out, config)
    mtp = f"model.layers.{config['num_hidden_layers']}."
    tensors = {name: value for name, value in dequantized_tensors(folder).items() if not name.startswith(mtp)}
    write_tensors(out, tensors, 1)
    for path in folder.iterdir():
        if path.name == "generation_config.json" or path.name.startswith("tokenizer"):
            shutil.copyfile(path, out / path.name)
    return out


def dequantized_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, MTP layer included, in float32; codes times scales where it has scales."""
    tensors = read_tensors(folder)
    values = {}
    for name, value in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        values[name] = value.float()
        if f"{name}_scale_inv" in tensors:
            rows, cols = value.shape
            scales = tensors[f"{name}_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            values[name] = values[name] * scales[:rows, :cols]
    return values


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor of a checkpoint as it is."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 3) -> None:
    """Write shards and their index, replacing those there; one shard is a `model.safetensors` without an index."""
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    total = sum(t.nbytes for t in tensors.values())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    weights = {name: value for name, value in tensors.items() if not name.endswith("_scale_inv")}
    done = 0
    for name, value in weights.items():
        part = min(done * shards // total, shards - 1)
        parts[part][name] = value
        done += value.nbytes
        if f"{name}_scale_inv" in tensors:
            parts[(part + 1) % shards][f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"]
    loose = [name for name in tensors if not any(name in part for part in parts)]
    parts[-1].update({name: tensors[name] for name in loose})
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for file, part in zip(files, parts, strict=True):
        save_file(part, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], shards: int = 3) -> None:
    """Rewrite a checkpoint's tensors after `change` edited their dict in place."""
    tensors = {name: value.clone() for name, value in read_tensors(folder).items()}
    change(tensors)
    write_tensors(folder, tensors, shards)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; ABSENT removes one."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    write_config(folder, {key: value for key, value in config.items() if value is not ABSENT})


def quantize_fp8(weight: torch.Tensor, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] floats -> e4m3 codes [N, K] and float32 scales [ceil(N/128), ceil(K/128)], scale = amax / 448 of a block.

    power_of_two  scales 2^ceil(log2(amax / 448)), as V3.1 stores them
    """
    rows, cols = weight.shape
    row_blocks, col_blocks = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = torch.zeros(row_blocks * BLOCK, col_blocks * BLOCK)
    padded[:rows, :cols] = weight.float()
    blocks = padded.view(row_blocks, BLOCK, col_blocks, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-12) / 448.0
    if power_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (blocks / scales[:, None, :, None]).clamp(-448, 448).reshape(padded.shape)[:rows, :cols]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales.contiguous()


# -- the tensors of a config


def _tensors(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor the release would have, values a function of (seed, name)."""
    made: dict[str, torch.Tensor] = {}
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    quantization = config.get("quantization_config")

    def plain(name: str, *shape: int, sd: float, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        made[name] = (torch.randn(shape, generator=generator) * sd + mean).to(dtype)

    def norm(name: str, width: int) -> None:
        plain(f"{name}.weight", width, sd=0.1, mean=1.0)

    def linear(name: str, rows: int, cols: int) -> None:
        plain(f"{name}.weight", rows, cols, sd=cols**-0.5, dtype=torch.float32)
        weight = made[f"{name}.weight"]
        if not quantization:
            made[f"{name}.weight"] = weight.bfloat16()
            return
        # V3.1's own o_proj scales are not powers of two, whatever it declares.
        exact = quantization.get("scale_fmt") == "ue8m0" and not name.endswith("o_proj")
        made[f"{name}.weight"], made[f"{name}.weight_scale_inv"] = quantize_fp8(weight.bfloat16(), exact)

    def mlp(name: str, width: int) -> None:
        linear(f"{name}.gate_proj", width, hidden)
        linear(f"{name}.up_proj", width, hidden)
        linear(f"{name}.down_proj", hidden, width)

    def decoder_layer(name: str, moe: bool) -> None:
        _attention(config, f"{name}.self_attn", linear, norm)
        norm(f"{name}.input_layernorm", hidden)
        norm(f"{name}.post_attention_layernorm", hidden)
        if not moe:
            mlp(f"{name}.mlp", config["intermediate_size"])
            return
        plain(f"{name}.mlp.gate.weight", config["n_routed_experts"], hidden, sd=1.5 * hidden**-0.5)
        if config.get("topk_method") == "noaux_tc":
            bias = f"{name}.mlp.gate.e_score_correction_bias"
            plain(bias, config["n_routed_experts"], sd=0.15, dtype=torch.float32)
        for expert in range(config["n_routed_experts"]):
            mlp(f"{name}.mlp.experts.{expert}", config["moe_intermediate_size"])
        if config["n_shared_experts"]:
            mlp(f"{name}.mlp.shared_experts", config["n_shared_experts"] * config["moe_intermediate_size"])

    plain("model.embed_tokens.weight", vocab, hidden, sd=1.0)
    for layer in range(layers):
        decoder_layer(f"model.layers.{layer}", layer >= config["first_k_dense_replace"])
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        plain("lm_head.weight", vocab, hidden, sd=2.0 * hidden**-0.5)
    for layer in range(layers, layers + config.get("num_nextn_predict_layers", 0)):
        name = f"model.layers.{layer}"
        made[f"{name}.embed_tokens.weight"] = made["model.embed_tokens.weight"].clone()
        norm(f"{name}.enorm", hidden)
        norm(f"{name}.hnorm", hidden)
        plain(f"{name}.eh_proj.weight", hidden, 2 * hidden, sd=(2 * hidden) ** -0.5)
        decoder_layer(name, moe=True)
        norm(f"{name}.shared_head.norm", hidden)
        head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
        made[f"{name}.shared_head.head.weight"] = made[head].clone()
    return made


def _attention(
    config: Mapping[str, Any], name: str, linear: Callable[[str, int, int], None], norm: Callable[[str, int], None]
) -> None:
    heads, hidden, q_lora = config["num_attention_heads"], config["hidden_size"], config["q_lora_rank"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    if q_lora is None:
        linear(f"{name}.q_proj", heads * (nope + rope), hidden)
    else:
        linear(f"{name}.q_a_proj", q_lora, hidden)
        norm(f"{name}.q_a_layernorm", q_lora)
        linear(f"{name}.q_b_proj", heads * (nope + rope), q_lora)
    linear(f"{name}.kv_a_proj_with_mqa", latent + rope, hidden)
    norm(f"{name}.kv_a_layernorm", latent)
    linear(f"{name}.kv_b_proj", heads * (nope + value), latent)
    linear(f"{name}.o_proj", hidden, heads * value)


def _write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """tiny-r1's byte-level BPE cut to the first vocab_size ids; its merges are in id order, so a prefix of them stays."""
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    model = tokenizer["model"]
    num_unmerged = len(model["vocab"]) - len(model["merges"])
    assert config["vocab_size"] >= num_unmerged, f"vocab_size {config['vocab_size']} is under {num_unmerged}"
    model["vocab"] = {text: i for text, i in model["vocab"].items() if i < config["vocab_size"]}
    model["merges"] = model["merges"][: max(len(model["vocab"]) - num_unmerged, 0)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    shutil.copyfile(TOKENIZER / "tokenizer_config.json", folder / "tokenizer_config.json")
