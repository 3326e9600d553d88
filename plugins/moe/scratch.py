"""How much memory Moe's GPU kernels want beside a step's own: rules that their steps and plans of memory both go by."""

from __future__ import annotations

from collections.abc import Collection, Mapping

SMALLEST_TILE = 8  # pairs: what the work list's memory is planned for
# Pairs an expert, by the kind of weight, up to which weights are streamed: a case of few_tokens.cu each.
STREAMED_PAIRS: dict[str, tuple[float, ...]] = {
    "wint4": (3 / 2, 16, 64), "wint8": (3 / 2, 8), "fp8": (1 / 4,), "bf16": (3 / 2, 8),
}  # fmt: skip
# From so many pairs an expert on, integer codes become bfloat16 once, where two of the stacks take no more memory than this.
DEQUANTIZE_PAIRS, DEQUANTIZE_BYTES = {"wint4": 144, "wint8": 384}, 2 << 30


def step_tokens(pairs: float, experts: int, chosen: int) -> int:
    """Tokens of a step in which each of `experts` on all ranks has `pairs` on average, when a token chooses `chosen`."""
    return max(1, int(pairs * experts / chosen))


def most_tokens_as_codes(
    kinds: Collection[str],
    elements: int,
    experts: int,
    chosen: int,
    dequantize_pairs: Mapping[str, int] = DEQUANTIZE_PAIRS,
) -> int:
    """The most tokens of bfloat16 whose products decode the routed experts' integer codes themselves; 0: any number.

    kinds      of their formats
    elements   of a stack of a rank's experts, E * F * D
    experts    on all ranks
    """
    if not set(kinds) <= dequantize_pairs.keys() or 4 * elements > DEQUANTIZE_BYTES:
        return 0
    return step_tokens(max(dequantize_pairs[kind] for kind in kinds), experts, chosen) - 1
