"""After every pass a graph still means what transformers computes: standard ops in onnxruntime, plugin ops by references."""

import pytest
from support.breaks import imported, passes_before
from support.families import make_checkpoint, read_tensors
from support.interpret import interpret, one_sequence
from support.oracle import Oracle, worst_row_error

from dsc.compiler.config import read_config
from dsc.compiler.ir.graph import is_plugin
from dsc.compiler.pipeline import run_passes

TOLERANCE = 1e-4  # worst row, relative
NUM_TOKENS = 50


@pytest.mark.parametrize(
    ("family", "phase"),
    [(family, "prefill") for family in ("v2-lite", "v2", "v3", "k2", "faults")]
    + [("v2-lite", "decode"), ("v3", "decode")],
)
def test_passes_keep_the_meaning(family, phase, tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoint", family)
    oracle, stored, spec = Oracle(folder, tmp_path / "float32"), read_tensors(folder), read_config(folder)
    tokens = [(7 * i * i + 3 * i) % spec.vocab_size for i in range(NUM_TOKENS)]
    logits, hidden = oracle.main(tokens)
    check(imported(folder, "main", phase), stored, tokens, {"logits": logits, "hidden": hidden})
    if spec.num_mtp_layers:
        logits, after = oracle.mtp(tokens[1:], hidden[:-1])
        graph = imported(folder, "mtp", phase)
        check(graph, stored, tokens[1:], {"logits": logits, "hidden.out": after}, hidden=hidden[:-1])


def check(graph, stored, tokens, wanted, **inputs):
    for pass_ in passes_before("set_dtype"):
        if not run_passes([graph], [pass_]).passes[0].runs[0].found:
            continue
        got = interpret(graph, stored, one_sequence(graph, tokens, **inputs))
        for name, value in wanted.items():
            assert worst_row_error(got[name], value) < TOLERANCE, f"{name} after {pass_.name}"
    assert all(is_plugin(node) for node in graph.nodes)
