"""ModelSpec: what a DeepSeek model is, in numbers. Filled by the compiler from config.json, kept in the engine's manifest.

A leaf: imports only the standard library.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (Peng et al. 2023, arXiv 2309.00071), as in DeepSeek's modeling code."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    def magnitude(self, mscale: float) -> float:
        """0.1 * mscale * ln(factor) + 1, DeepSeek's yarn_get_mscale; 1 where the factor does not extend."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class Packing:
    """Linear weights as integer codes packed into int32 words: value = (code - zero) * scale.

    A leaf's facts; which tensors they are stored in follows from the method (dsc.compiler.packing).
    """

    method: str  # awq, gptq, compressed-tensors
    bits: int  # of a code: 4 or 8
    group: int = 0  # columns that share a scale and a zero; 0: all of a row
    zeros: bool = True  # stored; without them every zero is 2^(bits - 1)
    zero_offset: int = 0  # what is added to a stored zero: 1 in GPTQ's first format

    @property
    def middle(self) -> int:
        """The zero of symmetric codes."""
        return 1 << (self.bits - 1)

    def groups(self, columns: int) -> int:
        """Groups of a row; the last may be partial."""
        return -(-columns // (self.group or columns))


@dataclass(frozen=True)
class SourceFormat:
    """How the checkpoint stores its linear weights."""

    kind: str  # "bf16", "fp32", "fp8" or "packed"
    block: tuple[int, int] = (128, 128)  # fp8: rows and columns that share one scale
    scale_fmt: str = ""  # "ue8m0": activations are quantized with powers of two (V3.1)
    packing: Packing | None = None  # packed: how those that are packed are
    packed: tuple[
        str, ...
    ] = ()  # packed: modules that config.json says are, () for all (dsc.compiler.packing.declared)
    unpacked: tuple[str, ...] = ()  # packed: modules that it says are not


@dataclass(frozen=True)
class ModelSpec:
    """One model of the family. Counts are `num_*`; `None` means the model has no such part."""

    family: str  # deepseek_v2, deepseek_v3, kimi_k2
    architecture: str  # as in config.json
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None  # None: one q_proj
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    num_groups: int
    topk_groups: int
    scoring: str  # sigmoid or softmax
    group_score: str  # top2_sum (V3), max (V2) or none (no groups)
    norm_topk_prob: bool
    routed_scaling_factor: float
    router_bias: bool  # e_score_correction_bias
    num_dense_layers: int  # first_k_dense_replace
    num_mtp_layers: int
    rms_norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    source: SourceFormat

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the part without position and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values cached per token and layer: the normed latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which are stored as one MLP."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-0.5 * m^2, m = yarn.magnitude(mscale_all_dim): DeepseekV3Attention.softmax_scale."""
        scale: float = self.qk_head_dim**-0.5
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= self.yarn.magnitude(self.yarn.mscale_all_dim) ** 2
        return scale

    @property
    def latent_norm_eps(self) -> float:
        """Epsilon of q_a_layernorm and kv_a_layernorm: DeepseekV3RMSNorm's default, whatever rms_norm_eps says.

        DeepseekV2Attention and DeepseekV3Attention make those two norms without one (the releases say 1e-6 anyway).
        """
        return 1e-6

    def is_moe(self, layer: int) -> bool:
        """Whether a decoder layer (MTP layers follow the last) has experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back. What only packed sources have is left out of others."""
        data = asdict(self)
        if self.source.packing is None:
            data["source"] = {key: data["source"][key] for key in ("kind", "block", "scale_fmt")}
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        """The inverse of `to_json`; raises TypeError on a missing or unknown field."""
        data = dict(data)
        if data["yarn"] is not None:
            data["yarn"] = Yarn(**data["yarn"])
        source = dict(data["source"])
        for key in ("block", "packed", "unpacked"):
            source[key] = tuple(source[key]) if key in source else getattr(SourceFormat, key)
        if source.get("packing") is not None:
            source["packing"] = Packing(**source["packing"])
        data["source"] = SourceFormat(**source)
        data["eos_token_ids"] = tuple(data["eos_token_ids"])
        return cls(**data)
