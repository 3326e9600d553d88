"""An engine's segments on a GPU, by the kernels that its users run, with the weights of one at a time there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsc.compiler.certify.runners import RunSegment, Values
from dsc.compiler.certify.segments import cut
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.cuda.backend import SPARE_BYTES, check_cublas, fixed_bytes
from dsc.runtime.cuda.executor import CudaExecutor, CudaShared
from dsc.runtime.cuda.load import load_tensors
from dsc.runtime.errors import DscError
from dsc.runtime.program import Program


class GpuSegments:
    """What the segments of an engine's programs share on a GPU: cubins, and one arena as large as the largest program's."""

    def __init__(self, folder: EngineFolder, device: torch.device, programs: Sequence[Program]) -> None:
        self._folder = folder
        check_cublas(programs, str(folder.path))
        torch.cuda.empty_cache()  # what others have left to torch is free too
        arena_bytes = max(1, *(program.arena_bytes for program in programs))
        self._check_memory(device, arena_bytes, [part.program for program in programs for part in cut(program)])
        arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        self._shared = CudaShared(device, {}, folder, arena)

    def bind(self, program: Program) -> RunSegment:
        """A `Bind`: values come from the CPU and go there. Weights are on the device as long as its result is held."""
        torch.cuda.empty_cache()  # of the segment before
        entries = {name: self._folder.manifest.tensors[name] for name in tensors_of(program)}
        self._shared.weights = load_tensors(self._folder.path, entries, self._shared.device)
        executor = CudaExecutor(program, self._shared)
        self._shared.weights = {}  # the executor alone holds them
        caches = [name for name in program.inputs if program.operands[name].role == "state"]
        rows = [name for name in program.outputs if program.operands[name].role != "state"]

        def run(values: Values) -> dict[str, torch.Tensor]:
            there = {name: value.to(self._shared.device) for name, value in values.items()}
            executor.set_state({name: there.pop(name) for name in caches})
            outputs = executor.run(there)
            return {name: outputs[name].cpu() for name in rows}

        return run

    def _check_memory(self, device: torch.device, arena_bytes: int, segments: Sequence[Program]) -> None:
        tensors = self._folder.manifest.tensors
        sizes = [(sum(tensors[name].bytes for name in tensors_of(p)), fixed_bytes(p), p.name) for p in segments]
        weight_bytes, step_bytes, name = max(sizes, key=lambda size: size[0] + size[1])
        need = weight_bytes + step_bytes + arena_bytes + SPARE_BYTES
        free, total = torch.cuda.mem_get_info(device)
        if need > free:
            raise DscError(
                f"{name} does not fit on the GPU",
                where=str(self._folder.path),
                details=[("weights", f"{weight_bytes:,} bytes"), ("steps", f"{step_bytes + arena_bytes:,} bytes")],
                wanted=f"{need:,} bytes",
                got=f"{free:,} of {total:,} free",
                try_="a GPU that nobody else uses, or dsc verify without --device",
            )


def tensors_of(program: Program) -> list[str]:
    """Names in the manifest of what a program reads, each once."""
    return sorted({operand.tensor for operand in program.operands.values() if operand.role == "weight"})
