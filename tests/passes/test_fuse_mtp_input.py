import pytest
from support.breaks import assert_every_break_is_told, graph_before
from support.families import make_checkpoint
from support.graphs import assert_same, run_pass

from dsc.passes.fuse_mtp_input import FuseMtpInput
from dsc.runtime.errors import DscError

BEFORE = """
    # model: mtp
    # layers: 4
    mtp (float[T,8] embedding, float[T,8] hidden) => (float[T,16] y)
    <float[T,8] e, float[T,8] h, float[8] "enorm.weight", float[8] "hnorm.weight">
    {
      ["mtp.enorm"] e = RMSNormalization<axis=-1, epsilon=1e-6>(embedding, "enorm.weight")
      ["mtp.hnorm"] h = RMSNormalization<axis=-1, epsilon=1e-6>(hidden, "hnorm.weight")
      ["mtp.concat"] y = Concat<axis=1>(e, h)
    }
"""
AFTER = """
    mtp (float[T,8] embedding, float[T,8] hidden) => (float[T,16] y)
    <float[8] "enorm.weight", float[8] "hnorm.weight">
    {
      ["mtp.input"] y = dsc.MtpInput<epsilon=1e-6>(embedding, hidden, "enorm.weight", "hnorm.weight")
    }
"""
SWAPPED = BEFORE.replace("Concat<axis=1>(e, h)", "Concat<axis=1>(h, e)")


def test_fires():
    graph, run = run_pass(BEFORE, "fuse_mtp_input")
    assert_same(graph, AFTER)
    assert (run.expected, run.found, run.report.declined) == (1, 1, [])


@pytest.mark.parametrize(
    ("text", "reason", "got"),
    [
        (
            SWAPPED,
            "the halves of Concat are swapped",
            "input hidden float32 [T, 8], then input embedding float32 [T, 8]",
        ),
        (
            BEFORE.replace("1e-6>(hidden", "1e-5>(hidden"),
            "the two norms have different epsilons",
            "1e-06 and 1e-05",
        ),
        (
            BEFORE.replace("float[T,8] hidden)", "float[T,8] hidden, float[T,8] other)").replace("(hidden,", "(other,"),
            "the second half is not the main model's hidden",
            "input embedding float32 [T, 8], then input other float32 [T, 8]",
        ),
    ],
)
def test_declines(text, reason, got):
    graph, run = run_pass(text, "fuse_mtp_input", allow=1)
    (site,) = run.report.declined
    assert (site.node, site.reason, site.got) == ("mtp.concat", reason, got)
    assert not graph.find("dsc.MtpInput")


def test_main_has_none(tmp_path):
    folder = make_checkpoint(tmp_path, "v3")
    graph = graph_before("fuse_mtp_input", folder)
    report = FuseMtpInput().run(graph)
    assert FuseMtpInput().expected(graph.info) == 0
    assert (report.changed, report.declined) == ([], [])


def test_every_break_is_told(tmp_path):
    folder = make_checkpoint(tmp_path, "v3")
    assert_every_break_is_told(graph_before("fuse_mtp_input", folder, "mtp"), FuseMtpInput())


def test_fails():
    with pytest.raises(DscError) as error:
        run_pass(SWAPPED, "fuse_mtp_input")
    assert error.value.text() == (
        "mtp: fuse_mtp_input found 0 of 1 sites\n"
        "  at      mtp.concat: the halves of Concat are swapped\n"
        "  wanted  the embedding, then input hidden\n"
        "  got     input hidden float32 [T, 8], then input embedding float32 [T, 8]\n"
        "  try     mend the graph; or, in the recipe, allow: {fuse_mtp_input: {count: 1, reason: ...}}"
    )
