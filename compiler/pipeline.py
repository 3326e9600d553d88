"""Run passes over graphs and hold them to their contract: sites found == sites expected, or the build fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dsc.compiler.ir.graph import Graph, is_plugin, op_name
from dsc.compiler.ir.rewrite import Pass, Report, find_pass, pass_names
from dsc.compiler.ir.text import header, to_text
from dsc.compiler.ir.verify import verify
from dsc.compiler.recipe import Allowance
from dsc.plugins.schema import SchemaError
from dsc.runtime.errors import DscError, raise_all

SHOWN_NODES = 24  # of those outside plugin ops
SHOWN_SITES = 8  # of a failed contract; the report of a build that is allowed to pass has them all


@dataclass(frozen=True)
class Run:
    """One pass on one graph. `expected` is None where the pass promises nothing."""

    graph: str
    model: str
    phase: str
    expected: int | None
    report: Report

    @property
    def found(self) -> int:
        return len(self.report.changed)

    @property
    def missed(self) -> int:
        return 0 if self.expected is None else self.expected - self.found

    def to_json(self) -> dict[str, Any]:
        facts = {"graph": self.graph, "model": self.model, "phase": self.phase}
        return {**facts, "expected": self.expected, "found": self.found, **asdict(self.report)}


@dataclass(frozen=True)
class PassRuns:
    """One pass on all graphs; `allowed` is what the recipe lets it miss."""

    name: str
    options: Mapping[str, Any]
    runs: tuple[Run, ...]
    allowed: Allowance | None

    def to_json(self) -> dict[str, Any]:
        allowed = asdict(self.allowed) if self.allowed is not None else None
        runs = [run.to_json() for run in self.runs]
        return {"name": self.name, "options": dict(self.options), "allowed": allowed, "graphs": runs}


@dataclass
class PipelineReport:
    """Every pass in order, and the nodes that each graph has in the end: graph -> [(node, op)]."""

    passes: list[PassRuns] = field(default_factory=list)
    nodes: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """{"passes": [{name, options, allowed, graphs: [{graph, model, phase, expected, found, changed, declined, notices}]}],
        "nodes": {graph: [{node, op}]}}."""
        nodes = {graph: [{"node": node, "op": op} for node, op in pairs] for graph, pairs in self.nodes.items()}
        return {"passes": [runs.to_json() for runs in self.passes], "nodes": nodes}

    def notes(self) -> list[str]:
        """What the passes want to be told: each notice once, with the number of nodes it is about."""
        nodes: dict[tuple[str, str], set[str]] = {}
        for runs in self.passes:
            for notice in (n for run in runs.runs for n in run.report.notices):
                nodes.setdefault((runs.name, notice.note), set()).add(notice.node)
        return [
            f"{name}: {note}, {len(of)} {'node' if len(of) == 1 else 'nodes'}" for (name, note), of in nodes.items()
        ]


def run_passes(
    graphs: Sequence[Graph],
    passes: Sequence[Pass],
    allow: Mapping[str, Allowance] | None = None,
    dump: Path | None = None,
) -> PipelineReport:
    """Run each pass on every graph, in order; graphs are edited in place, sorted and verified after each.

    allow    how many sites a pass may miss, over all graphs, and why; the number must be exact
    dump     a folder for each graph's text, as given and after every pass that changed it: `03-fuse_qkv.main.decode.txt`
    raises   DscError where a contract is broken or an operand's type is not an op's, before the next pass; VerifyError where a pass broke a graph
    """
    allow = dict(allow or {})
    _check_allowances(allow, passes)
    for graph in graphs:
        graph.tidy()
        verify(graph)
        _dump(dump, 0, "as_given", graph)
    report = PipelineReport()
    for number, pass_ in enumerate(passes, start=1):
        runs = tuple(_run(pass_, graph) for graph in graphs)
        for graph, run in zip(graphs, runs, strict=True):
            if run.found:
                _dump(dump, number, pass_.name, graph)
        allowance = allow.get(pass_.name)
        _check_contract(pass_, graphs, runs, allowance)
        report.passes.append(PassRuns(pass_.name, asdict(pass_), runs, allowance))
    report.nodes = {graph.name: [(str(node.name), op_name(node)) for node in graph.nodes] for graph in graphs}
    return report


def check_final(graphs: Sequence[Graph]) -> None:
    """Nothing but plugin ops may be left, whatever the reports say. Raises DscError naming every node that is not one."""
    takers: dict[str, list[str]] = {}
    for name in pass_names():
        for op in find_pass(name).takes:
            takers.setdefault(op, []).append(name)
    faults = []
    for graph in graphs:
        left = [node for node in graph.nodes if not is_plugin(node)]
        if not left:
            continue
        left.sort(key=lambda node: op_name(node) not in takers)  # views of what a pass should have taken come last
        named = [(op_name(n), f"{n.name}{_for(takers.get(op_name(n), []))}") for n in left[:SHOWN_NODES]]
        details = [*named, ("and", f"{len(left) - SHOWN_NODES} more")] if len(left) > SHOWN_NODES else named
        faults.append(
            DscError(
                f"{len(left)} of {len(graph.nodes)} nodes are outside plugin ops",
                where=graph.name,
                details=details,
                wanted="only dsc.* nodes",
                try_="the passes named, in the recipe, before set_dtype",
            )
        )
    raise_all("the passes left nodes that no engine runs", faults)


def _for(passes: Sequence[str]) -> str:
    return f", for {' or '.join(passes)}" if passes else ""


def _run(pass_: Pass, graph: Graph) -> Run:
    info = graph.info
    expected = pass_.expected(info)
    try:
        report = pass_.run(graph)
    except SchemaError as error:
        what = f"{pass_.name} matched a site that its op cannot stand for"
        raise DscError(what, where=graph.name, got=str(error)) from error
    graph.tidy()
    verify(graph, after=pass_.name)
    graph.info = replace(graph.info, done=(*graph.info.done, pass_.name))
    return Run(graph.name, info.model, info.phase, expected, report)


def _dump(folder: Path | None, number: int, step: str, graph: Graph) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}-{step}.{graph.name}.txt").write_text(header(graph.info) + to_text(graph))


def _check_allowances(allow: Mapping[str, Allowance], passes: Sequence[Pass]) -> None:
    names = [pass_.name for pass_ in passes]
    unknown = [name for name in allow if name not in names]
    raise_all(
        "allow", [DscError(f"allow names {name}, which does not run", wanted=", ".join(names)) for name in unknown]
    )


def _check_contract(pass_: Pass, graphs: Sequence[Graph], runs: Sequence[Run], allowance: Allowance | None) -> None:
    """Raise unless every graph has its sites, or exactly the allowed number is missing."""
    broken = [(graph, run) for graph, run in zip(graphs, runs, strict=True) if run.missed]
    missed = sum(run.missed for _, run in broken)
    if allowance is not None and missed == allowance.count and all(run.missed > 0 for _, run in broken):
        return
    if allowance is not None and not broken:
        raise DscError(
            f"{pass_.name} misses nothing, yet the recipe allows it to",
            got=f"allow: {{{pass_.name}: {{count: {allowance.count}, reason: {allowance.reason}}}}}",
            try_="take it out",
        )
    raise_all(f"{pass_.name} broke its contract", [_contract_error(pass_, *item, missed, allowance) for item in broken])


def _contract_error(pass_: Pass, graph: Graph, run: Run, missed: int, allowance: Allowance | None) -> DscError:
    details = _sites_too_many(run) if run.missed < 0 else _sites_missed(pass_, graph, run)
    if len(details) > SHOWN_SITES * 3:
        rest = len(run.report.declined) - SHOWN_SITES
        details = [*details[: SHOWN_SITES * 3], ("and", f"{rest} more")]
    if allowance is not None:
        details.append(("allow", f"{allowance.count} in all graphs ({allowance.reason})"))
    try_ = f"mend the graph; or, in the recipe, allow: {{{pass_.name}: {{count: {missed}, reason: ...}}}}"
    return DscError(
        f"{pass_.name} found {run.found} of {run.expected} sites",
        where=graph.name,
        details=details,
        try_=try_ if run.missed > 0 else "",
    )


def _sites_too_many(run: Run) -> list[tuple[str, str]]:
    names = [changed.node for changed in run.report.changed]
    return [("changed", ", ".join(names[:SHOWN_SITES]) + (", ..." if len(names) > SHOWN_SITES else ""))]


def _sites_missed(pass_: Pass, graph: Graph, run: Run) -> list[tuple[str, str]]:
    """Each declined site; where there is none, the nodes that the pass was there to take."""
    details: list[tuple[str, str]] = []
    for site in run.report.declined:
        details += [("at", f"{site.node}: {site.reason}"), ("wanted", site.wanted), ("got", site.got)]
    if not details:
        left = [f"{op_name(node)} {node.name}" for node in graph.nodes if op_name(node) in pass_.takes]
        nothing = f"no {', '.join(pass_.takes)} either" if pass_.takes else "no site that is nearly one"
        details.append(("left", ", ".join(left[:SHOWN_SITES]) or nothing))
    return details
