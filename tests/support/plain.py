"""tiny-r1 in plain torch with FP8 products: what an fp8 engine must compute, written without any of dsc's code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from support.oracle import MtpLayer

EXACT = ("mlp.gate", "eh_proj", "self_attn.kv_b_proj")  # products whose left side stays as it is


class PlainFp8(MtpLayer):
    """The main model, layer by layer: every product's left side rounded to e4m3 in groups of 128.

    activations  dtype of what lies between products
    """

    def __init__(self, config: dict, tensors: dict[str, Tensor], activations: torch.dtype) -> None:
        super().__init__(config, tensors)
        self.activations = activations

    def main(self, tokens: Sequence[int]) -> Tensor:
        """Logits [T, V] of one sequence."""
        x = self.tensors["model.embed_tokens.weight"][list(tokens)]
        for layer in range(self.c["num_hidden_layers"]):
            self.prefix = f"model.layers.{layer}."
            x = self.round(x + self.attention(self.norm("input_layernorm", x)))
            feed = self.mlp_dense if layer < self.c["first_k_dense_replace"] else self.experts
            x = self.round(x + self.round(feed(self.norm("post_attention_layernorm", x))))
        self.prefix = "model."
        return linear(self.norm("norm", x), self.tensors["lm_head.weight"])

    def mlp_dense(self, x: Tensor) -> Tensor:
        return self.mlp("mlp", x)

    def linear(self, name: str, x: Tensor) -> Tensor:
        if name == "mlp.gate":  # the router is float32 throughout
            return linear(x, self.weight(name))
        return self.round(linear(x if name in EXACT else round_e4m3(x), self.weight(name)))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.round(super().norm(name, x))

    def round(self, x: Tensor) -> Tensor:
        return x.to(self.activations).float()


def round_e4m3(x: Tensor) -> Tensor:
    """DeepSeek-V3 inference/kernel.py, act_quant: amax/448 per 128 values, and back."""
    groups = x.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
