"""Ranks that fail, die or do not come: one error that names them, no hang, and no process left behind."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.ranks import compile_ranks, environment, free_port, rank_processes, rest, start, wait_for, wait_until_gone

from dsc import runtime
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.engine import Engine
from dsc.runtime.errors import DscError
from dsc.runtime.ranks import communicator, followers, load, meeting
from dsc.runtime.ranks.interrupts import held_interrupts

LONG = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 1500}
LOADS = """
    import sys
    from dsc import runtime
    {before}
    runtime.load(sys.argv[1])
"""
IN_STEP_3 = """
    from dsc.runtime.sampler import Sampler
    choose, steps = Sampler.choose, iter(range(10**6))
    def third(self, requests, logits):
        if next(steps) == 2:
            {does}
        return choose(self, requests, logits)
    Sampler.choose = third
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return compile_ranks("fp32", 2, tmp_path_factory.mktemp("failing"))


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    yield
    wait_until_gone(rank_processes())


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that is rank 1 of 2, of which this one is rank 0; it loads a folder after some changes."""
    port = free_port()
    for name, value in environment(0, 2, port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "_meetings", itertools.count(1))
    started: list[subprocess.Popen[str]] = []

    def begin(path: Path, before: str = "") -> subprocess.Popen[str]:
        script = LOADS.format(before=before)
        started.append(start(script, path, given=environment(1, 2, port)))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


# -- the meeting


def test_a_rank_of_another_build_is_named_with_both_hashes(
    folder: Path, tmp_path: Path, rank_1: Callable[..., subprocess.Popen[str]]
) -> None:
    other = shutil.copytree(folder, tmp_path / "other.engine")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["toolchain"]["dsc"] = "0.0.1"
    (other / "manifest.json").write_text(json.dumps(manifest))
    hashes = [EngineFolder.open(path).content_hash for path in (folder, other)]
    process = rank_1(other)
    with pytest.raises(DscError) as error:
        runtime.load(folder)
    assert error.value.what == "rank 1 loads an engine of another build"
    assert (error.value.wanted, error.value.got) == (f"{hashes[0]}, as on rank 0", hashes[1])
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "rank 0 does not go on with rank 1" in text
    assert hashes[0] in text


def test_a_rank_that_does_not_come_is_named(
    folder: Path, rank_1: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "SECONDS", 0.5)
    with pytest.raises(DscError, match=r"rank 1 did not come within 0 s\n  wanted  2 ranks.*\n  got     rank 0$"):
        runtime.load(folder)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(DscError, match="rank 0 did not come within"):
        runtime.load(folder)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(DscError, match=r"wanted  2 processes.*\n  got     3 processes"):
        runtime.load(folder)
    monkeypatch.setenv("LOCAL_RANK", "")
    with pytest.raises(DscError, match="got     RANK 1, WORLD_SIZE 3, LOCAL_RANK not set"):
        runtime.load(folder)


def test_a_process_that_dies_before_it_comes_is_told_with_what_it_wrote(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named dsc\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(DscError, match="rank 1 of the engine has ended\n  got  exit code 7: no module named dsc"):
        runtime.load(folder)


def test_a_rank_that_cannot_load_is_named(folder: Path, rank_1: Callable[..., subprocess.Popen[str]]) -> None:
    process = rank_1(folder, "import dsc.runtime.engine as e; e.choose_num_blocks = lambda *a, **o: 1 // 0")
    with pytest.raises(DscError, match="rank 1 of the engine has failed\n  got  ZeroDivisionError"):
        runtime.load(folder)
    assert process.wait(20) == 1


def test_a_leader_that_cannot_load_leaves_nobody(folder: Path) -> None:
    with pytest.raises(DscError, match="the cache must hold a token"):
        runtime.load(folder, cache_tokens=0)
    assert rank_processes() == []


def test_ranks_of_one_machine_share_the_hashing(
    folder: Path, tmp_path: Path, rank_1: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is hashed once, and a fault that another rank finds names the file and the tensor."""
    copy = EngineFolder(shutil.copytree(folder, tmp_path / "copy.engine"), EngineFolder.open(folder).manifest)
    listed = (
        "import pathlib, dsc.runtime.artifact as a; verify = a.EngineFolder._verify_file; a.EngineFolder._verify_file "
    )
    listed += f"= lambda s, p, f: (open({str(tmp_path / 'theirs')!r}, 'a').write(p + chr(10)), verify(s, p, f))[1]"
    ours: list[str] = []
    verify = EngineFolder._verify_file

    def note(self: EngineFolder, path: str, advance: Callable[[int], None]) -> list[DscError]:
        ours.append(path)
        return verify(self, path, advance)

    monkeypatch.setattr(EngineFolder, "_verify_file", note)
    rank_1(copy.path, listed)
    runtime.load(copy.path).close()
    theirs = (tmp_path / "theirs").read_text().split()
    weights = {path for path in copy.manifest.files if path.startswith("weights/")}
    assert {*ours, *theirs} == set(copy.manifest.files)
    assert len(weights) > 1
    assert weights & set(theirs)
    assert not weights & set(ours) & set(theirs)

    path = (weights & set(theirs)).pop()
    name, entry = next((name, entry) for name, entry in copy.manifest.tensors.items() if entry.file == path)
    with open(copy.path / path, "r+b") as file:
        file.seek(entry.offset)
        byte = file.read(1)[0]
        file.seek(entry.offset)
        file.write(bytes([byte ^ 1]))
    monkeypatch.setattr(meeting, "_meetings", itertools.count(1))
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(DscError, match="rank 1 of the engine has failed") as error:
        runtime.load(copy.path)
    assert f"{copy.path / path}: the bytes of {name} changed" in str(error.value)
    runtime.load(copy.path, verify=False).close()


SLOW = "import dsc.runtime.ranks.communicator as c, datetime; c.MEETING = datetime.timedelta(seconds=1)"


def test_a_rank_waits_for_a_leader_that_loads_for_long(
    folder: Path, rank_1: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object, **__: object) -> None:
        time.sleep(8.0)

    monkeypatch.setattr(EngineFolder, "verify_hashes", slow)
    process = rank_1(folder, SLOW)
    with runtime.load(folder) as engine:
        assert engine.generate(["def "], max_tokens=2)
    assert process.wait(20) == 0


def test_a_rank_that_fails_late_is_told_as_what_it_is(
    folder: Path, rank_1: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator, "MEETING", timedelta(seconds=3))
    process = rank_1(folder, "import dsc.runtime.engine as e; e.BatchBuilder = lambda *a: 1 // 0")
    with pytest.raises(DscError, match="rank 1 of the engine has failed\n  got  ZeroDivisionError"):
        runtime.load(folder)
    assert process.wait(20) == 1


def test_what_a_leader_meets_because_a_rank_failed_is_told_as_that(
    folder: Path, rank_1: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        time.sleep(3.0)
        raise OSError(9, "Bad file descriptor")

    process = rank_1(folder, "import dsc.runtime.ranks.load as l; l.make_engine = lambda *a: 1 // 0")
    monkeypatch.setattr(load, "make_engine", broken)
    with pytest.raises(DscError, match="rank 1 of the engine has failed\n  got  ZeroDivisionError"):
        runtime.load(folder)
    assert process.wait(20) == 1


# -- while they serve


def test_a_killed_rank_ends_the_engine(folder: Path) -> None:
    engine = runtime.load(folder)
    stream = engine.stream("def ", **LONG)
    (process,) = rank_processes()
    threading.Timer(0.5, process.kill).start()
    begin = time.monotonic()
    with pytest.raises(DscError, match=r"rank 1 of the engine has ended\n  got  killed by SIGKILL"):
        engine.generate(["def "], **LONG)
    assert time.monotonic() - begin < 5
    for serve in (lambda: engine.generate(["x"]), lambda: list(stream), lambda: engine.cache.pool.take(1)):
        with pytest.raises(DscError, match="rank 1 of the engine has ended"):
            serve()
    engine.close()


def test_a_rank_that_fails_alone_ends_the_engine(
    folder: Path, rank_1: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "PATIENCE", 0.5)
    process = rank_1(folder, IN_STEP_3.format(does='raise MemoryError("no room")'))
    engine = runtime.load(folder)
    with pytest.raises(
        DscError, match="rank 1 of the engine has failed, the others have not\n  rank 1  MemoryError: no"
    ):
        engine.generate(["def "], **LONG)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "rank 0 is gone" in text


def test_a_rank_that_chooses_other_tokens_ends_the_engine(
    folder: Path, rank_1: Callable[..., subprocess.Popen[str]]
) -> None:
    process = rank_1(folder, IN_STEP_3.format(does="logits = -logits"))
    engine = runtime.load(folder)
    with pytest.raises(DscError, match="the ranks disagree: rank 1 has chosen other tokens than rank 0"):
        engine.generate(["def "], **LONG)
    assert process.wait(20) == 1


def test_a_leader_that_fails_alone_ends_the_engine(
    folder: Path, rank_1: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "PATIENCE", 0.5)
    process = rank_1(folder)
    engine = runtime.load(folder)
    assert engine.generate(["def "], max_tokens=3)

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine.loop, "_main", type("Broken", (), {"run": broken, "name": "main"})())
    with pytest.raises(
        DscError, match="rank 0 of the engine has failed, the others have not\n  rank 0  MemoryError: no"
    ):
        engine.generate(["def "], **LONG)
    assert process.wait(20) == 1


def test_an_interrupt_that_is_not_held_stays_one_and_ends_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    engine = runtime.load(folder)
    monkeypatch.setattr(engine.loop, "_main", type("Interrupted", (), {"run": interrupted, "name": "main"})())
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["def "], **LONG)
    with pytest.raises(DscError, match="rank 0 of the engine has failed, the others have not\n  rank 0  KeyboardInt"):
        engine.generate(["def "], **LONG)


def test_an_interrupt_is_held_until_all_ranks_are_done() -> None:
    done: list[int] = []

    def press(times: int) -> None:
        with held_interrupts():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            done.append(times)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for times in (1, 2):
            with pytest.raises(KeyboardInterrupt):
                press(times)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [1]  # a second one is not held


# -- the end


def test_ways_to_end(folder: Path, rank_1: Callable[..., subprocess.Popen[str]]) -> None:
    """Closed: the rank that torchrun started exits with 0. It had the least memory, which the cache is made for."""
    process = rank_1(folder, "import dsc.runtime.engine as e; e.choose_num_blocks = lambda *a, **o: 7")
    with runtime.load(folder) as engine:
        assert engine.cache.pool.num_blocks == 7
        stream = engine.stream("def ", **LONG)
        next(stream)
    assert process.wait(20) == 0
    for serve in (lambda: engine.generate(["x"]), lambda: list(stream)):
        with pytest.raises(DscError, match="the engine is closed"):
            serve()
    stream.close()
    engine.close()


def test_a_deleted_engine_ends_its_ranks(folder: Path) -> None:
    engine: Engine | None = runtime.load(folder)
    assert engine is not None
    stream = engine.stream("def ", **LONG)
    processes = rank_processes()
    assert len(processes) == 1
    gc.disable()
    try:
        engine = None
        assert next(stream)  # which still holds what it needs
        del stream
        wait_until_gone(processes)
    finally:
        gc.enable()


LEADER = """
    import sys, time
    from dsc import runtime
    engine = runtime.load(sys.argv[1])
    wanted = engine.generate(["def "], temperature=0, max_tokens=8)[0].token_ids
    print("loaded", flush=True)
    try:
        engine.generate(["def "], temperature=0, ignore_eos=True)
    except KeyboardInterrupt:
        assert engine.generate(["def "], temperature=0, max_tokens=8)[0].token_ids == wanted
        print("interrupted", flush=True)
    {then}
"""


def test_ctrl_c_ends_a_call_and_an_exception_the_ranks(folder: Path) -> None:
    leader = start(LEADER.format(then='raise RuntimeError("of the user")'), folder)
    assert leader.stdout is not None
    assert leader.stdout.readline() == "loaded\n"
    processes = rank_processes(leader.pid)
    time.sleep(0.3)
    leader.send_signal(signal.SIGINT)
    assert leader.stdout.readline() == "interrupted\n"
    text = rest(leader)
    assert leader.returncode == 1
    assert "RuntimeError: of the user" in text
    assert len(processes) == 1
    wait_until_gone(processes)


@pytest.mark.parametrize("when", ["starting", "generating"])
def test_a_killed_leader_leaves_nobody(folder: Path, when: str) -> None:
    leader = start(LEADER.format(then=""), folder)
    assert leader.stdout is not None
    if when == "generating":
        assert leader.stdout.readline() == "loaded\n"
        time.sleep(0.3)
    wait_for(lambda: rank_processes(leader.pid))
    processes = rank_processes(leader.pid)
    os.kill(leader.pid, signal.SIGKILL)
    leader.wait()
    leader.stdout.close()
    wait_until_gone(processes)
