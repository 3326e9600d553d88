"""What a pass is: a frozen dataclass of options that edits a graph, reports each site and states how many there must be."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from typing import ClassVar

from dsc.compiler.ir.graph import Graph, GraphInfo, Node
from dsc.runtime.errors import DscError, nearest


@dataclass(frozen=True)
class Changed:
    """A site a pass rewrote: the node that stands there now, and what is worth knowing about it."""

    node: str
    note: str = ""


@dataclass(frozen=True)
class Declined:
    """A site that looked right and was left: its node, and what was wanted and found there."""

    node: str
    reason: str
    wanted: str = ""
    got: str = ""


@dataclass
class Report:
    """What one run of a pass did to one graph."""

    changed: list[Changed] = field(default_factory=list)
    declined: list[Declined] = field(default_factory=list)
    notices: list[Changed] = field(default_factory=list)

    def change(self, node: Node | str, note: str = "") -> None:
        self.changed.append(Changed(node if isinstance(node, str) else str(node.name), note))

    def decline(self, node: Node | str, reason: str, wanted: str = "", got: str = "") -> None:
        self.declined.append(Declined(node if isinstance(node, str) else str(node.name), reason, wanted, got))

    def notice(self, node: Node | str, note: str) -> None:
        """What nobody should have to look for, such as a weight that stays unquantized: a build prints it."""
        self.notices.append(Changed(node if isinstance(node, str) else str(node.name), note))


@dataclass(frozen=True)
class Pass:
    """Base of all passes. The file's name is the pass's name everywhere; dataclass fields are its options.

    takes   ops that must not be left where the pass has run: what the final check says of a node that is
    """

    takes: ClassVar[tuple[str, ...]] = ()

    def expected(self, info: GraphInfo) -> int | None:
        """How many sites there must be, from the model's facts alone; None where nothing is promised."""
        raise NotImplementedError

    def run(self, graph: Graph) -> Report:
        """Edit the graph in place. The runner tidies and verifies it afterwards."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return type(self).__module__.rsplit(".", 1)[-1]


def pass_names() -> list[str]:
    """Names of all passes, sorted."""
    package = importlib.import_module("dsc.passes")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def find_pass(name: str) -> type[Pass]:
    """The pass class of a file in `dsc.passes`; DscError with the nearest known name otherwise."""
    if name not in pass_names():
        close = nearest(name, pass_names())
        raise DscError(f"unknown pass {name}", wanted=", ".join(pass_names()), got=name, try_=close or "dsc passes")
    module = importlib.import_module(f"dsc.passes.{name}")
    found = [
        v
        for v in vars(module).values()
        if isinstance(v, type) and issubclass(v, Pass) and v.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{name}: one pass per file, found {found}"
    return found[0]
