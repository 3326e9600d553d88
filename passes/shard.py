"""Make the graph that one rank of several runs: its parts of weights, and where ranks exchange what they have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from dsc.compiler.ir.graph import (
    Graph,
    GraphInfo,
    Node,
    Tensor,
    expression_of,
    is_plugin,
    is_weight,
    op_name,
    operand,
    schema_of,
    set_type,
    type_of,
    variable,
    weight,
    weight_class_of,
)
from dsc.compiler.ir.mesh import Mesh
from dsc.compiler.ir.rewrite import Pass, Report
from dsc.compiler.ir.splits import COLUMNS, EXPERT_MAP, EXPERTS, Split, cuts_of, shape_of_rank, splits_of
from dsc.compiler.tables import expert_map
from dsc.plugins.formats import Format, parse_format
from dsc.plugins.schema import Type
from dsc.runtime.shards import Cut, shard_shape

READERS = ("dsc.Linear", "dsc.Qkv", "dsc.MlaAttention", "dsc.Moe", "dsc.LmHead")


@dataclass(frozen=True)
class Site:
    """A weight that a node reads and a rank has a part of. `shape` is the whole weight's, `slot` its operand."""

    node: Node
    slot: str
    shape: tuple[int, ...]
    format: Format
    splits: tuple[Split, ...]

    @property
    def shape_of_rank(self) -> tuple[int, ...]:
        return shape_of_rank(self.shape, self.splits)

    @property
    def is_partial(self) -> bool:
        """Whether what the node makes of it is to be added up over the ranks."""
        return any(split.axis in (EXPERTS, COLUMNS) for split in self.splits)

    @property
    def note(self) -> str:
        return f"{self.slot}: {'; '.join(split.text(self.shape) for split in self.splits)}"


@dataclass(frozen=True)
class Shard(Pass):
    """Linear, Qkv, MlaAttention, Moe, LmHead over whole weights -> the same over a rank's part (dsc.runtime.shards).

    By heads: q_b (or q), kv_b, and o_proj's columns; by width: gate, up, and down's columns; experts by groups of ranks, and
    their width within a group; the head by rows. What is summed over columns, dsc.AllReduce adds up; dsc.GatherLogits puts
    the head's parts side by side. Routers choose among all experts, then map them to places on the rank. A site is a weight
    that is cut, or a router that maps. A graph of which one weight cannot be cut is left as it is. One rank has no sites.
    """

    def expected(self, info: GraphInfo) -> int:
        """Readers of weights that are split, and routers where ranks have different experts."""
        mesh, spec = info.mesh, info.spec
        if mesh.num_ranks == 1 or info.model not in ("main", "mtp"):
            return 0
        of_moe = 3 + (3 if spec.num_shared_experts else 0) + (1 if mesh.expert > 1 else 0)
        head = 0 if spec.tie_word_embeddings else 1
        of_attention = 3  # queries, kv_b, o_proj
        layers = info.num_layers * of_attention + 3 * info.num_dense_layers + of_moe * info.num_moe_layers
        return head + layers

    def run(self, graph: Graph) -> Report:
        report = Report()
        mesh = graph.info.mesh
        if mesh.num_ranks == 1:
            return report
        sites = list(_sites(graph, report))
        if report.declined:
            return report  # half of a layer's weights cut would be a graph of no rank
        for site in sites:
            _cut(site)
            report.change(site.node, site.note)
        for node in graph.nodes:
            _localize(node, mesh)
            if op_name(node) == "dsc.Router" and mesh.expert > 1:
                _map_experts(node, graph.info)
                report.change(node, f"experts to places in {mesh.expert} groups of ranks")
        for node in {id(site.node): site.node for site in sites if site.is_partial}.values():
            _all_reduce(graph, node, mesh)
        for site in sites:
            if op_name(site.node) == "dsc.LmHead":
                _gather_logits(graph, site, mesh)
        graph.tidy()
        for node in graph.nodes:
            _infer(node)
        return report


def _sites(graph: Graph, report: Report) -> Iterator[Site]:
    """Weights to cut, in the order of the nodes; declines those that cannot be."""
    mesh = graph.info.mesh
    if mesh.tensor % mesh.expert:
        wanted, got = "groups of ranks that follow each other", f"tensor {mesh.tensor}, expert {mesh.expert}"
        report.decline(graph.name, "the mesh has no whole groups of ranks for experts", wanted, got)
    for node in graph.nodes:
        if not is_plugin(node):
            report.decline(node, "not a plugin op: no schema says what its weights are", "dsc.*", op_name(node))
            continue
        for slot in (w.name for w in schema_of(node).weights):
            tensor = operand(node, slot)
            if tensor is None or not is_weight(tensor):
                continue
            format_ = parse_format(str(node.attrs[f"{slot}_format"]))
            site = Site(node, slot, format_.logical_shape(tensor.shape), format_, _splits(tensor, graph))
            if not site.splits:
                continue
            faults = [split.fault(site.shape, format_) for split in site.splits]
            if tensor._values.cuts:
                report.decline(node, f"{slot} is cut already", "a whole weight", str(tensor.name))
            elif any(faults):
                wanted = f"whole heads, experts, blocks and groups on each of {mesh.num_ranks} ranks"
                report.decline(node, f"{slot} cannot be cut as {format_}", wanted, "; ".join(filter(None, faults)))
            elif op_name(node) not in READERS:
                report.decline(
                    node, f"{slot} is cut, and its reader is of no rank's part", " or ".join(READERS), op_name(node)
                )
            else:
                yield site


def _splits(tensor: Tensor, graph: Graph) -> tuple[Split, ...]:
    name = f"{str(tensor.name).rpartition('.')[0]}.weight"
    return splits_of(graph.info.spec, name, weight_class_of(tensor), graph.info.mesh)


def _cut(site: Site) -> None:
    """Leave the node a rank's part of each stored tensor of the weight."""
    node, slots = site.node, schema_of(site.node).slot_names()
    for part, slot in (("data", site.slot), ("scales", f"{site.slot}.scales")):
        tensor = operand(node, slot)
        cuts = cuts_of(site.shape, site.format, part, site.splits)
        if tensor is not None and cuts:
            whole = expression_of(tensor)
            assert shard_shape(whole.shape, cuts) == site.format.parts(site.shape_of_rank)[part][1], (tensor.name, cuts)
            node.inputs[slots.index(slot)] = weight(tensor.name, whole, weight_class_of(tensor), cuts)


def _localize(node: Node, mesh: Mesh) -> None:
    """Give a node the number of heads that a rank has, and over how many groups of ranks its experts are spread."""
    if op_name(node) in ("dsc.MlaAttention", "dsc.Qkv"):
        node.attrs["heads"] //= mesh.tensor
    if op_name(node) == "dsc.Qkv" and not node.attrs["q_lora"]:
        node.attrs["q_width"] //= mesh.tensor
    if op_name(node) == "dsc.Moe" and mesh.expert > 1:
        node.attrs["expert_groups"] = mesh.expert


def _map_experts(router: Node, info: GraphInfo) -> None:
    """Let a router say which of the rank's experts are chosen, -1 for others."""
    table = expert_map(info.spec.num_experts, info.mesh.expert)
    at = schema_of(router).slot("expert_map")
    while len(router.inputs) <= at:
        router.inputs.append(gs.Variable.empty())
    router.inputs[at] = weight(EXPERT_MAP, table, cuts=(Cut(0, "expert", 1),))


def _all_reduce(graph: Graph, node: Node, mesh: Mesh) -> None:
    """Add up a node's first result over the ranks; its readers read the sum."""
    total = node.outputs[0]
    part = _renamed(node, "partial")
    name = f"{str(node.name).rpartition('.')[0] or node.name}.all_reduce"
    graph.plugin("AllReduce", {"x": part}, {"ranks": mesh.num_ranks}, name, {"y": total})


def _gather_logits(graph: Graph, head: Site, mesh: Mesh) -> None:
    """Put the parts of the logits side by side."""
    node = head.node
    logits, rows = node.outputs[0], head.shape_of_rank[0]
    part = _renamed(node, "part")
    set_type(part, Type("float32", (part.shape[0], rows)))
    attributes = {"ranks": mesh.num_ranks, "vocabulary": head.shape[0]}
    graph.plugin("GatherLogits", {"part": part}, attributes, f"{node.name}.gather", {"logits": logits})


def _renamed(node: Node, name: str) -> gs.Variable:
    """A new variable in the place of a node's first result, of its type."""
    type_ = type_of(node.outputs[0])
    assert type_ is not None, node.name
    node.outputs[0] = variable(f"{node.name}.{name}", type_)
    return node.outputs[0]


def _infer(node: Node) -> None:
    """Run a node's schema again: what reads a rank's part makes a part."""
    types, _ = schema_of(node).check([type_of(tensor) for tensor in node.inputs], node.attrs)
    for tensor, type_ in zip(node.outputs, types, strict=True):
        set_type(tensor, type_)
