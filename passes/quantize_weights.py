"""Store weights in the formats that the recipe names by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_graphsurgeon as gs

from dsc.compiler.ir.format_choice import FormatChoice, read_choice
from dsc.compiler.ir.graph import (
    Graph,
    GraphInfo,
    Node,
    Tensor,
    dtype_of,
    expression_of,
    is_plugin,
    is_weight,
    schema_of,
    weight,
    weight_class_of,
)
from dsc.compiler.ir.rewrite import Pass, Report
from dsc.compiler.ir.simplify import loses_codes
from dsc.compiler.ir.weight import WEIGHT_CLASSES, Quantize
from dsc.plugins.formats import Format
from dsc.plugins.schema import Weight
from dsc.runtime.errors import DscError, nearest, raise_all
from dsc.runtime.spec import ModelSpec

CLASSES = tuple(name for name in WEIGHT_CLASSES if name != "exact")
SHARED = ("embeddings", "lm_head")  # stored once, for the main model and its MTP layer
UNLESS_NAMED = (*SHARED, "eh_proj")  # unquantized without an entry of their own: releases in FP8 leave them in bf16
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """Every weight operand of a plugin op -> its data and scales in a format, e.g. {format: wint4, group: 128}.

    Classes: experts, attention, kv_b, dense_mlp, shared_experts, embeddings, lm_head, eh_proj. A class gets its own entry;
    else kv_b gets attention's, the last three stay unquantized, the others get `default`. Unquantized means the dtype of the
    activations, bf16 or fp32; so do the classes in `skip`, and those of an absent `default`. A width that no group of
    wint4 divides stays unquantized too, and its note says so. `mtp` has entries, `default` among them, that replace these
    in the MTP layer: a recipe's mtp.weights.
    """

    experts: Entry | None = None
    attention: Entry | None = None
    kv_b: Entry | None = None
    dense_mlp: Entry | None = None
    shared_experts: Entry | None = None
    embeddings: Entry | None = None
    lm_head: Entry | None = None
    eh_proj: Entry | None = None
    default: Entry | None = None
    skip: Sequence[str] = ()
    mtp: Entry | None = None

    def __post_init__(self) -> None:
        faults = _skip_faults(self)
        for name in (*CLASSES, "default"):
            entry = getattr(self, name)
            faults += read_choice(name, entry)[1] if entry is not None else []
        faults += _mtp_faults(self.mtp)
        raise_all("quantize_weights", faults)

    def choice(self, weight_class: str, model: str = "main") -> FormatChoice | None:
        """The format of a class in a model as the recipe names it; None: unquantized."""
        if model == "mtp" and self.mtp and weight_class not in SHARED:
            own = self.mtp.get("attention") if weight_class == "kv_b" else None
            default = None if weight_class in UNLESS_NAMED else self.mtp.get("default")
            entry = self.mtp.get(weight_class) or own or default
            if entry is not None:
                return read_choice(weight_class, entry)[0]
        if weight_class in self.skip:
            return None
        entry = getattr(self, weight_class)
        if entry is None and weight_class == "kv_b":
            return self.choice("attention")
        if entry is None and weight_class not in UNLESS_NAMED:
            entry = self.default
        return read_choice(weight_class, entry)[0] if entry is not None else None

    def expected(self, info: GraphInfo) -> int:
        """Weight operands of plugin ops, quantized or not."""
        if info.model == "sample":
            return 0
        moe = 3 + (3 if info.spec.num_shared_experts else 0)
        outside = 3 if info.model == "mtp" else 2  # embeddings, lm_head; and eh_proj
        layers = info.num_layers * _of_attention(info) + _apart(info)
        return outside + layers + 3 * info.num_dense_layers + moe * info.num_moe_layers

    def run(self, graph: Graph) -> Report:
        report = Report()
        stored: dict[str, Stored] = {}  # by the weight's name: a weight with two readers is stored once
        for node in graph.nodes:
            if not is_plugin(node):
                continue
            for operand in schema_of(node).weights:
                self._store(graph, node, operand, stored, report)
        choices = {name: self.choice(name, graph.info.model) for name in CLASSES}
        formats = {name: choice.kind for name, choice in choices.items() if choice is not None}
        graph.info = replace(graph.info, formats=formats)
        return report

    def _store(self, graph: Graph, node: Node, operand: Weight, stored: dict[str, Stored], report: Report) -> None:
        slot = schema_of(node).slot(operand.name)
        tensor = node.inputs[slot] if slot < len(node.inputs) else gs.Variable.empty()
        if tensor.is_empty():
            return
        refused = _refusal(node, operand, tensor)
        if refused:
            report.decline(node, *refused)
            return
        if tensor.name not in stored:
            info = graph.info
            ue8m0 = info.spec.source.scale_fmt == "ue8m0"
            choice, plain = self.choice(weight_class_of(tensor), info.model), _plain(node)
            format_, why = choice.format_of(tensor.shape[-1], plain, ue8m0) if choice else (plain, "")
            if group := loses_codes(expression_of(tensor), str(format_)):
                what = f"{weight_class_of(tensor)} {operand.name} is stored as {format_}"
                told = f"the source's symmetric 4-bit codes in groups of {group} are rounded again; groups of {group} keep them"
                report.notice(node, f"{what}: {told}")
            stored[tensor.name] = Stored(format_, why, _parts(tensor, format_))
        result = stored[tensor.name]
        node.attrs[operand.format_attribute] = str(result.format)
        node.inputs[slot] = result.parts["data"]
        while len(node.inputs) <= slot + 1:
            node.inputs.append(gs.Variable.empty())
        node.inputs[slot + 1] = result.parts.get("scales") or gs.Variable.empty()
        note = f"{operand.name} {result.format}, {weight_class_of(tensor)}"
        report.change(node, f"{note}: {result.why}" if result.why else note)
        if result.why:
            what = f"{weight_class_of(tensor)} {operand.name} is stored as {result.format}"
            report.notice(node, f"{what}: {result.why}")


@dataclass(frozen=True)
class Stored:
    """A weight in its format: constants by part ("data", "scales"), and why it is not the recipe's first choice."""

    format: Format
    why: str
    parts: Mapping[str, gs.Constant]


def _parts(tensor: Tensor, format_: Format) -> dict[str, gs.Constant]:
    """Constants of a weight's stored parts: base.weight as it was named; base.packed where bytes are not the values'."""
    base = str(tensor.name).removesuffix(".weight")
    data = "packed" if format_.kind in ("wint4", "wint8") else "weight"
    return {
        part: weight(
            f"{base}.{data if part == 'data' else part}",
            Quantize(expression_of(tensor), str(format_), part),
            weight_class_of(tensor),
        )
        for part in format_.parts(tensor.shape)
    }


def _refusal(node: Node, operand: Weight, tensor: Tensor) -> tuple[str, str, str] | None:
    """Why an operand cannot be stored in a format, with what was wanted and found there."""
    if not is_weight(tensor):
        return f"{operand.name} is no weight", "a constant of the checkpoint", f"{type(tensor).__name__} {tensor.name}"
    if node.attrs[operand.format_attribute] != "fp32":
        return f"{operand.name} is stored in a format already", "fp32", str(node.attrs[operand.format_attribute])
    if weight_class_of(tensor) not in CLASSES:
        return f"{operand.name} has no class that recipes name", ", ".join(CLASSES), weight_class_of(tensor)
    return None


def _plain(node: Node) -> Format:
    """The unquantized format beside a node's activations."""
    tensors = [t for t in (*node.inputs, *node.outputs) if isinstance(t, gs.Variable) and not t.is_empty()]
    return Format("bf16" if any(dtype_of(tensor) == "bfloat16" for tensor in tensors) else "fp32")


def _of_attention(info: GraphInfo) -> int:
    """Weight operands of one attention: q (or q_a, q_b) with kv_a, kv_b, o_proj."""
    return 3 + (0 if info.spec.q_lora_rank is None else 1)


def _apart(info: GraphInfo) -> int:
    """Layers in which q (or q_a) and kv_a are two weights: fuse_qkv joins them but where their schemes differ.

    The spec tells of FP8; which of packed weights are packed, only the checkpoint's tensors do.
    """
    if "fuse_qkv" not in info.done or _kept_apart(info.spec):
        return info.num_layers
    return info.apart if info.spec.source.packing is not None else 0


def _kept_apart(spec: ModelSpec) -> bool:
    """Whether fp8 blocks keep fuse_qkv from joining the two weights: q's rows end inside a block."""
    rows = spec.num_heads * spec.qk_head_dim if spec.q_lora_rank is None else spec.q_lora_rank
    return spec.source.kind == "fp8" and rows % spec.source.block[0] != 0


def _skip_faults(options: QuantizeWeights) -> list[DscError]:
    if isinstance(options.skip, str) or not isinstance(options.skip, Sequence):
        return [DscError("skip is not a list", wanted="skip: [lm_head, ...]", got=str(options.skip))]
    faults = []
    for name in options.skip:
        if name not in CLASSES:
            close = nearest(str(name), CLASSES)
            faults.append(DscError("skip names no class", wanted=", ".join(CLASSES), got=str(name), try_=close))
        elif getattr(options, name) is not None:
            got = f"{name}: {getattr(options, name)} and skip: {list(options.skip)}"
            faults.append(DscError(f"{name} has a format and is skipped", wanted="one of both", got=got))
    return faults


def _mtp_faults(mtp: Entry | None) -> list[DscError]:
    known = (*(name for name in CLASSES if name not in SHARED), "default")
    faults: list[DscError] = []
    for name, entry in (mtp or {}).items():
        if name in SHARED:
            what = f"mtp.weights cannot choose {name}: the MTP layer shares the main model's"
            faults.append(DscError(what, wanted=", ".join(known), got=f"{name}: {entry}"))
        elif name not in known:
            close = nearest(str(name), known)
            faults.append(DscError(f"mtp.weights has no class {name}", wanted=", ".join(known), try_=close))
        else:
            faults += read_choice(f"mtp.weights: {name}", entry)[1]
    return faults
