"""How config.json says that linear weights are stored: floats, FP8 blocks, or integer codes that a tool has packed.

Keys of the tools: AutoAWQ, AutoGPTQ, GPTQModel and auto-round, compressed-tensors (llm-compressor).
"""

from __future__ import annotations

import re
from typing import Any

from dsc.compiler.json_fields import JsonFields, show
from dsc.runtime.errors import nearest
from dsc.runtime.spec import Packing, SourceFormat

METHODS = ("fp8", "awq", "gptq", "compressed-tensors")
# Keys that tell how a quantizer was run, or how one should run the result: what is stored is the same.
RUN_KEYS = (
    "amp", "autoround_version", "backend", "batch_size", "cache_block_outputs", "damp_auto_increment", "damp_percent",
    "data_type", "dataset", "do_fuse", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "exllama_config", "fuse_max_seq_len", "gradient_accumulate_steps", "group_aware", "iters", "low_cpu_mem_usage",
    "low_gpu_mem_usage", "lr", "max_input_length", "meta", "minmax_lr", "model_file_base_name", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "module_seqlen", "mse", "nsamples", "pad_token_id", "provider",
    "scale_dtype", "seqlen", "static_groups", "super_bits", "super_group_size", "tokenizer", "train_bs",
    "true_sequential", "use_cuda_fp16", "use_exllama", "use_quant_input",
)  # fmt: skip
# Keys that name the modules that are quantized, without those that are not: what is stored tells.
MODULE_KEYS = ("block_name_to_quantize", "modules_in_block_to_quantize", "modules_to_fuse", "to_quant_block_names")
COMPRESSED_KEYS = ("global_compression_ratio", "version")
WEIGHT_KEYS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


def read_source_format(config: JsonFields) -> SourceFormat | None:
    """How linear weights are stored; None after a fault. Without a quantization_config they are floats."""
    quantization = config.object("quantization_config")
    method = None if quantization is None else quantization.raw("quant_method")
    packs = method in METHODS[1:]
    dtypes = ("bfloat16", "float32", "float16") if packs else ("bfloat16", "float32")
    dtype = config.choice(config.alias("torch_dtype", "dtype"), dtypes, "bfloat16")
    if quantization is None:
        return SourceFormat("fp32" if dtype == "float32" else "bf16")
    if method not in METHODS:
        close = nearest(str(method), METHODS) or METHODS[0]
        config.fault(
            f'quant_method {show(method)} is unknown, nearest known "{close}"; '
            "known are fp8 (e4m3 in 128x128 blocks), awq (gemm), gptq and compressed-tensors (pack-quantized)"
        )
        return None
    readers = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}
    return readers[str(method)](quantization)


def _fp8(quantization: JsonFields) -> SourceFormat:
    quantization.choice("fmt", ("e4m3",), "e4m3")
    quantization.choice("activation_scheme", ("dynamic",), "dynamic")
    scale_fmt = quantization.choice("scale_fmt", ("ue8m0", "float"), "float")
    quantization.choice("weight_block_size", ([128, 128],))
    for key in ("modules_to_not_convert", "ignored_layers"):
        kept = quantization.raw(key)
        if kept not in (None, [], ["lm_head"]):
            quantization.fault(
                f"{quantization.name(key)} is {show(kept)}, wanted none: every linear but lm_head is FP8"
            )
    quantization.unknown(())
    return SourceFormat("fp8", (128, 128), "ue8m0" if scale_fmt == "ue8m0" else "")


def _awq(quantization: JsonFields) -> SourceFormat:
    """AutoAWQ's layout for its GEMM kernels. Zeros are stored whatever zero_point says."""
    bits = quantization.choice(quantization.alias("bits", "w_bit"), (4,))
    group = _group(quantization, quantization.alias("group_size", "q_group_size"))
    for key in ("version", "checkpoint_format", "format"):  # GPTQModel writes all three
        quantization.choice(key, ("gemm", "GEMM"), "gemm")
    quantization.choice("method", ("awq",), "awq")
    quantization.choice("pack_dtype", ("int32",), "int32")
    quantization.choice("desc_act", (False,), False)
    quantization.flag("zero_point", True)
    quantization.flag("sym", True)
    quantization.choice("lm_head", (False,), False)
    kept = tuple(f"*{name}" for name in _names(quantization, "modules_to_not_convert")) + _dynamic(quantization)
    quantization.unknown((*RUN_KEYS, *MODULE_KEYS))
    return SourceFormat("packed", packing=Packing("awq", bits or 4, group or 0), unpacked=kept)


def _gptq(quantization: JsonFields) -> SourceFormat:
    """AutoGPTQ's layout; its first format stores every zero less one."""
    bits = quantization.choice("bits", (4, 8))
    group = _group(quantization, "group_size")
    format_ = quantization.choice(quantization.alias("checkpoint_format", "format"), ("gptq", "gptq_v2"), "gptq")
    quantization.choice("method", ("gptq",), "gptq")
    quantization.flag("sym", True)
    quantization.choice("lm_head", (False,), False)
    quantization.choice("pack_dtype", ("int32",), "int32")
    if quantization.flag("desc_act", False):
        quantization.fault(
            f"{quantization.name('desc_act')} is true, wanted false: columns out of the order of their groups are not built"
        )
    kept = _dynamic(quantization)
    quantization.unknown((*RUN_KEYS, *MODULE_KEYS))
    packing = Packing("gptq", bits or 4, group or 0, zero_offset=0 if format_ == "gptq_v2" else 1)
    return SourceFormat("packed", packing=packing, unpacked=kept)


def _dynamic(quantization: JsonFields) -> tuple[str, ...]:
    """GPTQModel's table of modules that differ: those that are left out, "-:REGEX"; others are refused."""
    table = quantization.raw("dynamic") or {}
    if not isinstance(table, dict):
        quantization.fault(f"{quantization.name('dynamic')} is {show(table)}, wanted an object")
        return ()
    others = [key for key in table if not key.startswith("-:")]
    if others:
        what = f"{quantization.name('dynamic')} gives modules settings of their own ({show(others[0])})"
        quantization.fault(f'{what}, wanted only "-:REGEX", which leaves modules out')
    kept = tuple(f"re:{key[2:]}" for key in table if key.startswith("-:"))
    _check_patterns(quantization, "dynamic", kept)
    return kept


def _compressed_tensors(quantization: JsonFields) -> SourceFormat | None:
    """compressed-tensors' pack-quantized: one scheme of weights, no activations."""
    quantization.choice("format", ("pack-quantized",))
    quantization.choice("quantization_status", ("compressed",), "compressed")
    ignored = tuple(_names(quantization, "ignore"))
    _check_patterns(quantization, "ignore", ignored)
    groups = quantization.object("config_groups")
    schemes: dict[Packing, None] = {}
    targets: list[str] = []
    for key in groups.keys() if groups is not None else ():
        assert groups is not None
        group = groups.object(key)
        if group is None:
            groups.fault(f"{groups.name(key)} is null, wanted an object")
            continue
        wanted = _names(group, "targets")
        _check_patterns(group, "targets", wanted)
        targets += wanted
        group.choice("format", ("pack-quantized",), "pack-quantized")
        weights = group.object("weights")
        group.unknown(())  # activations too: those of pack-quantized are none
        if weights is None:
            group.fault(f"{group.name('weights')} is missing, wanted an object")
        elif (packing := _weights(weights)) is not None:
            schemes[packing] = None
    quantization.unknown(COMPRESSED_KEYS)
    if len(schemes) != 1:
        if groups is None or not groups.keys():
            quantization.fault(f"{quantization.name('config_groups')} is missing, wanted one scheme of weights")
        elif schemes:
            quantization.fault(f"{groups.path} has {len(schemes)} schemes of weights, wanted one")
        return None
    # The name of a class stands for all of its modules; every linear is a "Linear".
    named = () if "Linear" in targets else tuple(targets)
    return SourceFormat("packed", packing=next(iter(schemes)), packed=named, unpacked=ignored)


def _weights(weights: JsonFields) -> Packing | None:
    bits = weights.choice("num_bits", (4, 8))
    weights.choice("type", ("int",), "int")
    symmetric = weights.flag("symmetric", True)
    strategy = weights.choice("strategy", ("group", "channel"))
    group = weights.raw("group_size")
    if strategy == "group":
        group = weights.integer("group_size")
    elif strategy == "channel" and group not in (None, -1):
        weights.fault(
            f"{weights.name('group_size')} {show(group)} contradicts {weights.name('strategy')} {show(strategy)}"
        )
    if (order := weights.raw("actorder")) not in (None, False, "weight", "static"):
        what = f'{weights.name("actorder")} is {show(order)}, wanted "weight" or null'
        weights.fault(f"{what}: columns out of the order of their groups are not built")
    weights.choice("dynamic", (False,), False)
    weights.unknown(WEIGHT_KEYS)
    if bits is None or symmetric is None or strategy is None or (strategy == "group" and group is None):
        return None
    return Packing("compressed-tensors", bits, group if strategy == "group" else 0, zeros=not symmetric)


def _group(fields: JsonFields, key: str) -> int | None:
    """Columns of a group; 0 for -1, a whole row."""
    if fields.raw(key) == -1:
        return 0
    size: int | None = fields.integer(key)
    return size


def _names(fields: JsonFields, key: str) -> list[str]:
    """A list of modules, null for none."""
    value: Any = fields.raw(key)
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(name, str) and name for name in value):
        return value
    fields.fault(f"{fields.name(key)} is {show(value)}, wanted a list of modules")
    return []


def _check_patterns(fields: JsonFields, key: str, patterns: tuple[str, ...] | list[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern[3:] if pattern.startswith("re:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            fields.fault(f"{fields.name(key)} {show(pattern)} is no regular expression: {error}")
