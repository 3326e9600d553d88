"""The copy of GatherLogits on one GPU: what the collective would have gathered is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.gpu

# Ranks, columns of each, vocabulary: R1's on eight ranks; one that ends within the last rank's part, one before it.
SIZES = ((8, 16256, 129280), (2, 51200, 102400), (3, 896, 2400), (3, 896, 1600), (2, 128, 130))


@pytest.mark.parametrize("rows", [1, 5, 256])
@pytest.mark.parametrize(("ranks", "part", "vocabulary"), SIZES)
def test_parts_are_put_side_by_side(ranks: int, part: int, vocabulary: int, rows: int) -> None:
    from support.gpu import POISON, Cubins, hopper_compiler, node_program

    from dsc.compiler.lower_gpu import lower_gpu
    from dsc.runtime.cuda.executor import CudaExecutor, CudaShared
    from dsc.runtime.steps import Variant

    compiler = hopper_compiler("sm_90a")
    inputs = {"part": torch.empty(rows, part, device="meta")}
    attributes = {"ranks": ranks, "vocabulary": vocabulary}
    (program,) = lower_gpu([node_program("GatherLogits", inputs, attributes, {"R": 300})], compiler)
    (node,), gathered = program.nodes, "gatherlogits/gathered"
    (variant,) = node.variants
    operands = dict(program.operands)
    operands[gathered] = replace(operands[gathered], role="input", offset=None)
    program = replace(
        program,
        inputs=(*program.inputs, gathered),
        operands=operands,
        nodes=(replace(node, variants=(Variant(variant.steps[1:]),)),),
    )
    device = torch.device("cuda")
    executor = CudaExecutor(program, CudaShared(device, {}, Cubins(compiler), torch.empty(1, device=device)))
    executor._tensors["logits"].view(torch.uint8).fill_(POISON)
    parts = torch.randn(ranks, rows, part, device=device)
    given = {"part": parts[0], gathered: parts}
    got = executor.run(given)["logits"]
    torch.cuda.synchronize()
    assert torch.equal(got, parts.movedim(0, 1).reshape(rows, -1)[:, :vocabulary])
