"""Choose the dtype of activations: bfloat16, but for what the ops' schemas keep in float32."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.compiler.ir.graph import (
    Graph,
    GraphInfo,
    Node,
    Tensor,
    dtype_of,
    is_plugin,
    op_name,
    schema_of,
    set_type,
    type_of,
)
from dsc.compiler.ir.rewrite import Pass, Report
from dsc.plugins.schema import Type
from dsc.runtime.errors import DscError, nearest

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class SetDtype(Pass):
    """Turn activations from float32 to bfloat16 (activations: bf16), or leave them (activations: fp32).

    Every schema is run again from the inputs on: an output `like` an operand follows it, an output that is float32 by its
    schema (a router's weights, logits) stays. Inputs follow where all their readers accept it. Weights keep their dtype.
    A site is a node with at least one result that changed. A graph with other nodes than plugin ops is left as it is.
    """

    activations: str = "bf16"

    def __post_init__(self) -> None:
        if self.activations not in DTYPES:
            raise DscError(
                "set_dtype: unknown dtype of activations",
                wanted=" or ".join(DTYPES),
                got=str(self.activations),
                try_=nearest(str(self.activations), DTYPES),
            )

    def expected(self, info: GraphInfo) -> int:
        """Nodes that make activations: all but routers, the head and sampling."""
        if self.activations == "fp32" or info.model == "sample":
            return 0
        # Two norms, Qkv, attention, o_proj and perhaps q_b; then gate, up, their product and down, or one Moe.
        of_layer = 5 + (0 if info.spec.q_lora_rank is None else 1)
        outside = (
            4 if info.model == "mtp" else 2
        )  # embedding and first norm; MTP also joins its inputs and projects them
        return outside + info.num_layers * of_layer + 4 * info.num_dense_layers + info.num_moe_layers

    def run(self, graph: Graph) -> Report:
        report = Report()
        dtype = DTYPES[self.activations]
        if dtype == "float32":
            return report
        for node in graph.nodes:
            if not is_plugin(node):
                report.decline(node, "not a plugin op: no schema says what stays float32", "dsc.*", op_name(node))
        if report.declined:
            return report  # such a node would have inputs it was not made for
        for tensor in graph.gs.inputs:
            if dtype_of(tensor) == "float32" and tensor.outputs and _accept(tensor, dtype):
                set_type(tensor, Type(dtype, tuple(tensor.shape)))
        for node in graph.nodes:
            changed = _infer(node, dtype)
            if changed:
                report.change(node, f"{', '.join(changed)} {dtype}")
        return report


def _accept(tensor: Tensor, dtype: str) -> bool:
    """Whether every reader of a graph input takes it in this dtype."""
    for node in tensor.outputs:
        if not is_plugin(node):
            return False
        schema = schema_of(node)
        for operand in schema.inputs:
            at = schema.slot(operand.name)
            if at < len(node.inputs) and node.inputs[at] is tensor and dtype not in operand.dtypes:
                return False
    return True


def _infer(node: Node, dtype: str) -> list[str]:
    """Run a node's schema again; names of the results whose dtype changed."""
    schema = schema_of(node)
    for output in schema.outputs:
        # An output whose dtype is an attribute's, not an operand's: the embedding begins the activations.
        if schema.attributes.get(output.like) is str and dtype in output.dtypes:
            node.attrs[output.like] = dtype
    types, _ = schema.check([type_of(tensor) for tensor in node.inputs], node.attrs)
    changed = []
    for operand, tensor, type_ in zip(schema.outputs, node.outputs, types, strict=False):
        if not tensor.is_empty() and dtype_of(tensor) != type_.dtype:
            set_type(tensor, type_)
            changed.append(operand.name)
    return changed
