"""Every single change to an imported graph, tried: each fails the build, and the message names it. About five minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.changes import KINDS, change, changes
from support.families import make_checkpoint
from support.graphs import import_all, lower

from dsc.runtime.errors import DscError


@pytest.mark.parametrize("family", ["v2-lite", "v2", "v3"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_named(kind: str, family: str, tmp_path: Path) -> None:
    overlooked = []
    for graph in import_all(make_checkpoint(tmp_path / family, family, num_hidden_layers=2)):
        places = list(changes(graph, kind))
        assert places
        for place in places:
            changed, name = change(graph, kind, place)
            try:
                lower([changed])
                overlooked.append((graph.name, *place, "nothing said"))
            except DscError as error:
                if name not in error.text():
                    overlooked.append((graph.name, *place, error.text()))
    assert overlooked == []
