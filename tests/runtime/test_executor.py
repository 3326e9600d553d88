"""Programs run node by node, inputs are checked, weights are kept once, and a wrong memory plan shows."""

from dataclasses import replace

import pytest
import torch

from dsc.plugins.cpu_node import tensors_in
from dsc.plugins.formats import parse_format
from dsc.runtime.errors import DscError
from dsc.runtime.executor import Executor
from dsc.runtime.program import Operand, Program, ProgramNode
from dsc.runtime.shards import Cut, Place, shard_shape
from dsc.runtime.weights import Weights

T, D, F = 6, 32, 64
BYTES = 4 * T * F


class Table:
    """Stored tensors by name."""

    def __init__(self, tensors):
        self.tensors = tensors

    def tensor(self, name):
        return self.tensors[name]


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"norm": (D,), "gate": (F, D), "up": (F, D), "down": (D, F)}
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def mlp_program(name="mlp", offsets=(0, 1, 2, 3)):
    """y = down(swiglu(gate(norm(x)), up(norm(x)))), float32; intermediates at multiples of T*F floats in the arena."""

    def activation(width, place):
        return Operand("float32", ("T", width), "activation", 4 * T * width, offset=BYTES * place)

    def weight(tensor, *shape):
        return Operand("float32", shape, "weight", 4 * torch.Size(shape).numel(), tensor=tensor)

    operands = {
        "x": Operand("float32", ("T", D), "input", 4 * T * D),
        "w.norm": weight("norm", D),
        "w.gate": weight("gate", F, D),
        "w.up": weight("up", F, D),
        "w.down": weight("down", D, F),
        "normed": activation(D, offsets[0]),
        "g": activation(F, offsets[1]),
        "u": activation(F, offsets[2]),
        "s": activation(F, offsets[3]),
        "y": Operand("float32", ("T", D), "output", 4 * T * D),
    }
    linear = {"w_format": "fp32"}
    nodes = (
        ProgramNode("norm", "RmsNorm", ("x", "w.norm"), ("normed",), {"epsilon": 1e-6}),
        ProgramNode("gate", "Linear", ("normed", "w.gate", ""), ("g",), linear),
        ProgramNode("up", "Linear", ("normed", "w.up"), ("u",), linear),
        ProgramNode("act", "Swiglu", ("g", "u"), ("s",)),
        ProgramNode("down", "Linear", ("s", "w.down"), ("y",), linear),
    )
    program = Program(name, "0" * 64, {"T": T}, ("x",), ("y",), operands, nodes, arena_bytes=BYTES * (max(offsets) + 1))
    program.check("test")
    return program


def expected(x, w):
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w["norm"]
    return (torch.nn.functional.silu(normed @ w["gate"].T) * (normed @ w["up"].T)) @ w["down"].T


@pytest.mark.parametrize("tokens", [1, 3, T])
def test_program_computes_what_its_nodes_mean(tokens):
    w = weights()
    executor = Executor(mlp_program(), Table(w))
    assert executor.executed == ()
    x = torch.randn(tokens, D)
    (y,) = executor.run({"x": x}).values()
    error = (y - expected(x, w)).norm(dim=-1) / expected(x, w).norm(dim=-1)
    assert error.max() < 1e-5
    assert executor.executed == ("norm", "gate", "up", "act", "down")


def test_arena_gives_the_same_bits_and_shows_a_wrong_plan():
    w, x = weights(), torch.randn(T, D)
    (plain,) = Executor(mlp_program(), Table(w)).run({"x": x}).values()
    for good in [(0, 1, 2, 3), (0, 1, 2, 0)]:
        executor = Executor(mlp_program(offsets=good), Table(w), arena=True)
        for tokens in (T, 2):
            (y,) = executor.run({"x": x[:tokens]}).values()
            (same,) = Executor(mlp_program(), Table(w)).run({"x": x[:tokens]}).values()
            assert torch.equal(y, same)
    for bad in [(0, 0, 2, 3), (0, 1, 0, 3), (0, 1, 1, 3), (0, 1, 2, 1), (0, 1, 2, 2)]:
        (y,) = Executor(mlp_program(offsets=bad), Table(w), arena=True).run({"x": x}).values()
        assert not torch.equal(y, plain), bad


def test_inputs_that_do_not_fit():
    executor = Executor(mlp_program(), Table(weights()))
    cases = [
        ({}, "mlp: input x is missing"),
        ({"x": torch.zeros(2, D, dtype=torch.bfloat16)}, "mlp: input x is of another dtype\n  wanted  float32\n  got     bfloat16"),
        ({"x": torch.zeros(2, D + 1)}, rf"x is of another shape\n  wanted  \[T, {D}\]\n  got     \[2, {D + 1}\]"),
        ({"x": torch.zeros(D)}, rf"x is of another shape\n  wanted  \[T, {D}\]"),
        ({"x": torch.zeros(T + 1, D)}, f"x is too large: T\n  wanted  tokens in the step <= {T}\n  got     {T + 1}"),
    ]  # fmt: skip
    for inputs, message in cases:
        with pytest.raises(DscError, match=message):
            executor.run(inputs)
    with pytest.raises(DscError, match="wanted  cpu"):
        Executor(mlp_program(), Table(weights()), device="cuda")


def test_letters_must_agree():
    shapes = {"q": ("B1",), "n": ("B",), "t": ("B", "P")}
    operands = {name: Operand("int32", shape, "input", 4 * 4 * 4) for name, shape in shapes.items()}
    program = Program("step", "0" * 64, {"B": 4, "B1": 5, "P": 4}, tuple(operands), (), operands, ())
    executor = Executor(program, Table({}))
    int32 = lambda *shape: torch.zeros(shape, dtype=torch.int32)  # noqa: E731
    executor.run({"q": int32(3), "n": int32(2), "t": int32(2, 3)})
    with pytest.raises(DscError, match="input t does not fit the other inputs: B\n  wanted  2\n  got     3"):
        executor.run({"q": int32(3), "n": int32(2), "t": int32(3, 3)})
    with pytest.raises(DscError, match="input query_starts has another length\n  wanted  2 \\+ 1\n  got     4"):
        executor.run({"q": int32(4), "n": int32(2), "t": int32(2, 3)})


def test_weights_are_kept_once_for_all_programs():
    w = weights()
    table = Table(w)
    shared = Weights(table)
    programs = [Executor(mlp_program(name), table, shared=shared) for name in ("a", "b")]
    stored = sum(tensor.nbytes for tensor in w.values())
    assert shared.resident_bytes <= 1.05 * stored
    x = torch.randn(2, D)
    results = [program.run({"x": x})["y"] for program in programs]
    assert torch.equal(*results)


def test_ranks_have_their_parts_of_the_weights():
    """Their products with rows of gate and up, and columns of down, add up to the whole; parts are kept once, too."""
    w, whole = weights(), mlp_program()
    cuts = {
        "w.gate": (Cut(0, "tensor", F // 2),),
        "w.up": (Cut(0, "tensor", F // 2),),
        "w.down": (Cut(1, "tensor", F // 2),),
    }
    operands = {
        name: replace(o, shape=shard_shape(o.shape, cuts[name]), bytes=o.bytes // 2, cuts=cuts[name]) if name in cuts
        else replace(o, shape=("T", F // 2), bytes=o.bytes // 2) if name in ("g", "u", "s")
        else o
        for name, o in whole.operands.items()
    }  # fmt: skip
    x = torch.randn(2, D, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(2, D)
    for rank in range(2):
        shared = Weights(Table(w), Place(rank, 2, 2))
        programs = [Executor(replace(whole, name=name, operands=operands), Table(w), shared=shared) for name in "ab"]
        assert shared.resident_bytes <= 4 * (D + 3 * D * F // 2) * 1.05
        results = [program.run({"x": x})["y"] for program in programs]
        assert torch.equal(*results)
        total += results[0]
    torch.testing.assert_close(total, expected(x, w), atol=1e-5, rtol=1e-5)
    # Two parts of one tensor are two weights.
    both = replace(whole.operands["w.norm"], cuts=(Cut(0, "tensor", D // 2),), shape=(D // 2,), bytes=2 * D)
    shared = Weights(Table(w), Place(1, 2, 2))
    assert torch.equal(shared.constant(both), w["norm"][D // 2 :])
    assert torch.equal(shared.constant(whole.operands["w.norm"]), w["norm"])


def test_stored_weights_are_let_go_after_packing():
    """What is counted is what is alive: a storage that no node keeps must be gone."""
    from torch.multiprocessing.reductions import StorageWeakRef

    format_ = parse_format("wint4:32")
    parts = format_.parts((F, D))
    refs = {}

    class Fresh:
        """Gives a new tensor each time, as a mapped file does."""

        def tensor(self, name):
            made = weights()
            if name.startswith("gate"):
                dtype, shape = parts["scales" if name.endswith("scales") else "data"]
                made[name] = torch.ones(shape).to(getattr(torch, dtype))
            refs[StorageWeakRef(made[name].untyped_storage())] = made[name].nbytes
            return made[name]

    program = mlp_program()
    operands = dict(program.operands)
    for name, part in (("w.gate", "data"), ("w.scales", "scales")):
        dtype, shape = parts[part]
        size = torch.empty(shape, dtype=getattr(torch, dtype)).nbytes
        operands[name] = Operand(dtype, shape, "weight", size, tensor=f"gate.{part}")
    nodes = list(program.nodes)
    nodes[1] = ProgramNode("gate", "Linear", ("normed", "w.gate", "w.scales"), ("g",), {"w_format": "wint4:32"})
    program = replace(program, operands=operands, nodes=tuple(nodes))
    shared = Weights(Fresh())
    executor = Executor(program, Fresh(), shared=shared)
    alive = sum(size for ref, size in refs.items() if not ref.expired())
    packed = sum(t.nbytes for value in shared.packs._made.values() for t in tensors_in(value))
    assert alive <= shared.resident_bytes
    assert shared.resident_bytes == packed + 4 * D
    assert torch.isfinite(executor.run({"x": torch.randn(2, D)})["y"]).all()
