"""The tensors that a checkpoint of a model must hold, by name: dtypes and shapes follow from the spec alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import NamedTuple

from dsc.compiler.packing import declared, is_packed, parts_of
from dsc.runtime.spec import ModelSpec

FLOATS = ("bfloat16", "float32")
PACKED_FLOATS = (*FLOATS, "float16")  # beside packed weights, which most tools leave in float16
SCALE_SUFFIX = "_scale_inv"  # despite the name, codes are multiplied by it


class Expected(NamedTuple):
    """One tensor: the dtypes it may be stored in and its shape.

    copy_of  another tensor that must have the same bytes; such a copy may be left out of the checkpoint
    rule     why no graph reads it, and it may be left out too; `content` says what it must hold (dsc.compiler.packing.Stored)
    """

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    copy_of: str = ""
    rule: str = ""
    content: tuple[str | int, ...] = ()

    @property
    def optional(self) -> bool:
        """Whether it may be left out of the checkpoint."""
        return bool(self.copy_of or self.rule)


class TensorNames:
    """Collects the expected tensors of one model in the order of its layers.

    stored   names that are there: of a source whose weights are packed, they tell which ones are; None where only
             config.json does
    modules  linear modules of such a source, by name: whether they are packed
    """

    def __init__(self, spec: ModelSpec, stored: Collection[str] | None = None) -> None:
        self.spec, self.stored = spec, stored
        self.found: dict[str, Expected] = {}
        self.modules: dict[str, bool] = {}

    def floats(self, name: str, *shape: int, copy_of: str = "") -> None:
        """A tensor that no format quantizes."""
        self.found[f"{name}.weight"] = Expected(self._floats, shape, copy_of)

    @property
    def _floats(self) -> tuple[str, ...]:
        return FLOATS if self.spec.source.packing is None else PACKED_FLOATS

    @cached_property
    def declared(self) -> Callable[[str], bool]:
        """Whether config.json says that a module is packed."""
        return declared(self.spec.source.packed, self.spec.source.unpacked)

    def packs(self, name: str) -> bool:
        """Whether a linear module is packed: by what is stored of it, by config.json where nothing is."""
        packing = self.spec.source.packing
        if packing is None:
            return False
        there = None if self.stored is None else is_packed(name, packing, self.stored.__contains__)
        return self.declared(name) if there is None else there

    def linear(self, name: str, rows: int, cols: int) -> None:
        """A linear weight: floats; packed codes; or FP8 codes with the scales of their blocks (the last may be partial)."""
        if self.spec.source.packing is not None:
            self.modules[name] = self.packs(name)
            if self.modules[name]:
                for end, part in parts_of(self.spec.source.packing, rows, cols).items():
                    self.found[f"{name}.{end}"] = Expected(part.dtypes, part.shape, "", part.rule, part.content)
                return
        if self.spec.source.kind != "fp8":
            self.floats(name, rows, cols)
            return
        block_rows, block_cols = self.spec.source.block
        scales = (-(-rows // block_rows), -(-cols // block_cols))
        self.found[f"{name}.weight"] = Expected(("float8_e4m3fn",), (rows, cols))
        self.found[f"{name}.weight{SCALE_SUFFIX}"] = Expected(("float32",), scales)

    def mlp(self, name: str, width: int) -> None:
        """gate, up and down of one MLP."""
        self.linear(f"{name}.gate_proj", width, self.spec.hidden_size)
        self.linear(f"{name}.up_proj", width, self.spec.hidden_size)
        self.linear(f"{name}.down_proj", self.spec.hidden_size, width)

    def attention(self, name: str) -> None:
        """Multi-head latent attention, with q_a and q_b or one q_proj."""
        spec = self.spec
        heads, hidden = spec.num_heads, spec.hidden_size
        if spec.q_lora_rank is None:
            self.linear(f"{name}.q_proj", heads * spec.qk_head_dim, hidden)
        else:
            self.linear(f"{name}.q_a_proj", spec.q_lora_rank, hidden)
            self.floats(f"{name}.q_a_layernorm", spec.q_lora_rank)
            self.linear(f"{name}.q_b_proj", heads * spec.qk_head_dim, spec.q_lora_rank)
        self.linear(f"{name}.kv_a_proj_with_mqa", spec.cache_width, hidden)
        self.floats(f"{name}.kv_a_layernorm", spec.kv_lora_rank)
        self.linear(f"{name}.kv_b_proj", heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank)
        self.linear(f"{name}.o_proj", hidden, heads * spec.v_head_dim)

    def decoder_layer(self, layer: int) -> None:
        """Attention, two norms, and a dense MLP or experts with their router."""
        spec, name = self.spec, f"model.layers.{layer}"
        self.floats(f"{name}.input_layernorm", spec.hidden_size)
        self.attention(f"{name}.self_attn")
        self.floats(f"{name}.post_attention_layernorm", spec.hidden_size)
        if not spec.is_moe(layer):
            self.mlp(f"{name}.mlp", spec.intermediate_size)
            return
        self.floats(f"{name}.mlp.gate", spec.num_experts, spec.hidden_size)
        if spec.router_bias:
            self.found[f"{name}.mlp.gate.e_score_correction_bias"] = Expected(self._floats, (spec.num_experts,))
        for expert in range(spec.num_experts):
            self.mlp(f"{name}.mlp.experts.{expert}", spec.moe_intermediate_size)
        if spec.num_shared_experts:
            self.mlp(f"{name}.mlp.shared_experts", spec.shared_intermediate_size)

    def mtp_layer(self, layer: int, head: str) -> None:
        """A decoder layer with what joins token and hidden state before it, and copies of embeddings and head."""
        spec, name = self.spec, f"model.layers.{layer}"
        vocabulary = (spec.vocab_size, spec.hidden_size)
        self.floats(f"{name}.embed_tokens", *vocabulary, copy_of="model.embed_tokens.weight")
        self.floats(f"{name}.enorm", spec.hidden_size)
        self.floats(f"{name}.hnorm", spec.hidden_size)
        self.floats(f"{name}.eh_proj", spec.hidden_size, 2 * spec.hidden_size)
        self.decoder_layer(layer)
        self.floats(f"{name}.shared_head.norm", spec.hidden_size)
        self.floats(f"{name}.shared_head.head", *vocabulary, copy_of=head)


def expected_tensors(spec: ModelSpec, stored: Collection[str] | None = None) -> dict[str, Expected]:
    """Every tensor of the checkpoint by name, MTP layers included as `spec.num_mtp_layers` says; `stored` as in TensorNames."""
    return all_names(spec, stored).found


def all_names(spec: ModelSpec, stored: Collection[str] | None = None) -> TensorNames:
    """What `expected_tensors` gives, and the linear modules with it."""
    names = TensorNames(spec, stored)
    embeddings, head = "model.embed_tokens", "lm_head"
    names.floats(embeddings, spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        names.decoder_layer(layer)
    names.floats("model.norm", spec.hidden_size)
    copied = f"{embeddings}.weight" if spec.tie_word_embeddings else ""
    names.floats(head, spec.vocab_size, spec.hidden_size, copy_of=copied)
    for layer in range(spec.num_layers, spec.num_layers + spec.num_mtp_layers):
        names.mtp_layer(layer, _head(spec))
    return names


def mtp_tensors(spec: ModelSpec, stored: Collection[str] | None = None) -> dict[str, Expected]:
    """The tensors of the MTP layer that the spec has or could have."""
    names = TensorNames(spec, stored)
    names.mtp_layer(spec.num_layers, _head(spec))
    return names.found


def _head(spec: ModelSpec) -> str:
    """The tensor that an MTP layer's head is a copy of."""
    return "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"


def fold_names(names: Iterable[str]) -> list[str]:
    """Names that differ in an expert or layer number alone as one: model.layers.{3-60}.mlp.experts.{0-255}.up_proj.weight."""
    folded = list(names)
    for part in ("experts", "layers"):
        numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
        for name in folded:
            match = re.fullmatch(rf"(.*\b{part}\.)(\d+)(\..*)", name)
            numbers[(match[1], match[3]) if match else (name, "")] |= {int(match[2])} if match else set()
        folded = [f"{before}{_ranges(found)}{after}" for (before, after), found in numbers.items()]
    return folded


def _ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 5} -> "{0-2,5}"; a single number as it is, none as nothing."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return texts[0] if len(numbers) == 1 else f"{{{','.join(texts)}}}" if texts else ""
