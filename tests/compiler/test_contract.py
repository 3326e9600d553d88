"""The fusing passes together: every site of every family is found, and no single change to a graph is overlooked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from support.changes import KINDS, change, changes
from support.families import make_checkpoint
from support.graphs import FUSING_PASSES, import_all, lower

from dsc.compiler.ir.graph import Graph
from dsc.runtime.errors import DscError

SAMPLED = 4  # changes of each kind and model; all of them are tried in tests/soak


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Graph]]:
    @cache
    def make(family: str) -> list[Graph]:
        folder = make_checkpoint(tmp_path_factory.mktemp(family), family, num_hidden_layers=2)
        return import_all(folder)

    return make


@pytest.mark.parametrize("family", ["v2-lite", "v2", "v3", "k2", "faults"])
def test_every_site_of_every_family(family, imported):
    graphs = lower(imported(family))
    for graph in graphs:
        moe = graph.info.num_moe_layers
        assert len(graph.find("dsc.Qkv")) == len(graph.find("dsc.MlaAttention")) == graph.info.num_layers
        assert (len(graph.find("dsc.Moe")), len(graph.find("dsc.Router"))) == (moe, moe)
        assert len(graph.find("dsc.Swiglu")) == graph.info.num_dense_layers
        assert len(graph.find("dsc.MtpInput")) == int(graph.info.model == "mtp")


@pytest.mark.parametrize("left_out", FUSING_PASSES)
def test_a_pass_left_out_is_told(left_out, imported):
    names = tuple(name for name in FUSING_PASSES if name != left_out)
    with pytest.raises(DscError) as error:
        lower(imported("v3"), names)
    told = "mtp" if left_out == "fuse_mtp_input" else "main.prefill"
    assert told in error.value.text()


@pytest.mark.parametrize("left_out", ["fuse_mtp_input", "fuse_lm_head", "fuse_add_rms_norm", "fuse_qkv", "fuse_moe"])
def test_the_simple_passes_count_what_fusing_passes_left(left_out, imported):
    """Their contracts hold whatever ran before: only the final check sees what has no plugin op."""
    skipped = {left_out, "insert_mla_attention"} if left_out == "fuse_qkv" else {left_out}
    with pytest.raises(DscError, match=r"the passes left nodes that no engine runs|nodes are outside plugin ops"):
        lower(imported("v3"), tuple(name for name in FUSING_PASSES if name not in skipped))


@pytest.mark.parametrize("model", [0, 1], ids=["main", "mtp"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_named(kind, model, imported):
    graph = imported("v3")[model]
    places = list(changes(graph, kind))
    assert len(places) >= SAMPLED
    for place in places[:: max(1, len(places) // SAMPLED)]:
        changed, name = change(graph, kind, place)
        with pytest.raises(DscError) as error:
            lower([changed])
        assert name in error.value.text(), (place, error.value.text())
