"""Memory that a build keeps to: sizes as users write them, limits of cgroups, threads that fit, and the refusal with its numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.builds import refusal
from support.engines import TINY_R1
from support.small_engine import make_graphs

from dsc.compiler import pieces, ram
from dsc.compiler.convert import memory_of
from dsc.compiler.emission_plan import EmissionPlan, plan_emission
from dsc.compiler.emit import gather, outgrows, threads_for
from dsc.compiler.ir.weight import Quantize, Source, WeightValues
from dsc.runtime.errors import DscError

MB, GIB = 1000**2, 1 << 30
THERE = 300 * MB  # of memory that the process has already


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB whose cgroups lie in the returned folder, and a process in none of them."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(ram, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(ram, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(ram, "OWN_MEMORY", tmp_path / "statm")
    (tmp_path / "statm").write_text(f"999999 {THERE // 4096} 7 1 0 8 0\n")
    return tmp_path / "cgroup"


def limit(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


# -- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 * GIB // 2),
        ("800MB", 800 * MB),
        ("2000000000", 2 * 10**9),
        ("64k", 64_000),
        (" 3 kib ", 3072),
        ("1T", 10**12),
        ("0.5tib", 1 << 39),
        ("17b", 17),
    ],
)
def test_sizes_as_they_are_written(text: str, size: int) -> None:
    assert ram.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "2 PB", "-1GB", "2,5GB", "2GBs", "1e9", "two", "1.GB", "2iB", "9" * 400])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(DscError) as raised:
        ram.parse_bytes(text)
    assert raised.value.text().startswith("--max-ram: is no amount of memory")
    assert raised.value.got == text


# -- the machine


def test_the_machine_without_cgroups(machine: Path) -> None:
    assert ram.machine_bytes() == 64 * GIB
    limit(machine.parent / "own", "0::/")
    assert ram.machine_bytes() == 64 * GIB


def test_the_least_of_all_groups_around_the_process(machine: Path) -> None:
    """Version 2: "max" is no limit, and a group's limit holds for all inside it, not for its neighbours."""
    limit(machine.parent / "own", "0::/user/build")
    limit(machine / "user/build/memory.max", "max")
    assert ram.machine_bytes() == 64 * GIB
    limit(machine / "user/memory.max", str(5 * GIB))
    limit(machine / "user/other/memory.max", str(GIB))
    limit(machine.parent / "memory.max", str(GIB))  # beside the root of all groups
    assert ram.machine_bytes() == 5 * GIB
    limit(machine / "user/build/memory.max", str(3 * GIB))
    assert ram.machine_bytes() == 3 * GIB
    limit(machine / "memory.max", str(2 * GIB))  # a container sees its own group as the root
    assert ram.machine_bytes() == 2 * GIB


def test_groups_of_version_1(machine: Path) -> None:
    """Only the memory controller's line counts; more than the machine has is how it writes no limit."""
    limit(machine.parent / "own", "9:cpu,cpuacct:/small\n4:memory:/build")
    limit(machine / "memory/small/memory.limit_in_bytes", str(GIB))
    limit(machine / "memory/build/memory.limit_in_bytes", str((1 << 63) - 4096))
    assert ram.machine_bytes() == 64 * GIB
    limit(machine / "memory/memory.limit_in_bytes", str(7 * GIB))
    assert ram.machine_bytes() == 7 * GIB
    limit(machine / "memory/build/memory.limit_in_bytes", str(6 * GIB))
    assert ram.machine_bytes() == 6 * GIB


# -- threads


def test_threads_within_a_quarter_of_the_machine(machine: Path) -> None:
    """16 of 64 GiB, less what is there and the slack: 15.6 GiB."""
    assert ram.threads_within(None, GIB, wanted=99) == 15
    assert ram.threads_within(None, GIB, wanted=3) == 3
    limit(machine.parent / "own", "0::/")
    limit(machine / "memory.max", str(12 * GIB))
    assert ram.threads_within(None, GIB, wanted=99) == 2
    assert ram.threads_within(None, 4 * GIB, wanted=99) == 1  # more than the quarter: a build is never refused unasked


def test_threads_within_what_the_user_gives(machine: Path) -> None:
    """To the byte, and without regard to the machine."""
    there = ram.resident_bytes() + pieces.SLACK_BYTES
    assert ram.resident_bytes() == THERE // 4096 * 4096
    for threads in (1, 2, 5):
        assert ram.threads_within(there + threads * MB, MB, wanted=99) == threads
        assert ram.threads_within(there + threads * MB + MB - 1, MB, wanted=99) == threads
    assert ram.threads_within(999 * GIB, MB, wanted=4) == 4


def test_too_little_is_refused_with_its_numbers(machine: Path) -> None:
    there = ram.resident_bytes() + pieces.SLACK_BYTES  # 299,999,232 + 67,108,864
    with pytest.raises(DscError) as raised:
        ram.threads_within(there + 50 * MB - 1, 50 * MB, wanted=4)
    assert raised.value.text().splitlines() == [
        "--max-ram: is too little memory for this model",
        "  wanted  417 MB or more: 367 for the graphs, 50 for weights",
        "  got     417 MB",
    ]
    with pytest.raises(DscError, match="too little memory"):
        ram.threads_within(MB, MB, wanted=4)


def test_threads_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than cores this process may use, at most eight."""
    for cores, threads in ((1, 2), (2, 3), (7, 8), (8, 8), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert pieces.threads_wanted() == threads


# -- threads of a plan


def plan_of(*expressions: Source | Quantize) -> EmissionPlan:
    names = [f"w{i}.weight" for i in range(len(expressions))]
    return plan_emission({n: WeightValues(n, e, "experts") for n, e in zip(names, expressions, strict=True)})


def test_threads_of_a_plan_are_those_of_its_largest_piece(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    plan = plan_emission(gather(make_graphs()))
    assert max(memory_of(job) for job in plan.jobs) == 96 * 64 * 40  # the embedding: 40 bytes an element
    thread_bytes = 96 * 64 * 40 + (8 << 20)
    there = ram.resident_bytes() + pieces.SLACK_BYTES
    assert [threads_for(plan, there + n * thread_bytes) for n in (1, 2, 7, 9)] == [1, 2, 7, 8]
    assert threads_for(plan, None) == 8
    with pytest.raises(DscError) as raised:
        threads_for(plan, there + thread_bytes - 1)
    assert "367 for the graphs, 9 for weights" in raised.value.text()


def test_a_larger_weight_takes_no_larger_pieces(machine: Path) -> None:
    """Pieces are cut by elements, so memory does not follow the model's size."""
    found = {}
    for rows in (4096, 65536):
        source = Source("x", "bfloat16", (rows, 4096))
        for name, e in (
            ("bf16", source),
            ("wint4", Quantize(source, "wint4:128", "data")),
            ("fp8", Quantize(source, "fp8", "data")),
        ):
            found[name, rows] = [memory_of(job) for job in plan_of(e).jobs]
    assert found["bf16", 4096] == found["bf16", 65536] == [40 * (1 << 21)]
    assert found["wint4", 4096] == found["wint4", 65536] == [24 * (1 << 22)]
    assert found["fp8", 4096] == found["fp8", 65536] == [40 * (1 << 21)]  # a row of blocks at least


def test_what_outgrows_its_memory(machine: Path) -> None:
    """Source and engine together against the memory to keep to: what lies under it may stay in the system's cache."""
    plan = plan_of(Source("x", "bfloat16", (1024, 1024)))
    size = plan.source_bytes + plan.file_bytes
    assert plan.source_bytes == 2 << 20
    assert plan.file_bytes > 2 << 20  # a header beside the values
    assert [outgrows(plan, max_ram) for max_ram in (size - 1, size)] == [True, False]
    assert not outgrows(plan, None)
    limit(machine.parent / "own", "0::/")
    limit(machine / "memory.max", str(4 * size - 4))
    assert outgrows(plan, None)


# -- the command


def test_the_command_refuses_too_little(tmp_path: Path) -> None:
    """Nothing is written then; what is wanted is the sum of its parts."""
    build = ("compile", "--recipe", "tiny-r1-wint4", "--model", TINY_R1, "--output", tmp_path / "tiny.engine")
    said = refusal(*build, "--max-ram", "1MB")
    assert "--max-ram: is too little memory for this model\n" in said
    assert "\n  got     1 MB\n" in said
    found = re.search(r"wanted  ([\d,]+) MB or more: ([\d,]+) for the graphs, ([\d,]+) for weights\n", said)
    assert found, said
    wanted, graphs, weights = (int(number.replace(",", "")) for number in found.groups())
    assert abs(wanted - graphs - weights) <= 1
    assert graphs > 64  # a Python with torch in it, and the slack
    assert weights >= 8
    assert list(tmp_path.iterdir()) == []
    assert "--max-ram: is no amount of memory" in refusal(*build, "--max-ram", "lots")
    assert list(tmp_path.iterdir()) == []
