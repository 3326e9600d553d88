"""The runner of passes: its contract, what it tells, what it writes."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from dsc.compiler.ir.graph import Graph, GraphInfo, variable
from dsc.compiler.ir.rewrite import Pass, Report
from dsc.compiler.ir.text import from_text
from dsc.compiler.ir.verify import VerifyError
from dsc.compiler.opt import TINY_R1, info_of, run_opt
from dsc.compiler.pipeline import check_final, run_passes
from dsc.compiler.recipe import Allowance
from dsc.passes.fuse_swiglu import FuseSwiglu
from dsc.passes.insert_rms_norm import InsertRmsNorm
from dsc.plugins.schema import Type
from dsc.runtime.errors import DscError

MLP = """
    # layers: 0
    {name} (float[T,8] gate, float[T,8] up) => (float[T,8] y)
    <float[T,8] sigmoid, float[T,8] silu>
    {{
      [sigmoid] sigmoid = Sigmoid(gate)
      [silu] silu = Mul(gate, sigmoid)
      [act] y = {last}
    }}
"""


def mlp(name: str, last: str = "Mul(silu, up)") -> Graph:
    text = MLP.format(name=name, last=last)
    return from_text(text, info_of(text, TINY_R1, name.rpartition("_")[2]))


SWAPPED = "Mul(up, silu)"


def test_report_counts_every_graph_and_lists_final_nodes():
    graphs = [mlp("main_prefill"), mlp("main_decode")]
    report = run_passes(graphs, [FuseSwiglu()])
    assert graphs[0].info.done == ("fuse_swiglu",)
    data = json.loads(json.dumps(report.to_json()))
    assert data["nodes"] == {g: [{"node": "act", "op": "dsc.Swiglu"}] for g in ("main_prefill", "main_decode")}
    (entry,) = data["passes"]
    assert (entry["name"], entry["options"], entry["allowed"]) == ("fuse_swiglu", {}, None)
    assert entry["graphs"][1] == {
        "graph": "main_decode",
        "model": "main",
        "phase": "decode",
        "expected": 1,
        "found": 1,
        "changed": [{"node": "act", "note": ""}],
        "declined": [],
        "notices": [],
    }
    assert report.notes() == []


def test_what_users_must_be_told_is_told_once_for_all_graphs():
    class Telling(FuseSwiglu):
        def run(self, graph):
            report = super().run(graph)
            report.notice("act", "stays as it is")
            return report

    report = run_passes([mlp("a"), mlp("b")], [Telling()])
    assert [note.split(": ", 1)[1] for note in report.notes()] == ["stays as it is, 1 node"]
    assert report.to_json()["passes"][0]["graphs"][0]["notices"] == [{"node": "act", "note": "stays as it is"}]


def test_all_graphs_of_a_broken_contract_are_told_at_once():
    with pytest.raises(DscError) as error:
        run_passes([mlp("a"), mlp("b", SWAPPED), mlp("c", SWAPPED)], [FuseSwiglu()])
    site = (
        "  at      act: the operands of Mul are swapped\n"
        "  wanted  Mul(Mul(gate, Sigmoid(gate)), up)\n"
        "  got     Mul(input up float32 [T, 8], Mul silu)\n"
        "  try     mend the graph; or, in the recipe, allow: {fuse_swiglu: {count: 2, reason: ...}}"
    )
    assert error.value.text() == (
        "fuse_swiglu broke its contract: 2 faults\n"
        f"b: fuse_swiglu found 0 of 1 sites\n{site}\n"
        f"c: fuse_swiglu found 0 of 1 sites\n{site}"
    )


def test_allow_is_the_way_round_and_shows_in_the_report():
    allow = {"fuse_swiglu": Allowance(1, "up comes first in this export")}
    report = run_passes([mlp("a"), mlp("b", SWAPPED)], [FuseSwiglu()], allow)
    (entry,) = report.to_json()["passes"]
    assert entry["allowed"] == {"count": 1, "reason": "up comes first in this export"}
    assert [(g["expected"], g["found"], len(g["declined"])) for g in entry["graphs"]] == [(1, 1, 0), (1, 0, 1)]


def test_allow_must_be_exact():
    graphs = [mlp("a", SWAPPED), mlp("b", SWAPPED)]
    with pytest.raises(DscError, match=r"allow   1 in all graphs \(one\)"):
        run_passes(graphs, [FuseSwiglu()], {"fuse_swiglu": Allowance(1, "one")})
    with pytest.raises(DscError) as error:
        run_passes([mlp("a")], [FuseSwiglu()], {"fuse_swiglu": Allowance(1, "one")})
    assert error.value.text() == (
        "fuse_swiglu misses nothing, yet the recipe allows it to\n"
        "  got  allow: {fuse_swiglu: {count: 1, reason: one}}\n"
        "  try  take it out"
    )


def test_allow_does_not_cover_a_surplus():
    graph = mlp("a")
    graph.info = GraphInfo(TINY_R1, "main", layers=())
    with pytest.raises(DscError, match="found 1 of 0 sites"):
        run_passes([graph], [FuseSwiglu()], {"fuse_swiglu": Allowance(1, "more")})


def test_allow_for_a_pass_that_does_not_run():
    with pytest.raises(DscError, match="allow names fuse_qkv, which does not run"):
        run_passes([mlp("a")], [FuseSwiglu()], {"fuse_qkv": Allowance(1, "why")})


def test_without_a_near_miss_the_nodes_left_are_told():
    with pytest.raises(DscError) as error:
        run_passes([mlp("a", "Sub(silu, up)")], [FuseSwiglu()])
    assert ("left", "Sigmoid sigmoid") in error.value.details
    graph = mlp("a")
    graph.info = GraphInfo(TINY_R1, "main", layers=())
    with pytest.raises(DscError) as error:
        run_passes([graph], [InsertRmsNorm()])
    assert ("left", "no RMSNormalization either") in error.value.details


@dataclass(frozen=True)
class Breaks(Pass):
    """Reads what nothing makes."""

    def expected(self, info: GraphInfo) -> None:
        return None

    def run(self, graph: Graph) -> Report:
        graph.nodes[0].inputs[0] = variable("lost", Type("float32", ("T", 8)))
        return Report()


def test_a_pass_that_breaks_a_graph_is_named():
    with pytest.raises(
        VerifyError, match=r"^graph a is broken after test_pipeline\n  sigmoid: reads lost, which nothing makes"
    ):
        run_passes([mlp("a")], [Breaks()])


@dataclass(frozen=True)
class Promises(Pass):
    """Promises nothing, changes nothing."""

    def expected(self, info: GraphInfo) -> None:
        return None

    def run(self, graph: Graph) -> Report:
        return Report()


def test_dumps_are_read_back_and_only_of_passes_that_changed_something(tmp_path):
    run_passes([mlp("main_decode")], [Promises(), FuseSwiglu()], dump=tmp_path / "dump")
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert files == ["00-as_given.main_decode.txt", "02-fuse_swiglu.main_decode.txt"]
    text, report = run_opt(tmp_path / "dump" / files[0], ["fuse_swiglu"])
    wanted = (tmp_path / "dump" / files[1]).read_text()
    assert text == wanted.replace("# done: test_pipeline fuse_swiglu", "# done: fuse_swiglu")
    assert report["passes"][0]["graphs"][0]["phase"] == "decode"


def test_the_final_check_reads_the_graphs_and_no_report():
    graph = mlp("main_decode")
    with pytest.raises(DscError) as error:
        check_final([graph])
    assert error.value.where == "main_decode"
    assert error.value.details[0][0] == "Sigmoid"
    assert error.value.details[0][1].startswith("sigmoid, for ")
    assert "fuse_swiglu" in error.value.details[0][1]
    run_passes([graph], [FuseSwiglu()])
    check_final([graph])


@pytest.mark.parametrize(
    "op", ["Softmax", "Sigmoid", "TopK", "RMSNormalization", "Gemm", "Attention", "RotaryEmbedding"]
)
def test_the_final_check_knows_who_takes_what(op):
    graph = Graph("main", info_of("", TINY_R1, ""))
    out = variable("y", Type("float32", ("T", 8)))
    graph.add(op, [graph.add_input("x", "float32", ("T", 8))], [out], "left")
    graph.add_output(out)
    with pytest.raises(DscError, match=rf"{op} +left, for [a-z]+_"):
        check_final([graph])
