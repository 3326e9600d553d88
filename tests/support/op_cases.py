"""Random operands for every plugin op, at sizes where its edges show: the contract test walks plugin folders with these.

`CASES[op](draw)` gives the operands and attributes of one node; a `Draw` says how many tokens, which dtype, which weight
format, and is the source of random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from dsc.plugins.schema import Attribute, load_op
from dsc.plugins.stored import StoredWeight, norm_codes
from support.cpu_op import CpuOp, Operand, type_of
from support.paged import make_batch, rope_tables
from support.random_weights import random_weight

D, F, E, K, V = 128, 64, 8, 3, 112
HEADS, NOPE, ROPE, VALUE, LATENT, Q_LORA, BLOCK = 2, 32, 16, 32, 64, 96, 8
# For kernels, which have sources of their own for these: head widths of the released models, whole blocks of 128.
MODEL_WIDTHS = {"D": 512, "F": 256, "V": 1000, "HEADS": 16, "NOPE": 128, "ROPE": 64, "VALUE": 128, "LATENT": 512,
                "Q_LORA": 1536, "BLOCK": 64}  # fmt: skip


@contextmanager
def model_widths() -> Iterator[None]:
    """Cases made inside are of MODEL_WIDTHS."""
    before = {name: globals()[name] for name in MODEL_WIDTHS}
    globals().update(MODEL_WIDTHS)
    try:
        yield
    finally:
        globals().update(before)


@dataclass(frozen=True)
class Case:
    """A node to run. `kinds` are the tolerances' kinds of its outputs, by name; constants are graph constants."""

    op: str
    operands: Mapping[str, Operand]
    kinds: Mapping[str, str]
    attributes: Mapping[str, Attribute]
    constants: tuple[str, ...] = ()

    def bind(self, implementation: str) -> CpuOp:
        """The node on copies of its operands, so that what it writes in place stays its own."""
        copies = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in self.operands.items()}
        return CpuOp(implementation, self.op, copies, self.attributes, self.constants)

    def dims(self) -> SimpleNamespace:
        """The letters as numbers, for `Op.cost`."""
        node = self.bind("reference")
        slots = [node._slot(name) for name in node.op.slot_names()]
        _, bound = node.op.check([None if t is None else type_of(t) for t in slots], node.attributes)
        return SimpleNamespace(**bound)


@dataclass(frozen=True)
class Draw:
    """What a case is made from: T tokens, activations' dtype, weight format ("mixed": several in one node)."""

    tokens: int
    dtype: torch.dtype
    format: str
    generator: torch.Generator

    def activations(self, *shape: int) -> torch.Tensor:
        """Normal values, one in fifty twenty times as large, as activations of language models have."""
        values = torch.randn(shape, generator=self.generator)
        outliers = torch.rand(shape, generator=self.generator) < 0.02
        return torch.where(outliers, 20 * values, values).to(self.dtype)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int32 in low..high-1."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def weight(self, *shape: int, format_: str = "") -> StoredWeight:
        """A random stored weight. A format's group that does not divide the width becomes 32."""
        name = format_ or ("bf16" if self.format == "mixed" else self.format)
        if name.startswith("wint4") and shape[-1] % int(name.removeprefix("wint4:")):
            name = "wint4:32"
        return random_weight(name, shape, self.generator)

    def codes(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x as the norm before gives it beside x, for one of the fp8 formats; the other quantizes x itself."""
        if self.format != "fp8:ue8m0":
            return {}
        return dict(zip(("x_codes", "x_scales"), norm_codes(x, self.format), strict=True))

    def slots(self) -> torch.Tensor:
        """int32 [T] slots; every fourth row is padding."""
        rows = torch.arange(self.tokens, dtype=torch.int32)
        return rows.masked_fill(rows % 4 == 3, -1)


def _embedding(draw: Draw) -> Case:
    operands = {"tokens": draw.integers(0, V, draw.tokens), "table": draw.weight(V, D)}
    return Case("Embedding", operands, {"y": "copy"}, {"dtype": str(draw.dtype).removeprefix("torch.")})


def _rms_norm(draw: Draw) -> Case:
    operands = {"x": draw.activations(draw.tokens, D), "weight": draw.floats(D) + 0.5}
    operands["x"][:1] = 0.0
    return Case("RmsNorm", operands, {"y": "norm"}, {"epsilon": 1e-6}, ("weight",))


def _add_rms_norm(draw: Draw) -> Case:
    x, residual = draw.activations(draw.tokens, D), draw.activations(draw.tokens, D)
    x[:1] = -residual[:1]
    operands = {"x": x, "residual": residual, "weight": draw.floats(D) + 0.5}
    return Case("AddRmsNorm", operands, {"y": "norm", "sum": "copy"}, {"epsilon": 1e-6}, ("weight",))


def _linear(draw: Draw) -> Case:
    operands = {"x": draw.activations(draw.tokens, 192), "w": draw.weight(72, 192)}
    return Case("Linear", operands | draw.codes(operands["x"]), {"y": "linear"}, {})


def _swiglu(draw: Draw) -> Case:
    operands = {"gate": draw.activations(draw.tokens, F), "up": draw.activations(draw.tokens, F)}
    return Case("Swiglu", operands, {"y": "elementwise"}, {})


def _router(draw: Draw) -> Case:
    x, w = draw.activations(draw.tokens, D), torch.randn(E, D, generator=draw.generator) / D**0.5
    x[:2] = 0.0  # every expert scores the same
    operands = {"x": x, "w": w, "bias": draw.integers(0, 3, E) / 8, "slots": draw.slots()}
    constants = ["w", "bias"]
    if draw.tokens == 3:  # one size as a rank has it that holds every other expert
        operands["expert_map"] = torch.tensor([[e // 2 if e % 2 else -1 for e in range(E)]], dtype=torch.int32)
        constants.append("expert_map")
    attributes = {"top_k": K, "groups": 4, "topk_groups": 2, "scoring": "sigmoid", "group_score": "top2_sum"}
    attributes |= {"normalize": 1, "scale": 2.5}
    return Case("Router", operands, {"ids": "router", "weights": "router"}, attributes, tuple(constants))


def _moe(draw: Draw) -> Case:
    ids = torch.stack(
        [torch.randperm(E - 2, generator=draw.generator)[:K] for _ in range(draw.tokens)] or [torch.empty(0, K)]
    )
    weights = draw.floats(draw.tokens, K)
    padding = draw.slots() < 0
    ids[1::4, :-1] = -1  # as a rank has them: experts of others, whose weights are not 0
    ids[2::8] = -1
    mixed = draw.format == "mixed"
    operands = {
        "x": draw.activations(draw.tokens, D),
        "ids": ids.int().view(draw.tokens, K).masked_fill(padding.unsqueeze(1), -1),  # two experts get no token
        "weights": weights.masked_fill(padding.unsqueeze(1), 0.0),
        "gate": draw.weight(E, F, D, format_="fp8" if mixed else ""),
        "up": draw.weight(E, F, D, format_="wint4:64" if mixed else ""),
        "down": draw.weight(E, D, F, format_="wint8" if mixed else ""),
        "shared_gate": draw.weight(2 * F, D),
        "shared_up": draw.weight(2 * F, D, format_="fp32" if mixed else ""),
        "shared_down": draw.weight(D, 2 * F),
    }
    return Case("Moe", operands | draw.codes(operands["x"]), {"y": "moe"}, {})


def _mtp_input(draw: Draw) -> Case:
    operands = {name: draw.activations(draw.tokens, D) for name in ("embedding", "hidden")}
    norms = {name: draw.floats(D) + 0.5 for name in ("embedding_norm", "hidden_norm")}
    return Case("MtpInput", operands | norms, {"y": "norm"}, {"epsilon": 1e-6}, tuple(norms))


def _lm_head(draw: Draw) -> Case:
    rows = draw.integers(0, max(draw.tokens, 1), min(draw.tokens, 5))
    operands = {"hidden": draw.activations(draw.tokens, D), "logit_rows": rows, "w": draw.weight(V, D)}
    return Case("LmHead", operands, {"logits": "linear"}, {})


def _cache_attributes(draw: Draw) -> dict[str, Attribute]:
    dtype = str(draw.dtype).removeprefix("torch.")
    return {"cache_dtype": dtype, "block_tokens": BLOCK, "block_bytes": BLOCK * (LATENT + ROPE) * draw.dtype.itemsize}


def _qkv(draw: Draw) -> Case:
    mixed = draw.format == "mixed"
    kv_rows = LATENT + ROPE
    cos, sin = rope_tables(ROPE)
    attributes = {"q_width": Q_LORA, "q_lora": Q_LORA, "heads": HEADS, "nope": NOPE, "latent": LATENT, "rope": ROPE}
    attributes |= {"epsilon": 1e-6, "joint": int(not mixed)} | _cache_attributes(draw)
    blocks = draw.tokens // BLOCK + 2
    slots = torch.randperm(blocks * BLOCK, generator=draw.generator)[: draw.tokens].int()
    poison = torch.full((blocks, int(attributes["block_bytes"])), 0xFF, dtype=torch.uint8)
    operands = {
        "x": draw.activations(draw.tokens, D),
        "w": draw.weight(Q_LORA + (0 if mixed else kv_rows), D, format_="fp8" if mixed else ""),
        "q_norm": draw.floats(Q_LORA) + 0.5,
        "kv_norm": draw.floats(LATENT) + 0.5,
        "cos": cos,
        "sin": sin,
        "positions": draw.integers(0, len(cos), draw.tokens),
        "slots": slots.masked_fill(draw.slots() < 0, -1),
        "cache": poison,
    }
    if mixed:
        operands["w_kv"] = draw.weight(kv_rows, D, format_="wint8")
    operands |= draw.codes(operands["x"])
    kinds = {"q": "linear", "latent": "linear", "k_rope": "linear", "cache_out": "linear"}
    return Case("Qkv", operands, kinds, attributes, ("q_norm", "kv_norm", "cos", "sin"))


def _mla_attention(draw: Draw) -> Case:
    cos, sin = rope_tables(ROPE)
    queries = [draw.tokens // 2, draw.tokens - draw.tokens // 2, 0] if draw.tokens > 1 else [draw.tokens]
    padding = min(draw.tokens // 8, queries[0])
    queries[0] -= padding
    lengths = [count + 5 * index for index, count in enumerate(queries)]
    dtype = str(draw.dtype).removeprefix("torch.")
    sizes = {"block_tokens": BLOCK, "padding": padding, "generator": draw.generator}
    batch = make_batch(lengths, queries, LATENT + ROPE, dtype=dtype, **sizes)
    operands = {
        name: getattr(batch, name) for name in ("positions", "query_starts", "sequence_lengths", "block_table", "cache")
    }
    # No outliers here: a rounding of large scores is a large factor of the probabilities.
    q = torch.randn(draw.tokens, HEADS * (NOPE + ROPE), generator=draw.generator).to(draw.dtype)
    operands |= {"q": q, "cos": cos, "sin": sin}
    operands["kv_b"] = draw.weight(HEADS * (NOPE + VALUE), LATENT)
    mode = "absorbed" if draw.tokens < 4 else "expanded"
    attributes = {"heads": HEADS, "nope": NOPE, "rope": ROPE, "v": VALUE, "latent_dim": LATENT}
    attributes |= {"scale": (NOPE + ROPE) ** -0.5, "mode": mode} | _cache_attributes(draw)
    return Case("MlaAttention", operands, {"o": "attention"}, attributes, ("cos", "sin"))


def _sample(draw: Draw) -> Case:
    rows = draw.tokens
    operands = {
        "logits": torch.randn(rows, V, generator=draw.generator) * 3,
        "temperature": draw.integers(0, 3, rows) / 2,
        "top_p": 1 - draw.integers(0, 2, rows) * 0.3,
        "top_k": draw.integers(0, 5, rows),
        "min_p": draw.integers(0, 2, rows) * 0.1,
        "seeds": torch.randint(0, 2**62, (rows,), generator=draw.generator),
        "positions": draw.integers(0, 4096, rows),
        "token_mask": draw.integers(-(2**31), 2**31 - 1, rows, -(-V // 32)),
        "drafts": draw.integers(-1, V, rows),
    }
    return Case("Sample", operands, {"tokens": "copy", "accepted": "copy", "logprobs": "logprob"}, {})


def _advance(draw: Draw) -> Case:
    rows, blocks = draw.tokens, 6
    counters = {"positions": draw.integers(0, blocks * BLOCK - 1, rows), "places": draw.integers(0, 4096, rows)}
    operands = {
        "chosen": draw.integers(-1, V, rows),
        "tokens": draw.integers(0, V, rows),
        "positions": counters["positions"],
        "slots": draw.slots(),
        "sequence_lengths": counters["positions"] + 1,
        "places": counters["places"],
        "block_table": draw.integers(0, 100, rows, blocks),
    }
    names = ("tokens", "positions", "slots", "sequence_lengths", "places")
    kinds = {f"next_{name}": "copy" for name in names}
    return Case("Advance", operands, kinds, {"block_tokens": BLOCK})


def _all_reduce(draw: Draw) -> Case:
    return Case("AllReduce", {"x": draw.activations(draw.tokens, D)}, {"y": "copy"}, {"ranks": 1})


def _gather_logits(draw: Draw) -> Case:
    part = torch.randn(draw.tokens, -(-V // 128) * 128, generator=draw.generator)
    return Case("GatherLogits", {"part": part}, {"logits": "copy"}, {"ranks": 1, "vocabulary": V})


CASES: dict[str, Callable[[Draw], Case]] = {
    "Embedding": _embedding,
    "RmsNorm": _rms_norm,
    "AddRmsNorm": _add_rms_norm,
    "Linear": _linear,
    "Swiglu": _swiglu,
    "Router": _router,
    "Moe": _moe,
    "MtpInput": _mtp_input,
    "LmHead": _lm_head,
    "Qkv": _qkv,
    "MlaAttention": _mla_attention,
    "Sample": _sample,
    "Advance": _advance,
    "AllReduce": _all_reduce,
    "GatherLogits": _gather_logits,
}
ACROSS_RANKS = ("AllReduce", "GatherLogits")  # their cases are of one rank


def formats_of(op: str) -> tuple[str, ...]:
    """Weight formats to try an op with; one, unused, where it has no weights."""
    weights = load_op(op).weights
    every = ("fp32", "bf16", "fp8", "fp8:ue8m0", "wint8", "wint4:128", "wint4:64", "wint4:32")
    if not weights:
        return every[:1]
    return every if len(weights) == 1 else (*every, "mixed")
