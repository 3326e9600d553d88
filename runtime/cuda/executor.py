"""Run programs on a GPU: fixed memory for everything, steps bound once per shape, decode steps replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from dsc.runtime.cuda.bind import Binder, BoundStep
from dsc.runtime.cuda.driver import Library
from dsc.runtime.cuda.staging import Staging
from dsc.runtime.errors import DscError
from dsc.runtime.expressions import LETTERS
from dsc.runtime.program import Program, nbytes
from dsc.runtime.weights import part_name

if TYPE_CHECKING:
    from dsc.runtime.cuda.collectives import Collectives

MAX_BOUND_SHAPES = 64  # shapes of eager steps whose calls are kept


class KernelSource(Protocol):
    """Where cubins come from: an EngineFolder."""

    def kernel(self, name: str) -> bytes: ...


@dataclass
class CudaShared:
    """What all programs of one engine share on a device: weights, cubins, one arena, one capture stream and pool.

    weights      a rank's parts of stored tensors, on the device, by `part_name`: whole ones by their name in the manifest
    collectives  how the other ranks are reached; None where there is one
    """

    device: torch.device
    weights: Mapping[str, torch.Tensor]
    kernels: KernelSource
    arena: torch.Tensor
    collectives: Collectives | None = None
    stream: torch.cuda.Stream = field(init=False)
    libraries: dict[str, Library] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream(self.device)
        self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        if self.collectives is not None:
            self.collectives.on(self.stream)

    def library(self, name: str) -> Library:
        """A cubin, loaded once."""
        if name not in self.libraries:
            self.libraries[name] = Library(self.kernels.kernel(name), name)
        return self.libraries[name]

    def graph(self, calls: Sequence[BoundStep]) -> torch.cuda.CUDAGraph:
        """Calls as a CUDA graph. They must have run before on the capture stream: on all ranks of an engine alike."""
        graph = torch.cuda.CUDAGraph()
        # Other threads of a rank, such as NCCL's, may ask CUDA for something meanwhile.
        mode = "global" if self.collectives is None else "thread_local"
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode=mode):
            for step in calls:
                step.call(self.stream.cuda_stream)
        return graph


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    pool: tuple[int, int]


class CudaExecutor:
    """One program on one device, with the interface of the CPU's Executor.

    buckets   sequence counts of captured steps, ascending: a step is padded to the next one; empty: never captured
    Outputs are views that the program's next step overwrites. `executed` names the nodes of the last step, in order.
    """

    def __init__(self, program: Program, shared: CudaShared, buckets: Sequence[int] = ()) -> None:
        self.program, self.shared = program, shared
        self.executed: tuple[str, ...] = ()
        self.node_names = tuple(node.name for node in program.nodes)
        self.buckets = tuple(b for b in buckets if b <= program.letters["B"])
        self._state: dict[str, torch.Tensor] = {}
        self._tensors = self._place()
        self._staging = self._make_staging()
        self._bound: dict[tuple[tuple[str, int], ...], list[BoundStep]] = {}
        self._graphs: dict[tuple[tuple[str, int], ...], _Graph] = {}

    def _make_staging(self) -> Staging:
        return Staging({n: self._tensors[n] for n in self.program.inputs if self.program.operands[n].role == "input"})

    def _place(self) -> dict[str, torch.Tensor]:
        """Memory of every operand at the letters' bounds; caches come with `set_state`."""
        tensors: dict[str, torch.Tensor] = {}
        for name, operand in self.program.operands.items():
            dtype = getattr(torch, operand.dtype)
            if operand.role == "weight":
                tensors[name] = self.shared.weights[part_name(operand)]
            elif operand.offset is not None:
                tensors[name] = self.shared.arena[operand.offset : operand.offset + operand.bytes].view(dtype)
            elif operand.role in ("output", "zeroed", "input") and not operand.alias:
                count = nbytes(operand.dtype, operand.shape, self.program.letters) // dtype.itemsize
                tensors[name] = torch.zeros(count, dtype=dtype, device=self.shared.device)
            elif operand.role == "peer":
                raise DscError(f"{self.program.name}: {name} is memory of several ranks", got="one rank")
        for name in self.program.operands:
            root = self.program.root(name)
            if name not in tensors and root in tensors:
                tensors[name] = tensors[root]
        return tensors

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Caches for all steps to come. What was bound or captured with others is forgotten."""
        self._bound.clear()
        self._graphs.clear()
        for name in self.program.operands:
            root = self.program.root(name)
            if root in state:
                self._tensors[name] = state[root]
        self._state = {name: state[name] for name in self.program.inputs if name in state}

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One step. Inputs by name, on the host or the device; DscError where one is missing or larger than planned."""
        real = self._letters(inputs)
        padded = self._pad(real)
        with torch.cuda.stream(self.shared.stream):
            self.shared.stream.wait_stream(torch.cuda.default_stream(self.shared.device))
            self._staging.fill(inputs, real, padded, self._shapes(padded))
            self._launch(padded)
            torch.cuda.default_stream(self.shared.device).wait_stream(self.shared.stream)
        self.executed = self.node_names
        return {name: self._output(name, real) for name in self.program.outputs}

    def share(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let inputs or outputs lie in another program's memory. What was bound or captured is forgotten."""
        self._bound.clear()
        self._graphs.clear()
        for name in self.program.operands:
            root = self.program.root(name)
            if root in tensors:
                self._tensors[name] = tensors[root]
        self._staging = self._make_staging()

    def tensor(self, name: str) -> torch.Tensor:
        """The memory of an input or output at its bound, flat."""
        return self._tensors[name]

    def stage(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Put a step's inputs in place on the capture stream without running it; the letters it would run with."""
        real = self._letters(inputs)
        padded = self._pad(real)
        self._staging.fill(inputs, real, padded, self._shapes(padded))
        return padded

    def letters(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The letters of the step that would run these inputs, padding included."""
        return self._pad(self._letters(inputs))

    def calls(self, letters: Mapping[str, int]) -> list[BoundStep]:
        """The bound calls of a step, for profiles."""
        key = tuple(sorted(letters.items()))
        if key not in self._bound:
            if len(self._bound) >= MAX_BOUND_SHAPES:
                self._bound.pop(next(iter(self._bound)))
            binder = Binder(
                self.program, self._tensors, self.shared.library, self.shared.num_sms, self.shared.collectives
            )
            self._bound[key] = binder.bind(letters)
        return self._bound[key]

    def capture(self, letters: Mapping[str, int]) -> torch.cuda.CUDAGraph:
        """The CUDA graph of a step with these letters, made once after a warm-up run."""
        key = tuple(sorted(letters.items()))
        if key not in self._graphs:
            calls = self.calls(letters)
            stream = self.shared.stream
            with torch.cuda.stream(stream):
                for step in calls:
                    step.call(stream.cuda_stream)
                stream.synchronize()
                graph = self.shared.graph(calls)
            self._graphs[key] = _Graph(graph, graph.pool())
        return self._graphs[key].graph

    def _launch(self, letters: Mapping[str, int]) -> None:
        if letters.get("B") in self.buckets and self._one_shape(letters):
            self.capture(letters).replay()
            return
        stream = self.shared.stream.cuda_stream
        for step in self.calls(letters):
            step.call(stream)

    def _one_shape(self, letters: Mapping[str, int]) -> bool:
        """Whether every sequence may have the same number of queries, so that buckets repeat."""
        return letters.get("T", 0) == letters.get("B", 0) * letters.get("Q", 1)

    # -- shapes

    def _letters(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        letters: dict[str, int] = {}
        for name in self.program.inputs:
            operand = self.program.operands[name]
            if operand.role == "state":
                if name not in self._state:
                    raise DscError(f"{self.program.name}: cache {name} is not set")
                continue
            if name not in inputs:
                raise DscError(f"{self.program.name}: input {name} is missing", wanted=", ".join(self.program.inputs))
            for letter, size in zip(operand.shape, inputs[name].shape, strict=True):
                if not isinstance(letter, str) or letter not in LETTERS:
                    continue
                if letter != "P" and letters.setdefault(letter, size) != size:
                    got = f"{size}, and {letters[letter]} in other inputs"
                    raise DscError(f"{self.program.name}: {letter} does not fit in {name}", got=got)
                if size > self.program.letters[letter]:
                    raise DscError(
                        f"{self.program.name}: input {name} is larger than the engine was planned for",
                        wanted=f"{LETTERS[letter]} <= {self.program.letters[letter]}",
                        got=str(size),
                    )
        return letters

    def _pad(self, real: Mapping[str, int]) -> dict[str, int]:
        """Letters of the step that runs: the block table always at its full width, a decode step at its bucket."""
        padded = dict(real)
        if "P" in self.program.letters:
            padded["P"] = self.program.letters["P"]
        sequences = real.get("B", 0)
        bucket = next((b for b in self.buckets if b >= sequences), None)
        queries = -(-real.get("T", 0) // sequences) if sequences else 1
        if bucket is not None and bucket * queries <= self.program.letters["T"]:
            padded |= {"B": bucket, "B1": bucket + 1, "T": bucket * queries, "Q": queries, "R": bucket * queries}
        elif "B" in real:
            padded["Q"] = self.program.letters.get("Q", 1)
        state = next(iter(self._state.values()), None)
        if state is not None and "N" in self.program.letters:
            padded["N"] = state.shape[0]
        return padded

    def _shapes(self, letters: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(letters[size] if isinstance(size, str) else size for size in operand.shape)
            for name, operand in self.program.operands.items()
            if operand.role == "input"
        }

    def _output(self, name: str, real: Mapping[str, int]) -> torch.Tensor:
        operand = self.program.operands[name]
        if operand.role == "state":
            return self._tensors[name]
        shape = [real[size] if isinstance(size, str) else size for size in operand.shape]
        count = 1
        for size in shape:
            count *= size
        return self._tensors[name][:count].view(shape)
