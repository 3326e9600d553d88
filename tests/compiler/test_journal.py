"""The journal: read back as written, believed up to the first damage, and only by a build that is made of the same things."""

from pathlib import Path

import pytest
from support.families import make_checkpoint

from dsc.compiler import journal as journals
from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.journal import UNREADABLE, Journal
from dsc.compiler.quantize import Errors
from dsc.compiler.staging import Staging

IDENTITY = {"the recipe": "abc", "model.safetensors": "12 bytes"}
ERRORS = Errors(0.5, 2.0, 0.25, 3, 1, {"-8..7": 1})
DIGESTS = ("f" * 64, {"w.packed": "a" * 64})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".journal"


def opened(path: Path, identity: dict[str, str] = IDENTITY) -> Journal:
    journal = Journal(path, identity)
    journal.begin()
    return journal


def written(path: Path) -> list[bytes]:
    """Lines of a journal in which two jobs are on the disk for certain, and a third and a file are not."""
    journal = opened(path)
    journal.add_job(10, ERRORS)
    journal.add_job(11, Errors())
    journal.synced(journal.mark())
    journal.add_job(12, Errors(saturated=7))
    journal.add_file("weights/a", *DIGESTS)
    journal.close()
    return path.read_bytes().splitlines(keepends=True)


def test_what_is_written_is_read_back(path: Path) -> None:
    lines = written(path)
    found = Journal(path, IDENTITY)
    assert found.goes_on
    assert found.jobs == {10: ERRORS, 11: Errors(), 12: Errors(saturated=7)}
    assert found.files == {"weights/a": DIGESTS}
    assert found.differs == []
    opened(path, IDENTITY).close()
    assert path.read_bytes().splitlines(keepends=True)[: len(lines)] == lines


def test_a_job_that_is_forgotten_can_be_done_again(path: Path) -> None:
    written(path)
    journal = opened(path)
    journal.forget(["weights/a"], [10])
    assert (sorted(journal.jobs), journal.files) == ([11, 12], {})
    journal.add_job(10, Errors(saturated=1))
    journal.close()
    assert Journal(path, IDENTITY).jobs[10] == Errors(saturated=1)


def one_digit_more(line: bytes) -> bytes:
    """Still JSON, and of another meaning."""
    assert b"12" in line
    return line.replace(b"12", b"13", 1)


@pytest.mark.parametrize("damage", [
    one_digit_more, lambda line: line[:-1], lambda line: line[:5] + b"\n", lambda line: b"\0" * len(line), lambda line: b"\n",
    lambda line: b"\xff" + line, lambda line: line.rpartition(b" ")[0] + b"\n",
])  # fmt: skip
def test_a_damaged_line_and_all_after_it_are_not_believed(path: Path, damage: object) -> None:
    lines = written(path)
    number = next(n for n, line in enumerate(lines) if b'"job":12' in line)
    path.write_bytes(b"".join([*lines[:number], damage(lines[number]), *lines[number + 1 :]]))  # type: ignore[operator]
    found = opened(path)
    assert (sorted(found.jobs), found.files) == ([10, 11], {})
    found.add_job(12, Errors())
    found.close()
    assert sorted(Journal(path, IDENTITY).jobs) == [10, 11, 12]


@pytest.mark.parametrize("content", [b'{"format":1,"identity":{}}\n{"job":0}\n', b"\0\0\0\n", b"what is this\n"])
def test_another_version_and_a_damaged_head_are_told_and_begun_anew(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found = opened(path)
    assert (found.jobs, found.goes_on, found.differs) == ({}, False, [UNREADABLE])
    found.close()
    assert content not in path.read_bytes()
    assert Journal(path, IDENTITY).differs == []


def test_a_version_of_tomorrow_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "FORMAT", journals.FORMAT + 1)
    written(path)
    monkeypatch.undo()
    found = Journal(path, IDENTITY)
    assert (found.jobs, found.differs) == ({}, [UNREADABLE])


def test_a_journal_that_was_never_begun_says_nothing(path: Path) -> None:
    for content in (b"", b'{"format":'):
        path.write_bytes(content)
        found = Journal(path, IDENTITY)
        assert (found.goes_on, found.differs) == (False, [])


@pytest.mark.parametrize(("changed", "told"), [
    ({**IDENTITY, "the recipe": "abd"}, ["the recipe"]),
    ({**IDENTITY, "model.safetensors": "13 bytes", "the recipe": ""}, ["model.safetensors", "the recipe"]),
    ({"the recipe": "abc"}, ["model.safetensors"]),
    ({**IDENTITY, "b.safetensors": ""}, ["b.safetensors"]),
])  # fmt: skip
def test_what_has_changed_is_named_and_nothing_is_believed(
    path: Path, changed: dict[str, str], told: list[str]
) -> None:
    written(path)
    found = opened(path, changed)
    assert (found.jobs, found.files, found.differs) == ({}, {}, told)
    found.close()
    assert Journal(path, IDENTITY).differs == told


def test_after_the_machine_stopped_only_what_was_synced_is_believed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for boot in ("another", ""):
        written(path)
        other = path.with_name("boot_id")
        other.write_text(boot)
        monkeypatch.setattr(journals, "BOOT_ID", other if boot else path.with_name("none"))
        found = opened(path)
        assert (sorted(found.jobs), found.files) == ([10, 11], {})
        # What is added now counts; what the machine lost does not come back with it.
        found.add_job(14, Errors())
        found.close()
        monkeypatch.setattr(journals, "BOOT_ID", other)
        assert sorted(Journal(path, IDENTITY).jobs) == ([10, 11, 14] if boot else [10, 11])
        monkeypatch.undo()
        path.unlink()


def test_without_a_path_nothing_is_kept() -> None:
    journal = Journal()
    journal.begin()
    journal.add_job(1, Errors())
    journal.synced(journal.mark())
    journal.close()
    assert journal.jobs == {1: Errors()}


# -- what a build does with it


def cut_short(target: Path, identity: dict[str, str]) -> str:
    """A build that ends half way; what it told its user."""
    try:
        with Staging(target, 0, identity) as stage:
            told = stage.resumed()
            (stage.folder / "weights").mkdir(exist_ok=True)
            assert not told or (stage.folder / "weights" / "w").read_text() == "half"
            (stage.folder / "weights" / "w").write_text("half")
            stage.journal.add_job(0, Errors())
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return told


def test_the_user_hears_whether_a_build_goes_on_or_begins_anew(tmp_path: Path) -> None:
    target = tmp_path / "x.engine"
    assert cut_short(target, IDENTITY) == ""
    assert cut_short(target, IDENTITY) == "goes on with a build that was cut short"
    with Staging(target, 0, {**IDENTITY, "the recipe": "abd"}) as stage:
        assert stage.resumed() == "starts anew: changed since the build that was cut short: the recipe"
        assert [path.name for path in stage.folder.iterdir()] == [".journal"]
    cut_short(target, IDENTITY)
    journal = tmp_path / ".x.engine.partial" / ".journal"
    journal.write_bytes(journal.read_bytes().replace(b'"format":', b'"format": '))
    with Staging(target, 0, IDENTITY) as stage:
        assert stage.resumed().endswith("short: the journal, which is damaged or of another version of dsc")
        assert [path.name for path in stage.folder.iterdir()] == [".journal"]


def test_a_source_that_changed_has_another_identity(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "r1", num_hidden_layers=2)

    def identity() -> dict[str, str]:
        return Checkpoint.open(folder, read_config(folder)).identity()

    before = identity()
    assert before == identity()
    file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)  # same size, same header
    assert {name for name, value in identity().items() if before[name] != value} == {file.name}
