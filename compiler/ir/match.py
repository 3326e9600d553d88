"""Matches patterns (`dsc.compiler.ir.pattern`) against graphs.

Whatever differs is told: the node, what was wanted, what is there. In a pass, near misses go to the report by themselves:
`for site in sites(graph, PATTERN, report): site["gate"], site["up"], site.root, site.nodes`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any as Value

import onnx
import onnx_graphsurgeon as gs

from dsc.compiler.ir.graph import OPSET, Graph, Node, Tensor, dtype_of, is_plugin, is_weight, op_name, type_of
from dsc.compiler.ir.pattern import ANY, Any, C, Either, OneOf, Output, P, Pattern, W, size
from dsc.compiler.ir.rewrite import Report

# Ops that pass a value on: a match that fails at one of these looks behind it, to tell a near miss from another site.
TRANSPARENT = ("Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand")


@dataclass(frozen=True)
class Fault:
    """One difference between a pattern and a graph: the node where it was seen, what was wanted there and what is there."""

    node: Node
    reason: str
    wanted: str
    got: str


@dataclass(frozen=True)
class Match:
    """A site that matches.

    roots    the nodes that the match began at, several where it continues another; `root` is the last
    matched  all matched nodes, by their patterns
    nodes    those a rewrite may remove: all but shared ones that have a reader elsewhere, and what those read
    tensors  bound names
    """

    roots: tuple[Node, ...]
    matched: Mapping[P, Node]
    nodes: tuple[Node, ...]
    tensors: Mapping[str, Tensor]

    @property
    def root(self) -> Node:
        return self.roots[-1]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def node(self, name: str) -> Node:
        """The node that makes a bound tensor."""
        return self.tensors[name].inputs[0]


@dataclass(frozen=True)
class Mismatch:
    """A site that does not match, with every difference found, the nearest to the root first.

    near   whether more than half of the pattern's nodes were found, looking behind casts and views. Such a site is one
           that somebody changed, not another kind of place. (Patterns of one node count their constants too.)
    """

    faults: tuple[Fault, ...]
    near: bool

    @property
    def node(self) -> Node:
        return self.faults[0].node

    @property
    def reason(self) -> str:
        return self.faults[0].reason

    @property
    def wanted(self) -> str:
        return self.faults[0].wanted

    @property
    def got(self) -> str:
        return self.faults[0].got


def match(pattern: P, node: Node, graph: Graph, *, given: Match | None = None, closed: bool = True) -> Match | Mismatch:
    """Match a pattern whose root is `node`.

    given    an earlier match that this one continues: its bindings hold and its nodes count as inside
    closed   whether to refuse readers outside the match; a site with several roots is matched root by root, all but
             the last with closed=False
    """
    matcher = _Matcher(given)
    matcher.at_node(pattern, node)
    if matcher.faults:
        return Mismatch(tuple(matcher.faults), matcher.near(pattern))
    roots = (*given.roots, node) if given is not None else (node,)
    leaks = _leaks(graph, _unique(matcher.nodes.values()), roots)
    shared = [n for p, n in matcher.nodes.items() if p.shared]
    refused = tuple(leak for leak in leaks if closed and not _among(leak.node, shared))
    if refused:
        return Mismatch(refused, near=True)
    kept = [leak.node for leak in leaks]
    for keeps in kept:  # and what a kept node reads; the list grows as it is walked
        kept.extend(m for m in _unique(matcher.nodes.values()) if not _among(m, kept) and _reads(keeps, m))
    removable = tuple(n for n in _unique(matcher.nodes.values()) if not _among(n, kept))
    return Match(roots, matcher.nodes, removable, matcher.tensors)


def sites(graph: Graph, pattern: P, report: Report) -> Iterator[Match]:
    """Every match of a pattern in a graph, in graph order; near misses are declined in the report.

    The graph may be edited between two matches: removed nodes are passed over.
    """
    for node in graph.find(pattern.op):
        if not any(node is n for n in graph.gs.nodes):
            continue
        found = match(pattern, node, graph)
        if isinstance(found, Match):
            yield found
        elif found.near:
            report.decline(found.node, found.reason, found.wanted, found.got)


def attribute(node: Node, name: str) -> Value:
    """An attribute of a node, or ONNX's default for it, or None."""
    if name in node.attrs or is_plugin(node):
        return node.attrs.get(name)
    return _defaults(str(node.op)).get(name)


def describe(tensor: Tensor) -> str:
    """What makes a tensor: `Cast n17 -> bfloat16`, `Add n3`, `weight w float32 [8, 4]`, `constant s = 0.5`, `input x ...`."""
    if tensor.is_empty():
        return "nothing"
    if is_weight(tensor):
        return f"weight {tensor.name} {type_of(tensor)}"
    if isinstance(tensor, gs.Constant):
        return f"constant {tensor.name} = {tensor.values.tolist()}"
    if not tensor.inputs:
        return f"input {tensor.name} {type_of(tensor)}"
    node = tensor.inputs[0]
    text = f"{op_name(node)} {node.name}"
    if node.op == "Cast":
        return f"{text} -> {dtype_of(tensor)}"
    return f"{text} -> {type_of(tensor)}" if node.op in TRANSPARENT else text


class _Matcher:
    """One attempt: what is bound so far and every difference met. It goes on after a difference, to tell how near it is."""

    def __init__(self, given: Match | None = None) -> None:
        self.tensors: dict[str, Tensor] = dict(given.tensors) if given is not None else {}
        self.nodes: dict[P, Node] = dict(given.matched) if given is not None else {}
        self.constants: set[Pattern] = set()
        self.faults: list[Fault] = []
        self.num_given = len(self.nodes)

    def near(self, pattern: P) -> bool:
        nodes, constants = size(pattern)
        found = len(self.nodes) - self.num_given
        return 2 * (found + len(self.constants)) > nodes + constants if nodes == 1 else 2 * found > nodes

    def at_node(self, pattern: P, node: Node) -> None:
        """Match a node and everything above it."""
        if op_name(node) != pattern.op:
            self.fault(node, "the node is of another op", pattern.op, f"{op_name(node)} {node.name}")
            return
        self.nodes[pattern] = node
        if pattern.name:
            self.bind(pattern.name, node.outputs[0], node, "the output")
        self.at_attributes(pattern, node)
        given = list(node.inputs)
        while len(given) > len(pattern.inputs) and given[-1].is_empty():
            given.pop()
        if len(given) != len(pattern.inputs):
            wanted, got = f"{len(pattern.inputs)} operands", f"{len(given)}: {', '.join(map(describe, given))}"
            self.fault(node, f"{op_name(node)} has another number of operands", wanted, got)
        self.at_operands(pattern, node, given)

    def at_attributes(self, pattern: P, node: Node) -> None:
        for name, wanted in pattern.attributes.items():
            got = attribute(node, name)
            allowed = wanted.values if isinstance(wanted, OneOf) else (wanted,)
            if wanted is not ANY and _plain(got) not in [_plain(value) for value in allowed]:
                self.fault(node, f"attribute {name} of {op_name(node)} differs", str(wanted), str(got))
        if is_plugin(node):
            return
        for name, got in node.attrs.items():
            default = _defaults(str(node.op)).get(name)
            if name not in pattern.attributes and _plain(got) != default:
                wanted = str(default) if default is not None else "none"
                self.fault(node, f"attribute {name} of {op_name(node)} is not part of the pattern", wanted, str(got))

    def at_operands(self, pattern: P, node: Node, given: list[Tensor]) -> None:
        """Match operands in order. If they match with two of them swapped, that is the one fault told."""
        start = self.snapshot()
        self.at_each(pattern, node, given)
        if len(self.faults) == len(start.faults) or len(given) != len(pattern.inputs):
            return
        in_order = self.snapshot()
        for one, other in combinations(range(len(given)), 2):
            swapped = list(given)
            swapped[one], swapped[other] = given[other], given[one]
            self.restore(start)
            self.at_each(pattern, node, swapped)
            if len(self.faults) == len(start.faults):
                got = f"{op_name(node)}({', '.join(map(describe, given))})"
                which = "the operands" if len(given) == 2 else f"operands {one} and {other}"
                self.fault(node, f"{which} of {op_name(node)} are swapped", pattern.brief(), got)
                return
        self.restore(in_order)

    def at_each(self, pattern: P, node: Node, given: list[Tensor]) -> None:
        for index, (item, tensor) in enumerate(zip(pattern.inputs, given, strict=False)):
            self.at_tensor(item, tensor, node, f"operand {index} of {op_name(node)}")

    def at_tensor(self, pattern: Pattern, tensor: Tensor, reader: Node, place: str) -> None:
        """Match a tensor that `reader` reads at `place`."""
        if isinstance(pattern, Either):
            self.at_either(pattern, tensor, reader, place)
        elif isinstance(pattern, (P, Output)):
            self.at_producer(pattern, tensor, reader, place)
        elif isinstance(pattern, W):
            self.at_weight(pattern, tensor, reader, place)
        elif isinstance(pattern, C) and not (_is_small(tensor) and pattern.accepts(tensor.values)):
            self.fault(reader, f"{place} differs", f"the constant {pattern}", describe(tensor))
        elif isinstance(pattern, Any) and tensor.is_empty():
            self.fault(reader, f"{place} is absent", pattern.name, "nothing")
        else:
            assert isinstance(pattern, (Any, C)), pattern
            if isinstance(pattern, C):
                self.constants.add(pattern)
            if pattern.name:
                self.bind(pattern.name, tensor, reader, place)

    def at_weight(self, pattern: W, tensor: Tensor, reader: Node, place: str) -> None:
        if is_weight(_behind(tensor)):
            self.constants.add(pattern)
        if is_weight(tensor) and pattern.rank in (None, len(tensor.shape)):
            self.bind(pattern.name, tensor, reader, place)
            return
        rank = f" of {pattern.rank} dimensions" if pattern.rank is not None else ""
        self.fault(reader, f"{place} differs", f"a weight{rank} ({pattern.name})", describe(tensor))

    def at_producer(self, pattern: P | Output, tensor: Tensor, reader: Node, place: str) -> None:
        item, index = (pattern.node, pattern.index) if isinstance(pattern, Output) else (pattern, 0)
        made = _made_by(tensor, item.op)
        if made is None or made.inputs[0].outputs[index] is not made:
            wanted = item.op if index == 0 and not isinstance(pattern, Output) else f"output {index} of {item.op}"
            self.fault(reader, f"{place} differs", wanted, describe(tensor))
            if made is None:
                return
        elif made is not tensor:
            self.fault(reader, f"{place} differs", item.op, describe(tensor))
        known = self.nodes.get(item)
        if known is None:
            self.at_node(item, made.inputs[0])
        elif known is not made.inputs[0]:
            self.fault(reader, f"{place} differs", f"{op_name(known)} {known.name} again", describe(tensor))

    def at_either(self, pattern: Either, tensor: Tensor, reader: Node, place: str) -> None:
        start, best = self.snapshot(), None
        for option in pattern.options:
            self.restore(start)
            self.at_tensor(option, tensor, reader, place)
            if len(self.faults) == len(start.faults):
                return
            if best is None or (len(self.faults), -len(self.nodes)) < (len(best.faults), -len(best.nodes)):
                best = self.snapshot()
        assert best is not None, "Either() of nothing"
        self.restore(best)

    def bind(self, name: str, tensor: Tensor, reader: Node, place: str) -> None:
        known = self.tensors.setdefault(name, tensor)
        same_constant = isinstance(known, gs.Constant) and isinstance(tensor, gs.Constant) and known.name == tensor.name
        if known is not tensor and not same_constant:
            wanted = f"{describe(known)} ({name}, as elsewhere in the pattern)"
            self.fault(reader, f"{place} is another tensor", wanted, describe(tensor))

    def fault(self, node: Node, reason: str, wanted: str, got: str) -> None:
        self.faults.append(Fault(node, reason, wanted, got))

    def snapshot(self) -> _Matcher:
        copy = _Matcher()
        copy.restore(self)
        return copy

    def restore(self, other: _Matcher) -> None:
        self.tensors, self.nodes = dict(other.tensors), dict(other.nodes)
        self.constants, self.faults = set(other.constants), list(other.faults)


def _made_by(tensor: Tensor, op: str) -> gs.Variable | None:
    """The tensor itself if a node of that op makes it, else the first such one behind casts and views, else None."""
    while isinstance(tensor, gs.Variable) and tensor.inputs:
        node = tensor.inputs[0]
        if op_name(node) == op:
            return tensor
        if node.op not in TRANSPARENT:
            return None
        tensor = node.inputs[0]
    return None


def _behind(tensor: Tensor) -> Tensor:
    """What casts and views were made of."""
    while tensor.inputs and tensor.inputs[0].op in TRANSPARENT:
        tensor = tensor.inputs[0].inputs[0]
    return tensor


def _leaks(graph: Graph, nodes: Sequence[Node], roots: Sequence[Node]) -> list[Fault]:
    """Every reader outside `nodes` of a value that one of them, roots aside, makes."""
    leaks = []
    for node in nodes:
        for tensor in node.outputs if not _among(node, roots) else ():
            inside = " and ".join(f"{op_name(r)} {r.name}" for r in _unique(tensor.outputs) if _among(r, nodes))
            outside = [f"{op_name(r)} {r.name}" for r in _unique(tensor.outputs) if not _among(r, nodes)]
            if graph.is_output(tensor):
                outside.append(f"graph output {tensor.name}")
            if outside:
                wanted = f"no reader besides {inside}" if inside else "no reader"
                leaks.append(Fault(node, f"{tensor.name} has another reader", wanted, ", ".join(outside)))
    return leaks


def _reads(node: Node, producer: Node) -> bool:
    return any(tensor is output for tensor in node.inputs for output in producer.outputs)


def _plain(value: Value) -> Value:
    return list(value) if isinstance(value, tuple) else value


def _is_small(tensor: Tensor) -> bool:
    return isinstance(tensor, gs.Constant) and not is_weight(tensor)


def _among(node: Node, nodes: Sequence[Node]) -> bool:
    return any(node is other for other in nodes)  # gs compares nodes by value


def _unique(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple({id(node): node for node in nodes}.values())


@cache
def _defaults(op: str) -> dict[str, Value]:
    schema = onnx.defs.get_schema(op, OPSET, "")
    return {
        name: onnx.helper.get_attribute_value(a.default_value)
        for name, a in schema.attributes.items()
        if a.default_value.type != onnx.AttributeProto.UNDEFINED
    }
