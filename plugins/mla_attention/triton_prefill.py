"""Expanded attention for sequences with more than LONGEST queries in the step; the others are attended absorbed.

The contexts of those sequences, each rounded up to whole blocks of UNIT tokens, lie one behind the other; passes of SPAN
tokens go over them, as many as fit the scratch memory:

1. `mla_contexts`, once: where each sequence's context and its tiles of query rows end in that order.
2. `mla_expand`, a pass: k_nope and v of every head from the latents, and the rotated keys, out of the paged cache.
3. `mla_prefill`, a pass: causal attention of nope + rope over v of all the pass's sequences, merged by log-sum-exp into
   what earlier passes left in o. How many passes there are is bounded by the step's letters; most have nothing to do.
"""

import triton
import triton.language as tl

from dsc.plugins.mla_attention.triton_decode import weight_tile
from dsc.plugins.triton_rope import rotate_rows

UNIT = tl.constexpr(64)


@triton.jit
def mla_contexts(
    query_starts, sequence_lengths, ends, sequences, LONGEST: tl.constexpr, ROWS: tl.constexpr, SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ends [2, sequences]: units of context and tiles of ROWS queries up to and with each sequence, those of short ones 0."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.arange(0, SEQUENCES)
    real = b < sequences
    queries = tl.load(query_starts + b + 1, real, 0) - tl.load(query_starts + b, real, 0)
    wanted = real & (queries > LONGEST)
    units = tl.where(wanted, (tl.load(sequence_lengths + b, real, 0) + UNIT - 1) // UNIT, 0)
    tl.store(ends + b, tl.cumsum(units, 0), real)
    tl.store(ends + sequences + b, tl.cumsum(tl.where(wanted, (queries + ROWS - 1) // ROWS, 0), 0), real)


@triton.jit
def mla_dequantize(
    kv_b, kv_b_scales, values, LATENT: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """values [rows, LATENT] = kv_b in bfloat16."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = weight_tile(kv_b, kv_b_scales, rows, 0, LATENT, LATENT, KIND, GROUP, "bf16")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(values + rows.to(tl.int64)[:, None] * LATENT + tl.arange(0, LATENT)[None, :], tile)


@triton.jit
def _owner(ends, place, sequences, SEQUENCES: tl.constexpr):
    """The sequence whose part of a running count holds `place`, and where that part begins; `sequences` behind all."""
    b = tl.arange(0, SEQUENCES)
    real = b < sequences
    before = real & (tl.load(ends + b, real, 0) <= place)
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, tl.load(ends + b, real, 0), 0), 0)


@triton.jit
def mla_expand(
    cache, kv_b, block_table, sequence_lengths, ends, kv, k_rope, first, sequences, blocks_per_sequence,
    HEADS: tl.constexpr, NOPE: tl.constexpr, V: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr, SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """kv [HEADS, SPAN, NOPE + V] and k_rope [SPAN, ROPE] of the tokens first .. first + SPAN of all contexts in a row.

    UNITS units of one head at a time, by any number of programs; tokens behind a sequence's end give zeros.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    units = tl.minimum(tl.load(ends + sequences - 1) - first // UNIT, SPAN // UNIT)
    for index in range(tl.program_id(0), (units + UNITS - 1) // UNITS * HEADS, tl.num_programs(0)):
        head, unit = index % HEADS, first // UNIT + index // HEADS * UNITS
        rows = tl.arange(0, UNITS * UNIT)
        slots = tl.zeros((UNITS * UNIT,), tl.int64)
        there = rows < 0
        for i in tl.static_range(UNITS):
            owner, begin = _owner(ends, unit + i, sequences, SEQUENCES)
            token = (unit + i - begin) * UNIT + rows % UNIT
            length = tl.load(sequence_lengths + owner, owner < sequences, 0)
            mine = (rows // UNIT == i) & (token < length)
            block = tl.load(block_table + owner.to(tl.int64) * blocks_per_sequence + token // BLOCK, mine, 0)
            slots = tl.where(mine, block.to(tl.int64) * BLOCK + token % BLOCK, slots)
            there = there | mine
        at = cache + slots[:, None] * (LATENT + ROPE)
        local = (unit * UNIT - first + rows).to(tl.int64)
        outputs = tl.arange(0, NOPE + V)
        sums = tl.zeros((UNITS * UNIT, NOPE + V), tl.float32)
        for column in tl.range(0, LATENT, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            x = tl.load(at + columns[None, :], there[:, None], 0.0)
            w_rows = (head * (NOPE + V) + outputs).to(tl.int64)
            w = tl.load(kv_b + w_rows[None, :] * LATENT + columns[:, None])
            sums = tl.dot(x, w, sums)
        to = kv + (head * SPAN + local)[:, None] * (NOPE + V) + outputs[None, :]
        tl.store(to, sums.to(kv.dtype.element_ty))
        if head == 0:
            ropes = tl.arange(0, ROPE)[None, :]
            tl.store(k_rope + local[:, None] * ROPE + ropes, tl.load(at + LATENT + ropes, there[:, None], 0.0))


@triton.jit
def _attend(
    q_nope, q_rope, kv, k_rope, begin, end, shift, seen, scale, highest, total, values, NOPE: tl.constexpr,
    V: tl.constexpr, ROPE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go on with the keys begin .. end, which lie `shift` rows later in kv and k_rope; MASKED: not every row sees them."""
    for key in tl.range(begin, end, KEYS, num_stages=STAGES):
        keys = key + tl.arange(0, KEYS)
        at = (keys + shift).to(tl.int64)
        n, r, v = tl.arange(0, NOPE), tl.arange(0, ROPE), tl.arange(0, V)
        if MASKED:
            there = keys < end
            k_nope = tl.load(kv + at[None, :] * (NOPE + V) + n[:, None], there[None, :], 0.0)
            k_turn = tl.load(k_rope + at[None, :] * ROPE + r[:, None], there[None, :], 0.0)
        else:
            k_nope = tl.load(kv + at[None, :] * (NOPE + V) + n[:, None])
            k_turn = tl.load(k_rope + at[None, :] * ROPE + r[:, None])
        s = tl.dot(q_nope, k_nope)
        s = tl.dot(q_rope, k_turn, s)
        if MASKED:
            s = tl.where((keys < end)[None, :] & (keys[None, :] < seen[:, None]), s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        p = tl.exp2(s * scale - base[:, None])
        factor = tl.exp2(highest - base)
        total = total * factor + tl.sum(p, 1)
        values = values * factor[:, None]
        if MASKED:
            found = tl.load(kv + at[:, None] * (NOPE + V) + NOPE + v[None, :], (keys < end)[:, None], 0.0)
        else:
            found = tl.load(kv + at[:, None] * (NOPE + V) + NOPE + v[None, :])
        values = tl.dot(p.to(found.dtype), found, values)
        highest = higher
    return highest, total, values


@triton.jit
def mla_prefill(
    q, kv, k_rope, logs, cos, sin, positions, query_starts, sequence_lengths, ends, o, scale, first, sequences,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SEQUENCES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS queries of a head against what the pass holds of their sequence's context; logs [T, HEADS] carries log-sum-exps."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles = tl.load(ends + 2 * sequences - 1)
    if tl.load(ends + sequences - 1) * UNIT <= first:
        tiles = 0
    programs = tl.num_programs(0)
    for turn in range(tl.cdiv(tiles * HEADS, programs)):
        # There and back: in every turn the same programs would get the tiles that see most.
        place = tl.where(turn % 2 == 0, tl.program_id(0), programs - 1 - tl.program_id(0))
        tile, head = (turn * programs + place) % tiles, (turn * programs + place) // tiles
        owner = _owner(ends + sequences, tile, sequences, SEQUENCES)[0]
        start, stop = tl.load(query_starts + owner), tl.load(query_starts + owner + 1)
        length = tl.load(sequence_lengths + owner)
        units = (length + UNIT - 1) // UNIT
        context = (tl.load(ends + owner) - units) * UNIT  # where the sequence's context begins in the row of contexts
        # The tiles that see most come first.
        row = tl.load(ends + sequences + owner) - 1 - tile
        t = start + row * ROWS + tl.arange(0, ROWS)
        inside = t < stop
        seen = length - (stop - t) + 1
        begin = tl.maximum(first - context, 0)
        last_sees = length - (stop - tl.minimum(stop, start + row * ROWS + ROWS))
        end = tl.minimum(first + SPAN - context, last_sees)
        if (begin < end) & (head < HEADS):
            x_at = q + t.to(tl.int64)[:, None] * (HEADS * (NOPE + ROPE)) + head * (NOPE + ROPE)
            q_nope = tl.load(x_at + tl.arange(0, NOPE)[None, :], inside[:, None], 0.0)
            pairs = tl.load(x_at + NOPE + tl.arange(0, ROPE)[None, :], inside[:, None], 0.0).to(tl.float32)
            turned = rotate_rows(pairs, cos, sin, tl.load(positions + t, inside, 0), inside, ROPE)
            q_rope = turned.to(q.dtype.element_ty)
            highest = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            values = tl.zeros((ROWS, V), tl.float32)
            shift = context - first
            of_head = kv + head * tl.full((), SPAN * (NOPE + V), tl.int64)
            all_see = length - (stop - start - row * ROWS) + 1
            whole = begin + tl.maximum(tl.minimum(end, all_see) - begin, 0) // KEYS * KEYS
            highest, total, values = _attend(
                q_nope, q_rope, of_head, k_rope, begin, whole, shift, seen, scale, highest, total, values, NOPE, V, ROPE,
                KEYS, False, STAGES,
            )  # fmt: skip
            highest, total, values = _attend(
                q_nope, q_rope, of_head, k_rope, whole, end, shift, seen, scale, highest, total, values, NOPE, V, ROPE,
                KEYS, True, STAGES,
            )  # fmt: skip
            values = values * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
            log = highest + tl.log2(total)
            log_at = logs + t.to(tl.int64) * HEADS + head
            o_at = o + t.to(tl.int64)[:, None] * (HEADS * V) + head * V + tl.arange(0, V)[None, :]
            if begin > 0:
                before = tl.load(log_at, inside, 0.0)
                most = tl.maximum(before, log)
                old, new = tl.exp2(before - most), tl.exp2(log - most)
                log = most + tl.log2(old + new)
                earlier = tl.load(o_at, inside[:, None], 0.0).to(tl.float32)
                values = (earlier * old[:, None] + values * new[:, None]) / (old + new)[:, None]
            tl.store(o_at, values.to(o.dtype.element_ty), inside[:, None])
            tl.store(log_at, log, inside)
