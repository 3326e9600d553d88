"""The memory planner: nothing alive at once shares bytes, no plan beats what must be alive, and the pass fires as a pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_engine import LIMITS, SPEC, planned_graphs

from dsc.compiler.ir.graph import Graph, GraphInfo, weight
from dsc.compiler.ir.weight import Source
from dsc.passes.plan_memory import Interval, PlanMemory, arena_bytes, liveness, max_live_bytes, place
from dsc.runtime.errors import DscError


@st.composite
def interval_lists(draw):
    count = draw(st.integers(0, 24))
    found = []
    for i in range(count):
        first = draw(st.integers(0, 15))
        last = draw(st.integers(first, 16))
        found.append(Interval(f"t{i}", draw(st.integers(0, 5000)), first, last))
    return found


@given(interval_lists(), st.sampled_from([1, 64, 256]))
def test_what_lives_together_never_overlaps(intervals, alignment):
    plan = place(intervals, alignment)
    assert set(plan) == {item.name for item in intervals}
    for i, a in enumerate(intervals):
        assert plan[a.name] % alignment == 0
        for b in intervals[i + 1 :]:
            if a.first <= b.last and b.first <= a.last:
                apart = plan[a.name] + a.bytes <= plan[b.name] or plan[b.name] + b.bytes <= plan[a.name]
                assert apart or not a.bytes or not b.bytes, (a, b, plan)


@given(interval_lists())
def test_the_bound_is_what_a_node_needs_and_no_plan_beats_it(intervals):
    needed = [sum(i.bytes for i in intervals if i.first <= at <= i.last) for at in range(17)]
    assert max_live_bytes(intervals) == max(needed)
    assert arena_bytes(intervals, place(intervals, 1)) >= max_live_bytes(intervals)


@given(interval_lists())
def test_the_order_of_the_list_does_not_matter(intervals):
    assert place(intervals, 256) == place(list(reversed(intervals)), 256)


def test_the_best_fitting_gap_is_taken():
    fixed = [Interval("a", 100, 0, 9), Interval("b", 90, 0, 5), Interval("c", 80, 0, 9), Interval("d", 70, 0, 5), Interval("e", 68, 0, 9)]  # fmt: skip
    late = Interval("late", 65, 6, 9)  # b's 90 and d's 70 are free then: d's place wastes less
    plan = place([*fixed, late], 1)
    assert plan["late"] == plan["d"]


def chain(bounds=None):
    """norm -> norm -> norm, the last one an output."""
    info = GraphInfo(SPEC, "main", "decode", (0,), LIMITS.bounds("decode") if bounds is None else bounds)
    graph = Graph("main.decode", info)
    x = graph.add_input("x", "float32", ("T", 64))
    norm = weight("norm.weight", Source("norm", "float32", (64,)))
    for name in ("a", "b", "c", "out"):
        x = graph.plugin("RmsNorm", {"x": x, "weight": norm}, {"epsilon": 1e-6}, name, {"y": name}).outputs[0]
    graph.add_output(x)
    return graph


def test_fires():
    graph = chain()
    report = PlanMemory().run(graph)
    size = LIMITS.bounds("decode")["T"] * 64 * 4
    assert liveness(graph) == [Interval("a", size, 0, 1), Interval("b", size, 1, 2), Interval("c", size, 2, 3)]
    assert graph.memory_plan == {"a": 0, "b": size, "c": 0}  # c takes the place of a; x and out lie outside
    assert PlanMemory().expected(graph.info) == len(report.changed) == 1
    assert report.changed[0].note == f"{2 * size} bytes for 3 tensors, {2 * size} needed at once"
    assert not report.declined


def test_an_output_nobody_reads_still_has_a_place():
    graph = chain()
    x, norm = graph.input("x"), graph.weights()["norm.weight"]
    inputs = {"x": x, "residual": graph.nodes[0].outputs[0], "weight": norm}
    graph.plugin("AddRmsNorm", inputs, {"epsilon": 1e-6}, "unread", {})
    PlanMemory().run(graph)
    names = {item.name for item in liveness(graph)}
    assert {"unread.y", "unread.sum"} <= names == set(graph.memory_plan)


def test_an_alias_keeps_its_memory_and_has_no_place_of_its_own(monkeypatch):
    graph = chain()
    monkeypatch.setattr("dsc.passes.plan_memory._aliases", lambda node: {"b": "a"} if node.name == "b" else {})
    PlanMemory().run(graph)
    assert set(graph.memory_plan) == {"a", "c"}
    assert next(item for item in liveness(graph) if item.name == "a").last == 2  # b is read by node 2
    assert graph.memory_plan["a"] != graph.memory_plan["c"]


def test_caches_and_graph_outputs_lie_outside():
    for graph in planned_graphs():
        inside = set(graph.memory_plan)
        assert not inside & {tensor.name for tensor in (*graph.gs.inputs, *graph.gs.outputs)}
        assert not inside & set(graph.weights())


def test_fails_on_a_letter_without_a_bound():
    with pytest.raises(DscError) as caught:
        PlanMemory().run(chain(bounds={"B": 4}))
    assert str(caught.value) == "main.decode: a float32 [T, 64]: cannot be planned\n  got  T: T has no value"


def test_fails_on_a_size_that_shrinks():
    graph = chain()
    graph.nodes[0].outputs[0].shape = ["64-T", 64]
    with pytest.raises(DscError, match=r"its size may shrink as a letter grows\n  got  64-T"):
        PlanMemory().run(graph)


@pytest.mark.parametrize("alignment", [0, -256, 100, "256", 2.0, True])
def test_alignments_that_are_none(alignment):
    with pytest.raises(DscError, match="wanted  a power of two"):
        PlanMemory(alignment=alignment)
