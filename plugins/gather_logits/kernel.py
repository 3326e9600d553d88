"""GatherLogits on GPUs: the parts one after another by a collective, then side by side by a copy.

R rows; `part` columns of a rank.
"""

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode
from dsc.runtime.steps import Collective, Variant

BLOCK = 2048


@triton.jit
def gather_logits(
    gathered, logits, R, PART: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """logits[r, c] = gathered[c // PART, r, c % PART], a block of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < VOCABULARY
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(gathered + ((columns // PART) * R + row) * PART + columns % PART, inside)
    tl.store(logits + row * VOCABULARY + columns, values, inside)


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """One collective and one launch. What the last ranks have beyond the vocabulary is gathered and not copied."""
    part, ranks, vocabulary = node.width("part"), int(node.attributes["ranks"]), int(node.attributes["vocabulary"])
    own, gathered = node.at("part"), node.add_scratch("gathered", "float32", (ranks, "R", part))
    gather = Collective("all_gather", "tensor", own.pointer, gathered.pointer, own.dtype, f"R*{part}")
    copy = node.triton(
        gather_logits,
        ("R", -(-vocabulary // BLOCK)),
        {
            "gathered": gathered,
            "logits": node.at("logits"),
            "R": "R",
            "PART": part,
            "VOCABULARY": vocabulary,
            "BLOCK": BLOCK,
            "PDL": node.arch.has_pdl,
        },
        num_warps=8,
        pdl=True,
    )
    return (Variant((gather, copy)),)
