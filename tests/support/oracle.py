"""What graphs and engines are compared with: transformers in float32, a plain MTP layer on top of it, and onnxruntime.

    oracle = Oracle(folder, tmp_path / "float32")
    logits, hidden = oracle.main(tokens)                 # [T, V], [T, D]; transformers' own classes
    logits, hidden = oracle.mtp(tokens[1:], hidden[:-1])
    outputs = OnnxGraph(import_main(...), folder).run(tokens=..., positions=..., logit_rows=...)

transformers 5.24 read against DeepSeek's own inference code, and what is done about each difference:

- `q_a_layernorm` and `kv_a_layernorm` are made without `eps` (DeepseekV2Attention and DeepseekV3Attention.__init__), so
  they take 1e-6 whatever rms_norm_eps says. DeepSeek's code has the same default and every release says 1e-6: asserted.
- DeepseekV2TopkRouter never reads norm_topk_prob. No V2 release sets it: asserted.
- DeepseekV2TopkRouter masks groups with 0 and DeepseekV3TopkRouter with -inf: the same choice, as softmax is above 0.
- DeepseekV3 writes rotated pairs de-interleaved, in q and k alike, which no score sees; DeepseekV2 keeps them interleaved.
- mscale enters the softmax scale squared in both families (yarn_apply_mscale), as it must; older releases lacked it in V2.
- kimi_k2 is not known; it is deepseek_v3 with other numbers and is loaded as that (`dequantize_checkpoint`).
- MTP tensors are not loaded by the model classes; the layer is written out here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

from dsc.compiler import tables
from dsc.compiler.ir.graph import Graph, expression_of
from dsc.compiler.ir.weight import Cast, Concat, Dequantize, Expression, Generated, Quantize, Reshape, Source, Stack
from support.families import dequantize_checkpoint, dequantized_tensors, read_tensors


class Oracle:
    """A checkpoint in transformers, float32. `scratch` receives the dequantized checkpoint."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.tensors = dequantized_tensors(folder)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        assert self.config["rms_norm_eps"] == 1e-6, self.config["rms_norm_eps"]
        if self.config["model_type"] == "deepseek_v2":
            assert not self.config["norm_topk_prob"]
        dequantize_checkpoint(folder, scratch)
        self.model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32, attn_implementation="eager")
        assert type(self.model) in (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM), type(self.model)
        self.model.eval().set_experts_implementation("eager")

    @torch.no_grad()
    def main(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and hidden rows after the final norm [T, D] of one sequence."""
        hidden = self.model.model(torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0]
        return self.model.lm_head(hidden), hidden

    @torch.no_grad()
    def mtp(self, successors: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and hidden rows after shared_head.norm [T, D] of the MTP layer.

        successors  token t_{i+1} for each row h_i of `hidden` [T, D], the main model's rows after its final norm
        """
        return MtpLayer(self.config, self.tensors).forward(torch.tensor(list(successors)), hidden)


class MtpLayer:
    """DeepSeek-V3's MTP layer (technical report, section 2.2) in plain torch: V3 routing, MLA with q_lora, positions 0, 1, ..."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.c, self.prefix = config, f"model.layers.{config['num_hidden_layers']}."
        self.tensors = tensors

    def forward(self, successors: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.tensors["model.embed_tokens.weight"][successors]
        both = torch.cat([self.norm("enorm", embedding), self.norm("hnorm", hidden)], -1)
        x = self.linear("eh_proj", both)
        x = x + self.attention(self.norm("input_layernorm", x))
        x = x + self.experts(self.norm("post_attention_layernorm", x))
        x = self.norm("shared_head.norm", x)
        return linear(x, self.tensors["lm_head.weight"]), x

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weight(name))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight(name), self.c["rms_norm_eps"])

    def attention(self, x: Tensor) -> Tensor:
        heads, nope, rope = self.c["num_attention_heads"], self.c["qk_nope_head_dim"], self.c["qk_rope_head_dim"]
        q = self.linear(
            "self_attn.q_b_proj", self.norm("self_attn.q_a_layernorm", self.linear("self_attn.q_a_proj", x))
        )
        q = q.view(len(x), heads, nope + rope).transpose(0, 1)
        latent, k_pe = self.linear("self_attn.kv_a_proj_with_mqa", x).split([self.c["kv_lora_rank"], rope], -1)
        kv = self.linear("self_attn.kv_b_proj", self.norm("self_attn.kv_a_layernorm", latent))
        k_nope, v = kv.view(len(x), heads, -1).transpose(0, 1).split([nope, self.c["v_head_dim"]], -1)
        q = torch.cat([q[..., :nope], self.rotate(q[..., nope:])], -1)
        k = torch.cat([k_nope, self.rotate(k_pe).expand(heads, -1, -1)], -1)
        yarn = self.c["rope_scaling"]
        mscale = 0.1 * yarn["mscale_all_dim"] * np.log(yarn["factor"]) + 1
        o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=float((nope + rope) ** -0.5 * mscale**2))
        return self.linear("self_attn.o_proj", o.transpose(0, 1).reshape(len(x), -1))

    def rotate(self, x: Tensor) -> Tensor:
        """Interleaved pairs of x [..., T, rope] as complex numbers, times e^(i * position * frequency)."""
        yarn, width, theta = self.c["rope_scaling"], self.c["qk_rope_head_dim"], self.c["rope_theta"]
        assert yarn["mscale"] == yarn["mscale_all_dim"]  # so that cos and sin keep magnitude 1
        pair = torch.arange(0, width, 2, dtype=torch.float64) / width
        turns = yarn["original_max_position_embeddings"] / (2 * np.pi)
        low, high = (width * np.log(turns / yarn[beta]) / (2 * np.log(theta)) for beta in ("beta_fast", "beta_slow"))
        low, high = max(np.floor(low), 0), min(np.ceil(high), width - 1)
        stretched = ((torch.arange(width // 2) - low) / (high - low)).clamp(0, 1)
        frequency = theta**-pair * (1 - stretched + stretched / yarn["factor"])
        angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), frequency)
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).float()

    def experts(self, x: Tensor) -> Tensor:
        """Token by token, so that nothing here is shared with the batched forms it is compared with."""
        count, groups, size = (
            self.c["n_routed_experts"],
            self.c["n_group"],
            self.c["n_routed_experts"] // self.c["n_group"],
        )
        rows = []
        for row in x:
            scores = self.linear("mlp.gate", row).sigmoid()
            choice = scores + self.tensors[f"{self.prefix}mlp.gate.e_score_correction_bias"]
            best = choice.view(groups, size).sort(-1, descending=True).values[:, :2].sum(-1).tolist()
            kept = sorted(range(groups), key=lambda g: -best[g])[: self.c["topk_group"]]
            allowed = [e for e in range(count) if e // size in kept]
            chosen = sorted(allowed, key=lambda e: -choice[e].item())[: self.c["num_experts_per_tok"]]
            weights = scores[chosen] / scores[chosen].sum() * self.c["routed_scaling_factor"]
            routed = sum(w * self.mlp(f"mlp.experts.{e}", row) for w, e in zip(weights, chosen, strict=True))
            rows.append(routed + self.mlp("mlp.shared_experts", row))
        return torch.stack(rows)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.linear(
            f"{name}.down_proj", silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        )


class OnnxGraph:
    """A graph of standard ops in onnxruntime, with its weights taken from a checkpoint."""

    def __init__(self, graph: Graph, folder: Path) -> None:
        stored = read_tensors(folder)
        model = graph.to_onnx()
        expressions = {name: expression_of(constant) for name, constant in graph.weights().items()}
        for proto in model.graph.initializer:
            if proto.name in expressions:
                values = evaluate(expressions[proto.name], stored).contiguous().numpy()
                del proto.external_data[:]
                proto.ClearField("data_location")
                proto.raw_data = values.tobytes()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def run(self, **inputs: Any) -> dict[str, Tensor]:
        """Outputs by name. Integer inputs become int32."""
        feeds = {k: np.asarray(v, np.float32 if k == "hidden" else np.int32) for k, v in inputs.items()}
        names = [output.name for output in self.session.get_outputs()]
        values = self.session.run(names, feeds)
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}


def sources(folder: Path) -> Callable[[str], Source]:
    """The stored dtype and shape of a checkpoint's tensors by name, as the importer asks for them."""
    stored = read_tensors(folder)
    return lambda name: Source(name, str(stored[name].dtype).removeprefix("torch."), tuple(stored[name].shape))


def evaluate(expression: Expression, stored: Mapping[str, Tensor]) -> Tensor:
    """A weight expression's values, whole, in the plainest way."""
    parts = [evaluate(item, stored) for item in expression.inputs]
    match expression:
        case Source():
            value = stored[expression.name]
        case Generated():
            value = torch.from_numpy(tables.evaluate(expression))
        case Cast():
            value = parts[0].to(getattr(torch, expression.to))
        case Reshape():
            value = parts[0].reshape(expression.to)
        case Dequantize():
            rows, cols = expression.block
            spread = parts[1].repeat_interleave(rows, 0).repeat_interleave(cols, 1)
            value = parts[0].float() * spread[: expression.shape[0], : expression.shape[1]]
        case Concat():
            value = torch.cat(parts)
        case Stack():
            value = torch.stack(parts)
        case Quantize() if not expression.parsed.quantized:
            value = parts[0].to(getattr(torch, expression.dtype))
        case _:
            raise NotImplementedError(expression)
    assert tuple(value.shape) == expression.shape, expression
    assert str(value.dtype) == f"torch.{expression.dtype}", expression
    return value


def worst_row_error(got: Tensor, wanted: Tensor) -> float:
    """The largest over rows of |got - wanted| / |wanted|: one bad row is not averaged away."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert got.numel(), "nothing to compare"
    assert bool(got.isfinite().all()), "not finite"
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
