"""How much memory attention on GPUs wants beside a step's own: rules that its launches and plans of memory both go by."""

from __future__ import annotations

UNIT = 64  # tokens to which contexts are rounded up, as in triton_prefill
SCRATCH_ROWS = 1 << 20  # rows of keys and values, tokens times heads, of a pass: 512 MiB at R1's widths
CHUNK = 1024  # tokens whose absorbed queries are in memory at a time
SPARE = 160  # pieces beyond one a tile of rows: enough to keep any chip busy with a single sequence
# More queries of one sequence are cheaper expanded: 1088 * q against 320 * q + 131072 FLOP a key and head.
LONGEST = 192


def expanded_units(capability: int) -> int:
    """How many times UNIT tokens are expanded at a time: a pass has whole ones."""
    return 2 if capability >= 90 else 1


def expanded_span(heads: int, contexts: int, units: int, scratch_rows: int = SCRATCH_ROWS) -> int:
    """Tokens of a pass, for `contexts` tokens of all sequences, each rounded up to UNIT."""
    step = units * UNIT
    return max(step, min(scratch_rows // heads, contexts + step - 1) // step * step)


def absorbed_tile(capability: int, dtype: str) -> tuple[int, int]:
    """Rows of queries of a tile, and pieces at a time on a multiprocessor."""
    return (64, 1) if dtype != "float32" and capability >= 90 else (16, 2)
