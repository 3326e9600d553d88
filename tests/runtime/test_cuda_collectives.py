"""Steps of several ranks on GPUs, without one: what is asked of NCCL and of symmetric memory, and how a rank is let go."""

from __future__ import annotations

import ctypes
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsc.runtime.cuda import collectives as ways
from dsc.runtime.cuda import driver, nccl, symmetric
from dsc.runtime.cuda.bind import Binder
from dsc.runtime.cuda.collectives import Collectives
from dsc.runtime.cuda.nccl import Nccl
from dsc.runtime.cuda.symmetric import Renumbered, SymmetricMemory
from dsc.runtime.errors import DscError
from dsc.runtime.program import Operand, Program, ProgramNode
from dsc.runtime.ranks.group import Group
from dsc.runtime.steps import Collective, Kernel, Pointer, Repeat, Step, Variant

CPU = torch.device("cpu")


def group_of(ranks: int, rank: int = 0, agree: Callable[[int], int] = lambda number: number) -> Group:
    return Group(rank, ranks, rank, "127.0.0.1", dist.HashStore(), agree)


# -- binding


def program(*steps: Step, readers: tuple[str, ...] = ()) -> Program:
    """A node that has x [T, 8] and gives y, both in the arena, behind a node that makes x; `readers` read x later."""
    operands = {
        "in": Operand("bfloat16", ("T", 8), "input", 4 * 16),
        "x": Operand("bfloat16", ("T", 8), "activation", 4 * 16, offset=256),
        "y": Operand("bfloat16", ("T", 8), "activation", 4 * 16, offset=512),
        "every": Operand("bfloat16", (2, "T", 8), "scratch", 4 * 32, offset=768),
        "out": Operand("bfloat16", ("T", 8), "output", 4 * 16),
    }
    nodes = (
        ProgramNode("first", "RmsNorm", ("in",), ("x",), {}, (Variant(()),)),
        ProgramNode("sum", "AllReduce", ("x",), ("y",), {"ranks": 2}, (Variant(steps),)),
        *(ProgramNode(name, "RmsNorm", ("x",), (), {}, (Variant(()),)) for name in readers),
        ProgramNode("last", "RmsNorm", ("y",), ("out",), {}, (Variant(()),)),
    )
    made = Program("main.decode", "0" * 64, {"T": 4}, ("in",), ("out",), operands, nodes, arena_bytes=1024)
    made.check("main.decode")
    return made


class Told:
    """Collectives that write down what they are asked."""

    ranks = 2

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def all_reduce(self, source: torch.Tensor, destination: torch.Tensor, reduce: str, spent: bool) -> Any:
        self.asked.append((source, destination, reduce, spent))
        return lambda stream: None

    def all_gather(self, source: torch.Tensor, destination: torch.Tensor) -> Any:
        self.asked.append((source, destination))
        return lambda stream: None


def bind(made: Program, told: Told | None, tokens: int = 3) -> list[Any]:
    arena = torch.zeros(1024, dtype=torch.uint8)
    memory = {
        name: torch.zeros(operand.bytes, dtype=torch.uint8).view(torch.bfloat16)
        if operand.offset is None
        else arena[operand.offset : operand.offset + operand.bytes].view(torch.bfloat16)
        for name, operand in made.operands.items()
    }
    library = SimpleNamespace(function=lambda entry, shared_bytes: entry)
    binder = Binder(made, memory, lambda name: library, 1, told)  # type: ignore[arg-type]
    return binder.bind({"T": tokens})


SUM = Collective("all_reduce", "tensor", Pointer("x"), Pointer("y"), "bfloat16", "T*8")
GATHER = Collective("all_gather", "tensor", Pointer("x"), Pointer("every"), "bfloat16", "T*8")


@pytest.mark.parametrize("readers", [(), ("later",)])
def test_operands_are_seen_as_elements(readers: tuple[str, ...]) -> None:
    """As many as the step has, at their place in the arena; and whether what is summed up may be spoilt."""
    told = Told()
    bound = bind(program(SUM, GATHER, readers=readers), told)
    assert [(step.node, step.name) for step in bound] == [("sum", "all_reduce"), ("sum", "all_gather")]
    (x, y, reduce, spent), (part, every) = told.asked
    assert (reduce, spent) == ("sum", not readers)
    assert [t.shape for t in (x, y, part, every)] == [(24,), (24,), (24,), (48,)]
    assert {t.dtype for t in (x, y, part, every)} == {torch.bfloat16}
    assert [t.storage_offset() * 2 for t in (x, y, part, every)] == [256, 512, 256, 768]


def test_a_part_of_an_operand_inside_a_repeat() -> None:
    told = Told()
    part = replace(SUM, source=Pointer("x", "I*16"), destination=Pointer("y", "I*16"), count="8*I")
    assert len(bind(program(Repeat(3, (part,))), told)) == 2  # nothing to do at first
    assert [(a[0].numel(), a[0].storage_offset() * 2) for a in told.asked] == [(8, 272), (16, 288)]


def test_an_input_is_not_spoilt() -> None:
    told = Told()
    bind(program(replace(SUM, source=Pointer("in"))), told)
    assert told.asked[0][3] is False


@pytest.mark.parametrize(
    ("step", "told", "message"),
    [
        (SUM, None, "a collective step needs several ranks"),
        (replace(SUM, axis="expert"), Told(), "all_reduce over expert"),
        (replace(SUM, op="broadcast"), Told(), "broadcast over tensor"),
    ],
)
def test_steps_that_no_rank_can_take(step: Collective, told: Told | None, message: str) -> None:
    with pytest.raises(DscError, match=f"(?s)main.decode: sum.*{message}|{message}"):
        bind(program(step), told)


def test_no_kernel_starts_before_a_collective_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    early: list[bool] = []
    monkeypatch.setattr(driver, "launch_config", lambda *given: early.append(given[4]))
    kernel = Kernel("kernels/k.cubin", "k", (1, 1, 1), (32, 1, 1), (Pointer("x"),), pdl=True)
    bind(program(kernel, SUM, kernel, kernel), Told())
    assert early == [True, False, True]


# -- NCCL

FAKE = """
#include <string.h>
#include <stdlib.h>
typedef struct { char internal[128]; } Id;
typedef struct { int ranks, rank, aborted; } Comm;
static Comm made; static long last_stream; static int count_of_aborts;
int ncclGetVersion(int* v) { *v = 22809; return 0; }
int ncclGetUniqueId(Id* id) { for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 7 - 3); return 0; }
int ncclCommInitRank(Comm** c, int ranks, Id id, int rank) {
  for (int i = 0; i < 128; i++) if (id.internal[i] != (char)(i * 7 - 3)) return 4;
  made.ranks = ranks; made.rank = rank; made.aborted = 0; *c = &made; return 0; }
int ncclAllReduce(const float* a, float* b, size_t n, int dtype, int op, Comm* c, void* stream) {
  if (dtype != 7 || op != 0 || c != &made) return 4;
  for (size_t i = 0; i < n; i++) b[i] = a[i] * c->ranks;
  last_stream = (long)stream; return 0; }
int ncclAllGather(const float* a, float* b, size_t n, int dtype, Comm* c, void* stream) {
  if (dtype != 7 || c != &made) return 4;
  for (int r = 0; r < c->ranks; r++) memcpy(b + r * n, a, n * 4);
  last_stream = (long)stream; return 0; }
int ncclCommAbort(Comm* c) { c->aborted = 1; count_of_aborts++; return 0; }
const char* ncclGetErrorString(int code) { return code == 4 ? "invalid argument" : "?"; }
long seen_stream(void) { return last_stream; }
int seen_aborts(void) { return count_of_aborts; }
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library with NCCL's names, where all ranks have the same."""
    path = tmp_path / "libnccl.so.2"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=FAKE, text=True, check=True)
    monkeypatch.setattr(nccl, "LIBRARY", str(path))
    return str(path)


def test_nccl_is_called_as_its_header_says(library: str) -> None:
    group = group_of(3)
    first = Nccl(group, "x.engine")
    second = Nccl(replace(group, rank=2), "x.engine")  # finds the name that rank 0 made up
    assert first.version == "2.28.9"
    x, total, every = torch.arange(5.0), torch.empty(5), torch.empty(15)
    second.all_reduce(x, total, "sum", 77)
    assert torch.equal(total, 3 * x)
    second.all_reduce(x, x, "sum", 77)
    assert torch.equal(x, total)
    second.all_gather(x, every, (1 << 40) + 5)
    assert torch.equal(every, x.repeat(3))
    second._library.seen_stream.restype = ctypes.c_long
    assert second._library.seen_stream() == (1 << 40) + 5
    with pytest.raises(DscError, match=r"(?s)ncclAllReduce failed.*invalid argument"):
        second.all_reduce(x.half(), total, "sum", 0)
    with pytest.raises(DscError, match="ncclAllReduce failed"):
        second.all_reduce(x, total, "max", 0)


def test_the_end_of_nccl(library: str) -> None:
    made = Nccl(group_of(2), "x.engine")
    made.end()
    made.end()
    wait_for(lambda: made._library.seen_aborts() == 1)
    with pytest.raises(DscError, match="do not reach each other any more"):
        made.all_gather(torch.zeros(1), torch.zeros(2), 0)
    time.sleep(0.05)
    assert made._library.seen_aborts() == 1


def test_nccl_that_cannot_be_made_says_so(library: str) -> None:
    group = group_of(2, rank=1)
    group.store_of("nccl").set("id", bytes(128).hex())  # nobody's name
    with pytest.raises(DscError, match=r"(?s)ncclCommInitRank failed.*invalid argument"):
        Nccl(group, "x.engine")


def test_a_machine_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LIBRARY", "libnccl-which-nobody-has.so")
    with pytest.raises(DscError, match=r"(?s)by NCCL, which is missing\n.*x\.engine|x\.engine: .*NCCL"):
        Nccl(group_of(2), "x.engine")


# -- symmetric memory


def test_ranks_count_their_exchanges_from_the_engines_first() -> None:
    """The leader's process has made some before; each waits for what the other has set."""
    home = dist.HashStore()
    stores = [Renumbered(home), Renumbered(home)]
    got: dict[int, bytes] = {}

    def exchange(rank: int, first: int) -> None:
        group = dist.ProcessGroup(stores[rank], rank, 2)  # as torch holds it
        store = group.get_group_store()
        for number in range(first, first + 3):
            store.set(f"CUDASymmetricMemory/{number}/{rank}", f"{rank} {number - first}")
            other = f"CUDASymmetricMemory/{number}/{1 - rank}"
            store.wait([other], timedelta(seconds=10))
            got[rank] = store.get(other)
            assert got[rank].decode() == f"{1 - rank} {number - first}"

    run_all(lambda: exchange(0, 7), lambda: exchange(1, 0))
    assert got == {0: b"1 2", 1: b"0 2"}
    stores[0].set("plain", "p")
    assert home.get("plain") == b"p"


class Signals:
    """What torch's kernels do with the signal pads of two ranks, as rank 0 sees them; rank 1 is gone."""

    def __init__(self) -> None:
        self.pads = [torch.zeros(symmetric.BLOCKS, 2, dtype=torch.int32) for _ in range(2)]
        self.over = False

    def get_signal_pad(self, rank: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        assert (shape, dtype) == ((symmetric.BLOCKS, 2), torch.int32)
        return self.pads[rank]

    def kernel(self, block: int, meetings: int) -> None:
        """Thread `target` of a block of rank 0: set its signal there when it is clear, clear its own when it is set."""
        for _ in range(meetings):
            self.swap(self.pads[1][block], 0, 0, 1)
            self.swap(self.pads[0][block], 1, 1, 0)

    def swap(self, pad: torch.Tensor, column: int, before: int, after: int) -> None:
        while int(pad[column]) != before:
            assert not self.over, "nobody let the kernel go on"
            time.sleep(0.0005)
        pad[column] = after


def shared(handle: Any) -> SymmetricMemory:
    """Symmetric memory of rank 0 of two, without a device."""
    made = SymmetricMemory.__new__(SymmetricMemory)
    made.memory, made._rank, made._ranks = torch.zeros(1024, dtype=torch.uint8), 0, 2
    made._name, made._handle, made._side = "dsc.test", handle, SimpleNamespace(synchronize=lambda: None)
    return made


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def test_kernels_that_wait_for_a_rank_that_is_gone_are_let_go(no_cuda: None) -> None:
    signals = Signals()
    made = Collectives.__new__(Collectives)
    made._symmetric, ended = shared(signals), []
    made._nccl = SimpleNamespace(end=lambda: ended.append(1))  # type: ignore[assignment]
    blocks = [threading.Thread(target=signals.kernel, args=(block, 6), daemon=True) for block in (0, 23)]
    made.on(SimpleNamespace(query=lambda: not any(b.is_alive() for b in blocks)))  # type: ignore[arg-type]
    for block in blocks:
        block.start()
    time.sleep(0.02)
    assert all(block.is_alive() for block in blocks)
    threading.Thread(target=ways._end, args=(weakref.ref(made), ways._Beat(0.0)), daemon=True).start()
    for block in blocks:
        block.join(10)
    stuck, signals.over = [block.is_alive() for block in blocks], True
    assert not any(stuck)
    assert not ended  # NCCL is left alone where it is not what keeps the device
    assert not signals.pads[0][:, 0].any()  # its own signal to itself is left alone


@pytest.mark.parametrize("has_symmetric", [False, True])
def test_nccl_is_ended_where_it_may_be_what_waits(has_symmetric: bool, no_cuda: None) -> None:
    made, ended = Collectives.__new__(Collectives), []
    made._symmetric = shared(Signals()) if has_symmetric else None
    made._nccl = SimpleNamespace(end=lambda: ended.append(1))  # type: ignore[assignment]
    made.on(SimpleNamespace(query=lambda: False))  # type: ignore[arg-type]
    assert made.release(nccl=False)
    assert bool(ended) != has_symmetric
    assert made.release(nccl=True)
    assert ended


def test_nothing_is_touched_where_nothing_waits(no_cuda: None) -> None:
    """As after `close`: the stream is idle."""
    made = Collectives.__new__(Collectives)
    made._symmetric = made._nccl = None  # type: ignore[assignment]
    made.on(SimpleNamespace(query=lambda: True))  # type: ignore[arg-type]
    assert not made.release(nccl=True)


@pytest.mark.parametrize(
    ("place", "spent", "op"),
    [
        (256, True, "two_shot_all_reduce_out"),
        (256, False, "one_shot_all_reduce_out"),
        (0, True, "two_shot_all_reduce_"),
        (0, False, "two_shot_all_reduce_"),
    ],
)
def test_which_kernel_sums_up(place: int, spent: bool, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still read is not written by the kernel that uses it for its partial sums."""
    asked: list[tuple[Any, ...]] = []
    ops = {
        name: lambda *given, name=name: asked.append((name, *given))
        for name in ("two_shot_all_reduce_out", "one_shot_all_reduce_out", "two_shot_all_reduce_")
    }
    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace(**ops))
    made = shared(None)
    x, y = made.memory[:32].view(torch.float32), made.memory[place : place + 32].view(torch.float32)
    assert made.holds(x)
    assert not made.holds(torch.zeros(8))
    made.all_reduce(x, y, spent)(0)
    ((name, source, reduce, group, *rest),) = asked
    assert (name, reduce, group) == (op, "sum", "dsc.test")
    assert source is x
    assert [r is y for r in rest] == ([] if place == 0 else [True])


def test_torch_has_these_kernels() -> None:
    schemas = {
        "two_shot_all_reduce_": ["input", "reduce_op", "group_name"],
        "two_shot_all_reduce_out": ["input", "reduce_op", "group_name", "output"],
        "one_shot_all_reduce_out": ["input", "reduce_op", "group_name", "out"],
    }
    for name, arguments in schemas.items():
        schema = getattr(torch.ops.symm_mem, name).default._schema
        assert [argument.name for argument in schema.arguments] == arguments


# -- which way


class FakeNccl:
    """Sums of two ranks, rank 0 of which has what it is given and rank 1 twice that."""

    version = "2.28.9"
    factor = 3.0

    def __init__(self, group: Group, where: str) -> None:
        pass

    def all_reduce(self, source: torch.Tensor, destination: torch.Tensor, reduce: str, stream: int) -> None:
        destination.copy_(source * self.factor)

    def all_gather(self, source: torch.Tensor, destination: torch.Tensor, stream: int) -> None:
        destination.copy_(torch.cat([source, 2 * source]))


class FakeSymmetric:
    factor = 3.0

    def __init__(self, group: Group, memory: torch.Tensor) -> None:
        self.memory = memory

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()

    def all_reduce(self, source: torch.Tensor, destination: torch.Tensor, spent: bool) -> Any:
        return lambda stream: destination.copy_(source * self.factor)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "Nccl", FakeNccl)
    monkeypatch.setattr(ways, "SymmetricMemory", FakeSymmetric)
    monkeypatch.setattr(symmetric, "can_share", lambda group, device: True)
    monkeypatch.setattr(symmetric, "allocate", lambda count, device: torch.zeros(count, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def make(agree: Callable[[int], int] = lambda number: number) -> Collectives:
    return Collectives(group_of(2, agree=agree), CPU, 4096, "x.engine")


def test_symmetric_memory_where_all_have_it(fakes: None) -> None:
    made = make()
    assert made.describe() == "symmetric memory, NCCL 2.28.9"
    assert len(made.arena) == 4096
    x, y = made.arena[:64].view(torch.bfloat16), made.arena[64:128].view(torch.bfloat16)
    x.fill_(1)
    made.all_reduce(x, y, "sum", True)(0)
    assert (y == 3).all()
    for source, reduce in ((x, "max"), (made.arena[:64].view(torch.int32), "sum"), (torch.ones(32), "sum")):
        found = torch.zeros_like(source)
        FakeSymmetric.factor, call = 0.0, made.all_reduce(source, found, reduce, True)
        call(0)
        FakeSymmetric.factor = 3.0
        assert found.any(), (source.dtype, reduce)  # by NCCL


@pytest.mark.parametrize("refused", [2, 3])
def test_nccl_where_one_rank_has_no_symmetric_memory(refused: int, fakes: None) -> None:
    """Whichever question another rank answers with no, all take NCCL; each has asked as often."""
    answers: list[int] = []

    def agree(number: int) -> int:
        answers.append(number)
        return 0 if len(answers) == refused else number

    made = make(agree)
    assert made.describe() == "NCCL 2.28.9"
    assert answers == [1] * refused
    x, y = made.arena[:64].view(torch.bfloat16), made.arena[64:128].view(torch.bfloat16)
    x.fill_(1)
    made.all_reduce(x, y, "sum", True)(0)
    assert (y == 3).all()


def test_what_is_to_be_freed_after_the_end_is_freed_at_once() -> None:
    group, freed = group_of(2), list[str]()
    group.on_end(lambda: freed.append("first"))
    group.on_end(lambda: freed.append("second"))
    group.end()
    group.end()
    assert freed == ["second", "first"]
    group.on_end(lambda: freed.append("late"))
    assert freed == ["second", "first", "late"]


@pytest.mark.parametrize(("died", "stuck"), [(True, True), (True, False), (False, True)])
def test_a_process_that_the_driver_holds_ends(
    died: bool, stuck: bool, fakes: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only where a rank died, and the thread that lets go is itself held."""
    exits: list[int] = []
    over = threading.Event()
    monkeypatch.setattr(ways.os, "_exit", lambda code: (exits.append(code), over.set()))
    monkeypatch.setattr(ways, "STUCK_SECONDS", 0.2)
    dead = threading.Event()

    def agree(number: int) -> int:
        if dead.is_set():
            raise DscError("rank 1 of the engine has ended", where="x.engine", got="killed")
        return number

    group = group_of(2, agree=agree)
    made = Collectives(group, CPU, 4096, "x.engine")
    made.on(SimpleNamespace(query=lambda: (stuck and over.wait(3)) or True))  # type: ignore[arg-type]
    dead.set()
    group.ends.run(died=died)
    over.wait(0.8)
    over.set()
    assert (exits[:1] == [1]) == (died and stuck)
    told = capfd.readouterr().err
    assert ("rank 1 of the engine has ended\n  got  killed" in told) == (died and stuck), told
    del made


@pytest.mark.parametrize("when", ["made", "first sum"])
def test_a_rank_that_dies_in_the_meeting(when: str, fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for it in NCCL, which is ended where there is one, and says who died."""
    ended, dead = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        assert ended.wait(10 if when == "first sum" else 0.2) or when == "made"
        raise RuntimeError("aborted")

    def agree(number: int) -> int:
        if dead.is_set():
            raise DscError("rank 1 of the engine has ended", where="x.engine")
        return number

    monkeypatch.setattr(FakeNccl, "__init__" if when == "made" else "all_reduce", wait)
    monkeypatch.setattr(FakeNccl, "end", lambda self: ended.set(), raising=False)
    monkeypatch.setattr(FakeSymmetric, "release", lambda self: None, raising=False)
    group = group_of(2, agree=agree)

    def die() -> None:
        dead.set()
        group.end()

    threading.Timer(0.05, die).start()
    begin = time.monotonic()
    with pytest.raises(DscError, match="rank 1 of the engine has ended"):
        Collectives(group, CPU, 4096, "x.engine")
    assert time.monotonic() - begin < 5


def test_no_symmetric_memory_where_there_is_no_room(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(count: int, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(symmetric, "allocate", allocate)
    assert make().describe() == "NCCL 2.28.9"


@pytest.mark.parametrize("way", [FakeNccl, FakeSymmetric])
def test_wrong_sums_are_refused_at_load(way: Any, fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way, "factor", 2.0)
    name = "NCCL" if way is FakeNccl else "symmetric memory"
    with pytest.raises(DscError, match=f"rank 0 gets wrong sums from the others by {name}"):
        make()


def test_ranks_that_do_not_see_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one.index, other) in {(0, 1), (1, 0)})
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert symmetric.can_share(group_of(2), one)
    assert symmetric.can_share(group_of(2, 1), other)
    assert not symmetric.can_share(replace(group_of(2, 1), local_rank=0), one)  # of another machine
    assert not symmetric.can_share(group_of(4), one)
    assert not symmetric.can_share(group_of(3), one)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    assert not symmetric.can_share(group_of(2), one)


# -- helpers


def wait_for(found: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not found():
        assert time.monotonic() < until
        time.sleep(0.005)


def run_all(*functions: Callable[[], None]) -> None:
    """Each on a thread of its own; raises what one of them raises."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
