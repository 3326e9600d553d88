"""Give every intermediate its place in one arena."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsc.compiler.ir.graph import Graph, GraphInfo, Node, Tensor, is_plugin, schema_of, type_of
from dsc.compiler.ir.rewrite import Pass, Report
from dsc.runtime.errors import DscError
from dsc.runtime.expressions import ExpressionError, parse
from dsc.runtime.program import nbytes


@dataclass(frozen=True)
class Interval:
    """A tensor's bytes, and the first and last node (by position) that needs them."""

    name: str
    bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class PlanMemory(Pass):
    """graph.memory_plan[tensor] = byte offset, for the largest step; smaller steps use the same offsets.

    Tensors that are needed at one node at once never share bytes; a node's outputs do not reuse its inputs. Graph inputs
    and outputs, weights and aliases have no place of their own. Greedy by size with the best-fitting gap (Pisarchyk and
    Lee 2020, "Efficient memory management for deep neural net inference"). `alignment` is in bytes.
    """

    alignment: int = 256

    def __post_init__(self) -> None:
        if type(self.alignment) is not int or self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise DscError("plan_memory cannot use this alignment", wanted="a power of two", got=repr(self.alignment))

    def expected(self, info: GraphInfo) -> int:
        return 1  # one plan per graph

    def run(self, graph: Graph) -> Report:
        intervals = liveness(graph)
        graph.memory_plan = place(intervals, self.alignment)
        peak, bound = arena_bytes(intervals, graph.memory_plan), max_live_bytes(intervals)
        report = Report()
        report.change(graph.name, f"{peak} bytes for {len(intervals)} tensors, {bound} needed at once")
        return report


def liveness(graph: Graph) -> list[Interval]:
    """One interval per tensor that needs a place, in the order of the nodes; bytes at the bounds of the letters."""
    positions = {id(node): i for i, node in enumerate(graph.gs.nodes)}
    owner: dict[str, str] = {}  # aliases and what they are aliases of
    found: dict[str, Interval] = {}
    outside = {tensor.name for tensor in (*graph.gs.inputs, *graph.gs.outputs)}
    for node in graph.gs.nodes:
        aliases = _aliases(node)
        for tensor in node.outputs:
            first = positions[id(node)]
            last = max([first, *(positions[id(reader)] for reader in tensor.outputs)])
            target = aliases.get(tensor.name, tensor.name)
            name = owner[tensor.name] = owner.get(target, target)
            if name in found:  # an alias keeps alive what it is an alias of
                found[name] = replace(found[name], last=max(found[name].last, last))
            elif name == tensor.name and name not in outside:
                found[name] = Interval(name, bound_bytes(graph, tensor), first, last)
    return list(found.values())


def _aliases(node: Node) -> dict[str, str]:
    """Outputs of a node that are the memory of an input -> that input."""
    if not is_plugin(node):
        return {}
    schema = schema_of(node)
    pairs = zip(schema.outputs_of(node.attrs), node.outputs, strict=True)
    return {tensor.name: node.inputs[schema.slot(o.alias)].name for o, tensor in pairs if o.alias}


def bound_bytes(graph: Graph, tensor: Tensor) -> int:
    """Bytes of a tensor in the largest step; DscError where its size has no bound or could shrink as a letter grows."""
    type_ = type_of(tensor)
    where = f"{graph.name}: {tensor.name} {type_}"
    assert type_ is not None, where
    try:
        for size in type_.shape:
            if isinstance(size, str) and not parse(size).grows():
                raise DscError("cannot be planned: its size may shrink as a letter grows", where=where, got=size)
        return nbytes(type_.dtype, type_.shape, graph.info.bounds)
    except ExpressionError as error:
        raise DscError("cannot be planned", where=where, got=str(error)) from error


def place(intervals: list[Interval], alignment: int) -> dict[str, int]:
    """Offsets by name: largest first, each into the smallest gap between what is placed and alive at the same time."""
    placed: list[tuple[int, int, Interval]] = []  # offset, end, interval
    for item in sorted(intervals, key=lambda i: (-i.bytes, i.first, i.name)):
        alive = sorted(p[:2] for p in placed if p[2].first <= item.last and item.first <= p[2].last)
        offset = _best_gap(alive, item.bytes, alignment)
        placed.append((offset, offset + item.bytes, item))
    return {item.name: offset for offset, _, item in sorted(placed, key=lambda p: p[2].first)}


def _best_gap(taken: list[tuple[int, int]], size: int, alignment: int) -> int:
    """Aligned offset of the smallest gap between `taken` ranges that holds `size` bytes; behind them when none does."""
    ends = [0]
    for _, end in taken:
        ends.append(max(ends[-1], end))
    starts = [_align(end, alignment) for end in ends]
    gaps = [(begin - start, start) for (begin, _), start in zip(taken, starts, strict=False) if begin - start >= size]
    return min(gaps)[1] if gaps else starts[-1]


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def arena_bytes(intervals: list[Interval], plan: dict[str, int]) -> int:
    """Bytes of the arena that holds a plan."""
    return max((plan[item.name] + item.bytes for item in intervals), default=0)


def max_live_bytes(intervals: list[Interval]) -> int:
    """The most bytes that any node needs at once: no plan can do with less."""
    changes: dict[int, int] = {}
    for item in intervals:
        changes[item.first] = changes.get(item.first, 0) + item.bytes
        changes[item.last + 1] = changes.get(item.last + 1, 0) - item.bytes
    total, most = 0, 0
    for at in sorted(changes):
        total += changes[at]
        most = max(most, total)
    return most
