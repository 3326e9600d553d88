"""A GPU for programs that have kernels, as far as one can be pretended: memory on the CPU, every step bound, no kernel run."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsc.compiler.certify import gpu as certify_gpu
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.cuda import backend, driver, executor, load
from dsc.runtime.executor import Executor
from dsc.runtime.program import Program, nbytes


@dataclass
class PretendGpu:
    """What happened on it.

    free     bytes that it says are free
    loaded   for each time weights were loaded, names of the tensors
    bound    programs in order; `running` of them are still held
    steps    number of calls bound for each step that was run
    """

    free: int = 1 << 40
    loaded: list[set[str]] = field(default_factory=list)
    bound: list[str] = field(default_factory=list)
    running: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    steps: list[int] = field(default_factory=list)


def move_on_cpu(pieces: list[Any], device: torch.device) -> None:
    """`load._move` where the device is the CPU."""
    for piece in pieces:
        packed = max(copy.packed_bytes for copy in piece.copies)
        load._deliver(piece, torch.empty(piece.bytes, dtype=torch.uint8), torch.empty(packed, dtype=torch.uint8))


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, folder: EngineFolder) -> PretendGpu:
    """Have engines for sm_90a find a GPU. What its kernels would give, the CPU's ops do, from the stored weights."""
    gpu = PretendGpu()

    class Shared(executor.CudaShared):
        def __post_init__(self) -> None:
            self.num_sms = 132

        def library(self, name: str) -> Any:
            assert self.kernels.kernel(name)
            return SimpleNamespace(function=lambda entry, shared_bytes: entry)

    class Bound(executor.CudaExecutor):
        def __init__(self, program: Program, shared: executor.CudaShared) -> None:
            assert not gpu.running, "the segment before is still held"
            super().__init__(program, shared)
            gpu.bound.append(program.name)
            gpu.running.add(self)
            weights = shared.weights

            def stored(name: str) -> torch.Tensor:  # knows nothing of self, which is to go when nobody holds it
                assert torch.equal(weights[name].view(torch.uint8), folder.tensor(name).view(-1).view(torch.uint8))
                return weights[name].view(folder.manifest.tensors[name].shape)

            self._on_cpu = Executor(program, SimpleNamespace(tensor=stored))

        def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            for name, tensor in self._tensors.items():  # in its own memory, as large as its bound
                operand = self.program.operands[name]
                if operand.role != "state":
                    assert tensor.nbytes == nbytes(operand.dtype, operand.shape, self.program.letters), name
            letters = self.letters(inputs)
            assert self._shapes(letters).keys() == inputs.keys()
            gpu.steps.append(len(self.calls(letters)))
            outputs = self._on_cpu.run({**inputs, **self._state})
            for name, rows in outputs.items():
                assert self._output(name, self._letters(inputs)).shape == rows.shape, name
            return outputs

    def load_tensors(root: Any, entries: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
        gpu.loaded.append(set(entries))
        return load.load_tensors(root, entries, device)

    monkeypatch.setattr(load, "_move", move_on_cpu)
    monkeypatch.setattr(certify_gpu, "load_tensors", load_tensors)
    monkeypatch.setattr(certify_gpu, "CudaShared", Shared)
    monkeypatch.setattr(certify_gpu, "CudaExecutor", Bound)
    monkeypatch.setattr(driver, "tensor_map", lambda *_: SimpleNamespace(getPtr=lambda: 0))
    monkeypatch.setattr(backend, "find_device", lambda folder, name: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu.free, 1 << 40))
    return gpu
