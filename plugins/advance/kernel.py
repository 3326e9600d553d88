"""Advance on GPUs: one program for all sequences."""

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode
from dsc.runtime.steps import Variant

BLOCK = 256


@triton.jit
def advance(
    chosen, tokens, positions, slots, sequence_lengths, places, block_table, B, P, BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See op.py."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < B
    if PDL:
        tl.extra.cuda.gdc_wait()
    live = inside & (tl.load(slots + row, inside, -1) >= 0)
    token = tl.load(chosen + row, live, -1)
    going = live & (token >= 0)
    position = tl.load(positions + row, going, 0) + 1
    block = tl.load(block_table + row * P + tl.minimum(position // BLOCK_TOKENS, P - 1), going, 0)
    tl.store(tokens + row, token, going)
    tl.store(positions + row, position, going)
    tl.store(sequence_lengths + row, tl.load(sequence_lengths + row, going, 0) + 1, going)
    tl.store(places + row, tl.load(places + row, going, 0) + 1, going)
    tl.store(slots + row, tl.where(going, block * BLOCK_TOKENS + position % BLOCK_TOKENS, -1), live)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """One launch."""
    names = ("chosen", "tokens", "positions", "slots", "sequence_lengths", "places", "block_table")
    step = node.triton(
        advance,
        (f"ceil_div(B, {BLOCK})",),
        {
            **{name: node.at(name) for name in names},
            "B": "B",
            "P": "P",
            "BLOCK_TOKENS": int(node.attributes["block_tokens"]),
            "BLOCK": BLOCK,
            "PDL": node.arch.has_pdl,
        },
        pdl=True,
    )
    return (Variant((step,)),)
