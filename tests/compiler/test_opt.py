"""`dsc opt`: passes with options on a textual graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsc.compiler.cli import main
from dsc.compiler.config import read_config
from dsc.compiler.opt import TINY_R1, info_of, parse_pass, run_opt
from dsc.passes.plan_memory import PlanMemory
from dsc.runtime.errors import DscError

GRAPH = """\
# layers:
main (float[R,8] x) => (float[R,32] y)
<float[32,8] "lm_head.weight">
{
  [lm_head] y = Gemm<transB=1>(x, "lm_head.weight")
}
"""


def test_the_default_facts_are_tiny_r1_s():
    assert read_config(Path(__file__).parents[2] / "examples" / "tiny-r1") == TINY_R1


def test_text_and_report(tmp_path):
    (tmp_path / "graph.txt").write_text(GRAPH)
    text, report = run_opt(tmp_path / "graph.txt", ["insert_linear"])
    assert '[lm_head] y = dsc.Linear <w_format: string = "fp32"> (x, "lm_head.weight", "")' in text
    assert "# done: insert_linear\n" in text
    assert report["passes"][0]["graphs"][0]["found"] == 1
    (tmp_path / "again.txt").write_text(text)
    assert run_opt(tmp_path / "again.txt", [])[0] == text


def test_the_command(tmp_path):
    (tmp_path / "graph.txt").write_text(GRAPH)
    run = CliRunner().invoke(main, ["opt", str(tmp_path / "graph.txt"), "insert_linear", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["nodes"] == {"main": [{"node": "lm_head", "op": "dsc.Linear"}]}
    run = CliRunner().invoke(main, ["opt", str(tmp_path / "graph.txt"), "insert_embedding"])
    assert run.exit_code == 2
    assert run.stderr.startswith("main: insert_embedding found 0 of 1 sites\n  left  no Gather either\n")
    run = CliRunner().invoke(main, ["opt", str(tmp_path / "none.txt"), "insert_linear"])
    assert run.exit_code == 2
    assert "none.txt: no such file" in run.stderr


def test_facts_come_from_the_header():
    info = info_of("# model: mtp\n# phase: decode\nmtp () => () {}", TINY_R1, "prefill")
    assert (info.model, info.phase, info.layers) == ("mtp", "decode", (4,))
    assert info.bounds["T"] == 16  # 8 sequences of one token and one draft
    assert info_of("", TINY_R1, "prefill").layers == (0, 1, 2, 3)


def test_options_on_the_command_line():
    assert parse_pass("plan_memory") == PlanMemory()
    assert parse_pass("plan_memory:alignment=64") == PlanMemory(alignment=64)
    assert parse_pass("plan_memory: {alignment: 64}") == PlanMemory(alignment=64)
    with pytest.raises(DscError, match="'alignment' is no option of plan_memory"):
        parse_pass("plan_memory:alignment")
    with pytest.raises(DscError, match="plan_memory has no option aligment"):
        parse_pass("plan_memory:aligment=64")
    with pytest.raises(DscError, match="unknown pass fuse_swigl\n") as error:
        parse_pass("fuse_swigl")
    assert error.value.try_ == "fuse_swiglu"
