"""What a program's memory plan is worth, worked out from the program alone: a second opinion on the planner."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.runtime.errors import DscError, raise_all
from dsc.runtime.program import Program


@dataclass(frozen=True)
class Lifetime:
    """A tensor of the arena: its bytes, and the first and last node (by position) that needs it."""

    name: str
    begin: int
    end: int
    first: int
    last: int


def lifetimes(program: Program) -> list[Lifetime]:
    """Every activation with a place, in the order they are written; aliases keep theirs alive."""
    last = {
        program.root(name): i for i, node in enumerate(program.nodes) for name in (*node.inputs, *node.outputs) if name
    }
    found = []
    for i, node in enumerate(program.nodes):
        for name in node.outputs:
            operand = program.operands[name]
            if operand.offset is not None:
                found.append(Lifetime(name, operand.offset, operand.offset + operand.bytes, i, last[name]))
    return found


def check_places(program: Program) -> None:
    """Raise DscError where two tensors that are needed at once share bytes: the graph changed after it was planned."""
    faults: list[DscError] = []
    alive: list[Lifetime] = []
    for item in lifetimes(program):
        alive = [other for other in alive if other.last >= item.first]
        shared = [other for other in alive if other.begin < item.end and item.begin < other.end]
        faults += [
            DscError(
                f"{item.name} lies in the memory of {other.name}, which is still needed",
                where=f"{program.name}: {program.nodes[item.first].name}",
                got=f"bytes {item.begin} to {item.end}, and {other.begin} to {other.end}",
                try_="plan_memory as the last pass",
            )
            for other in shared
        ]
        alive.append(item)
    raise_all(f"the memory plan does not fit {program.name}", faults)


def memory_report(program: Program) -> dict[str, int]:
    """Bytes of a program's memory at its largest step, for report.json; the arena cannot be smaller than live_bytes."""
    items = lifetimes(program)
    sizes = {
        role: sum(o.bytes for o in program.operands.values() if o.role == role and not o.alias)
        for role in ("input", "output", "state")
    }
    return {
        "arena_bytes": program.arena_bytes,
        "live_bytes": most_live_bytes(items),
        "tensors": len(items),
        **{f"{role}_bytes": size for role, size in sizes.items()},
    }


def most_live_bytes(items: list[Lifetime]) -> int:
    """The most bytes that one node needs."""
    change: dict[int, int] = {}
    for item in items:
        size = item.end - item.begin
        change[item.first] = change.get(item.first, 0) + size
        change[item.last + 1] = change.get(item.last + 1, 0) - size
    total, most = 0, 0
    for at in sorted(change):
        total += change[at]
        most = max(most, total)
    return most
