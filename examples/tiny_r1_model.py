"""A trainable model of R1's architecture in plain torch; every number comes from a ModelSpec.

Modules are named as the checkpoint names its tensors, so `checkpoint_tensors` has little to translate: only routed experts
are held stacked. Every expert computes every token, which is the simple way and, at this size, the fast one.

Letters: B sequences, T tokens, D hidden, H heads, E experts, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsc.compiler.tables import evaluate, rope_table
from dsc.compiler.tensor_names import expected_tensors
from dsc.runtime.spec import ModelSpec

INIT_SD = 0.02


class RmsNorm(nn.Module):
    """x / rms(x) * weight, statistics in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.epsilon).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention, expanded: keys and values of every head are made from the latent."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        heads, hidden, epsilon = spec.num_heads, spec.hidden_size, spec.latent_norm_eps
        self.spec = spec
        if spec.q_lora_rank is None:
            self.q_proj = linear(hidden, heads * spec.qk_head_dim)
        else:
            self.q_a_proj = linear(hidden, spec.q_lora_rank)
            self.q_a_layernorm = RmsNorm(spec.q_lora_rank, epsilon)
            self.q_b_proj = linear(spec.q_lora_rank, heads * spec.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(hidden, spec.cache_width)
        self.kv_a_layernorm = RmsNorm(spec.kv_lora_rank, epsilon)
        self.kv_b_proj = linear(spec.kv_lora_rank, heads * (spec.qk_nope_head_dim + spec.v_head_dim))
        self.o_proj = linear(heads * spec.v_head_dim, hidden)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        spec = self.spec
        split = [spec.qk_nope_head_dim, spec.qk_rope_head_dim]
        q_nope, q_pe = self.heads(self.queries(x_BTD)).split(split, -1)
        latent, k_pe = self.kv_a_proj_with_mqa(x_BTD).split([spec.kv_lora_rank, spec.qk_rope_head_dim], -1)
        kv = self.heads(self.kv_b_proj(self.kv_a_layernorm(latent)))
        k_nope, v = kv.split([spec.qk_nope_head_dim, spec.v_head_dim], -1)
        k_pe = rotate(k_pe.unsqueeze(1), cos, sin).expand(-1, spec.num_heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_pe, cos, sin)], -1)
        k = torch.cat([k_nope, k_pe], -1)
        o = F.scaled_dot_product_attention(q, k, v.contiguous(), is_causal=True, scale=spec.softmax_scale)
        return self.o_proj(o.transpose(1, 2).flatten(2))

    def queries(self, x_BTD: Tensor) -> Tensor:
        """All heads' queries side by side, not rotated."""
        if self.spec.q_lora_rank is None:
            return self.q_proj(x_BTD)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, H * width] -> [B, H, T, width]."""
        return x.unflatten(-1, (self.spec.num_heads, -1)).transpose(1, 2)


class Mlp(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(spec.hidden_size, width), linear(spec.hidden_size, width)
        self.down_proj = linear(width, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """V3's gate: sigmoid scores; a bias that only chooses; the best groups, then the best experts of these."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.randn(spec.num_experts, spec.hidden_size) * INIT_SD)
        self.register_buffer("e_score_correction_bias", torch.zeros(spec.num_experts))
        self.register_buffer("load", torch.zeros(spec.num_experts), persistent=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Weights [T, E], zero for experts that were not chosen; `load` becomes the share of tokens of each expert."""
        spec = self.spec
        with torch.autocast(x_TD.device.type, enabled=False):
            scores_TE = F.linear(x_TD.float(), self.weight.float()).sigmoid()
        choice_TGE = (scores_TE.detach() + self.e_score_correction_bias).unflatten(-1, (spec.num_groups, -1))
        if spec.num_groups > 1:
            best_TG = choice_TGE.topk(2, -1).values.sum(-1)
            kept_TG = one_hots(best_TG.topk(spec.topk_groups, -1).indices, spec.num_groups)
            choice_TGE = choice_TGE.masked_fill(kept_TG.unsqueeze(-1) == 0, float("-inf"))
        chosen_TE = one_hots(choice_TGE.flatten(1).topk(spec.experts_per_token, -1).indices, spec.num_experts)
        if self.training:
            self.load.copy_(chosen_TE.mean(0))
        weights_TE = scores_TE * chosen_TE
        if spec.norm_topk_prob:
            weights_TE = weights_TE / (weights_TE.sum(-1, keepdim=True) + 1e-20)
        return weights_TE * spec.routed_scaling_factor

    def balance(self, step: float) -> None:
        """Move the bias of busy experts down and of idle ones up: balance without a loss (arXiv 2408.15664)."""
        self.e_score_correction_bias += step * torch.sign(self.load.mean() - self.load)


class Experts(nn.Module):
    """Routed experts, stacked in the checkpoint's orientation: gate and up [E, F, D], down [E, D, F]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        count, hidden, width = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.randn(count, width, hidden) * INIT_SD)
        self.up_proj = nn.Parameter(torch.randn(count, width, hidden) * INIT_SD)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, width) * INIT_SD)

    def forward(self, x_TD: Tensor, weights_TE: Tensor) -> Tensor:
        gate, up, down = (w.to(x_TD.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj))
        h_ETF = F.silu(torch.einsum("td,efd->etf", x_TD, gate)) * torch.einsum("td,efd->etf", x_TD, up)
        return torch.einsum("etf,edf->td", h_ETF * weights_TE.t().unsqueeze(-1).to(h_ETF.dtype), down)


class Moe(nn.Module):
    """Routed experts and shared ones, which are one MLP and unweighted."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate, self.experts = Router(spec), Experts(spec)
        self.shared_experts = Mlp(spec, spec.shared_intermediate_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_TD = x_BTD.flatten(0, 1)
        return (self.experts(x_TD, self.gate(x_TD)) + self.shared_experts(x_TD)).view_as(x_BTD)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = Moe(spec) if spec.is_moe(layer) else Mlp(spec, spec.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpLayer(DecoderLayer):
    """One token further: successor's embedding and hidden state joined, a decoder layer, a norm (V3 report, 2.2)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.enorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hnorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.eh_proj = linear(2 * spec.hidden_size, spec.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": RmsNorm(spec.hidden_size, spec.rms_norm_eps)})

    def draft(self, successors: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Embeddings of t_{i+1} and h_i, each [B, T, D] -> what the head turns into t_{i+2}."""
        joined = self.eh_proj(torch.cat([self.enorm(successors), self.hnorm(hidden)], -1))
        return self.shared_head["norm"](self(joined, cos, sin))


class TinyR1(nn.Module):
    """The main model and its MTP layer, with one embedding table and one head."""

    def __init__(self, spec: ModelSpec, context_tokens: int) -> None:
        super().__init__()
        assert spec.scoring == "sigmoid", spec.scoring
        assert spec.num_mtp_layers == 1, spec.num_mtp_layers
        self.spec = spec
        layers: list[nn.Module] = [DecoderLayer(spec, layer) for layer in range(spec.num_layers)]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(spec.vocab_size, spec.hidden_size),
                "layers": nn.ModuleList([*layers, MtpLayer(spec, spec.num_layers)]),
                "norm": RmsNorm(spec.hidden_size, spec.rms_norm_eps),
            }
        )
        nn.init.normal_(self.model["embed_tokens"].weight, std=INIT_SD)
        self.lm_head = linear(spec.hidden_size, spec.vocab_size)
        for part in ("cos", "sin"):
            table = torch.from_numpy(evaluate(rope_table(spec, context_tokens, part)))
            self.register_buffer(part, table, persistent=False)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T - 2, V] of the main model for tokens 1.. and of the MTP layer for tokens 2.., float32."""
        embedded, count = self.model["embed_tokens"](tokens_BT), tokens_BT.shape[1] - 2
        tables = self.cos[:count], self.sin[:count]
        *layers, mtp = self.model["layers"]
        x = embedded[:, :count]
        for layer in layers:
            x = layer(x, *tables)
        hidden = self.model["norm"](x)
        drafted = mtp.draft(embedded[:, 1:-1], hidden, *tables)
        return self.lm_head(hidden).float(), self.lm_head(drafted).float()

    def routers(self) -> list[Router]:
        """The router of every MoE layer."""
        return [module for module in self.modules() if isinstance(module, Router)]


def checkpoint_tensors(model: TinyR1) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the release by name, unquantized, as views of the model's own (copies of embeddings included)."""
    state = model.state_dict()
    for name, value in state.items():
        experts, _, projection = name.partition(".experts.")
        if projection:
            for expert, weight in enumerate(value):
                yield f"{experts}.experts.{expert}.{projection}.weight", weight
        else:
            yield name, value
    for name, expected in expected_tensors(model.spec).items():
        if expected.copy_of and not model.spec.tie_word_embeddings:
            yield name, state[expected.copy_of]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last axis of x [B, H, T, rope] by tables [T, rope / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


def one_hots(indices: Tensor, depth: int) -> Tensor:
    """indices [T, K] -> [T, depth], 1 at each of a row's indices."""
    return torch.zeros(len(indices), depth, device=indices.device).scatter_(1, indices, 1.0)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without bias, weights N(0, INIT_SD)."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=INIT_SD)
    return layer
