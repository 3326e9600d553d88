"""Absorbed attention in three launches: queries and a work list, attention over pieces of the context, merge and values.

1. `mla_queries` multiplies each head's q_nope by W_UK and rotates q_rope; one more program plans the work: it cuts every
   sequence's context into ranges, so many that the processors are busy, and lists the pieces: a range of keys against
   ROWS rows of queries (tokens times heads). Lengths are known on the device only, so the list has a fixed bound.
2. `mla_attend` takes a piece at a time: softmax over its keys, its sum of latents (normalized) and its log-sum-exp.
   On Hopper sm90_mla_decode.cu does this.
3. `mla_values` or `mla_values_few` merges a token's pieces and multiplies by W_UV.

Beside sequences that are attended expanded, `mla_queries_mixed` and `mla_values_mixed` serve the others.

plan    int32 [pieces + 1, 8]: the number of pieces, then for each (sequence, first row of `queries`, rows, first key, end
        of keys, keys that its first token sees, row within the sequence's part of the step)
places  int32 [tokens, 4]: for each token (first piece of its sequence, ranges, tiles of rows, row of its head 0 within the
        sequence); the piece of range s and tile i is first + s * tiles + i
"""

import triton
import triton.language as tl

from dsc.plugins.triton_rope import rotate_rows
from dsc.plugins.triton_weights import decode_bytes, decode_e4m3, decode_nibbles


@triton.jit
def weight_tile(
    data, scales, rows, first, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """Columns first .. first + COLUMNS of some rows of a stored weight [N, WIDTH], dequantized: bfloat16 or float32."""
    dtype: tl.constexpr = tl.float32 if MATH == "fp32" else tl.bfloat16
    columns = first + tl.arange(0, COLUMNS)
    wide = rows.to(tl.int64)
    if KIND == "fp32" or KIND == "bf16":
        return tl.load(data + wide[:, None] * WIDTH + columns[None, :]).to(dtype)
    else:
        if KIND == "wint4":
            pairs = first // 2 + tl.arange(0, COLUMNS // 2)
            low, high = decode_nibbles(tl.load(data + wide[:, None] * (WIDTH // 2) + pairs[None, :]), MATH)
            codes = tl.interleave(low, high)
        elif KIND == "fp8":
            codes = decode_e4m3(tl.load(data + wide[:, None] * WIDTH + columns[None, :]), MATH)
        else:
            codes = decode_bytes(tl.load(data + wide[:, None] * WIDTH + columns[None, :]), MATH)
        SPAN: tl.constexpr = COLUMNS if KIND == "wint8" or GROUP > COLUMNS else GROUP
        spans = tl.arange(0, COLUMNS // SPAN)
        if KIND == "wint8":
            at = wide[:, None] + 0 * spans[None, :]
        elif KIND == "fp8":
            at = (wide // 128)[:, None] * ((WIDTH + 127) // 128) + (first + spans * SPAN)[None, :] // 128
        else:
            at = wide[:, None] * (WIDTH // GROUP) + (first + spans * SPAN)[None, :] // GROUP
        scale = tl.load(scales + at).to(tl.float32)
        split = tl.reshape(codes, (rows.shape[0], COLUMNS // SPAN, SPAN)).to(tl.float32) * scale[:, :, None]
        return tl.reshape(split.to(dtype), (rows.shape[0], COLUMNS))


@triton.jit
def _range_length(
    tiles, blocks, capacity, processors, RANGES: tl.constexpr, SHORTEST: tl.constexpr, OVERHEAD: tl.constexpr
):
    """How many blocks a range should have, from the tiles of rows and the blocks of every sequence.

    Candidates cut the longest context into 1, 2, ... ranges; the one with the least waves * (blocks + OVERHEAD) is taken,
    where a wave is one piece on each processor. With many tiles only few cuts are worth a look.
    """
    most, all_tiles = tl.max(blocks, 0), tl.sum(tiles, 0)
    best, found = 2147483647, most
    STEP: tl.constexpr = 16
    worthwhile = tl.minimum(RANGES, 4 * processors // tl.maximum(all_tiles, 1) + 4)
    for first in range(0, worthwhile, STEP):
        cuts = 1 + first + tl.arange(0, STEP)
        sizes = tl.maximum((most + cuts - 1) // cuts, SHORTEST)
        # A float division and half a step: exact for any context that fits memory, and a quarter of the instructions.
        ranges = ((blocks[:, None] + sizes[None, :]).to(tl.float32) - 0.5) / sizes[None, :].to(tl.float32)
        counts = tl.sum(tiles[:, None] * ranges.to(tl.int32), 0)
        costs = (counts + processors - 1) // processors * (sizes + OVERHEAD)
        costs = tl.where((counts <= capacity) | (cuts == 1), costs, 2147483647)
        least = tl.min(costs, 0)
        size = tl.max(tl.where(costs == least, sizes, 0), 0)
        found = tl.where(least < best, size, found)
        best = tl.minimum(best, least)
    return tl.maximum(found, 1)


@triton.jit
def _plan(
    query_starts, sequence_lengths, plan, places, first, last, sequences, capacity, processors, HEADS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LONGEST: tl.constexpr, SEQUENCES: tl.constexpr, RANGES: tl.constexpr,
    SHORTEST: tl.constexpr, OVERHEAD: tl.constexpr,
):  # fmt: skip
    """Fill `plan` and `places` for the tokens first .. last of the sequences with at most LONGEST queries (0: of all)."""
    b = tl.arange(0, SEQUENCES)
    real = b < sequences
    start, stop = tl.load(query_starts + b, real, 0), tl.load(query_starts + b + 1, real, 0)
    length = tl.load(sequence_lengths + b, real, 0)
    begin = tl.maximum(start, first)
    queries = tl.maximum(tl.minimum(stop, last) - begin, 0)
    if LONGEST:
        queries = tl.where(stop - start <= LONGEST, queries, 0)
    tiles = (queries * HEADS + ROWS - 1) // ROWS
    blocks = tl.where(queries > 0, (length + KEYS - 1) // KEYS, 0)
    size = _range_length(tiles, blocks, capacity, processors, RANGES, SHORTEST, OVERHEAD)
    ranges = (blocks + size - 1) // size
    pieces = tiles * ranges
    offset = tl.cumsum(pieces, 0) - pieces
    tl.store(plan, tl.sum(pieces, 0))
    STEP: tl.constexpr = 8
    for first_piece in range(0, tl.max(pieces, 0), STEP):
        i = first_piece + tl.arange(0, STEP)[None, :]
        there = i < pieces[:, None]
        at = plan + (1 + offset[:, None] + i) * 8
        local = i % tl.maximum(tiles, 1)[:, None] * ROWS
        key = i // tl.maximum(tiles, 1)[:, None] * (size * KEYS)
        tl.store(at, b[:, None] + 0 * i, there)
        tl.store(at + 1, (begin - first)[:, None] * HEADS + local, there)
        tl.store(at + 2, tl.minimum((queries * HEADS)[:, None] - local, ROWS), there)
        tl.store(at + 3, key, there)
        tl.store(at + 4, tl.minimum(key + size * KEYS, length[:, None]), there)
        tl.store(at + 5, (length - (stop - begin) + 1)[:, None] + 0 * i, there)
        tl.store(at + 6, local, there)
    for t0 in range(0, last - first, 128):  # tokens of no piece
        t = t0 + tl.arange(0, 128)
        tl.store(places + t * 4 + 1, 0 * t, t < last - first)
    tl.debug_barrier()
    for first_query in range(0, tl.max(queries, 0), STEP):
        i = first_query + tl.arange(0, STEP)[None, :]
        there = i < queries[:, None]
        at = places + ((begin - first)[:, None] + i) * 4
        tl.store(at, offset[:, None] + 0 * i, there)
        tl.store(at + 1, ranges[:, None] + 0 * i, there)
        tl.store(at + 2, tiles[:, None] + 0 * i, there)
        tl.store(at + 3, i * HEADS + 0 * tiles[:, None], there)


@triton.jit
def _queries_tile(
    w, q, cos, sin, positions, queries, part, head, first_token, first, last, HEADS: tl.constexpr, NOPE: tl.constexpr,
    ROPE: tl.constexpr, LATENT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a head times w [NOPE, COLUMNS], columns `part` of W_UK; with part 0 also their rotated q_rope."""
    t = first_token + tl.arange(0, TOKENS)
    inside = t < last
    x_at = q + t.to(tl.int64)[:, None] * (HEADS * (NOPE + ROPE)) + head * (NOPE + ROPE)
    y_at = queries + ((t - first).to(tl.int64)[:, None] * HEADS + head) * (LATENT + ROPE)
    x = tl.load(x_at + tl.arange(0, NOPE)[None, :], inside[:, None], 0.0)
    y = tl.dot(x.to(w.dtype), w, input_precision="ieee").to(queries.dtype.element_ty)
    tl.store(y_at + part * COLUMNS + tl.arange(0, COLUMNS)[None, :], y, inside[:, None])
    if part == 0:
        pairs = tl.load(x_at + NOPE + tl.arange(0, ROPE)[None, :], inside[:, None], 0.0).to(tl.float32)
        turned = rotate_rows(pairs, cos, sin, tl.load(positions + t, inside, 0), inside, ROPE)
        turned = turned.to(queries.dtype.element_ty)
        tl.store(y_at + LATENT + tl.arange(0, ROPE)[None, :], turned, inside[:, None])


@triton.jit
def mla_queries(
    q, kv_b, kv_b_scales, cos, sin, positions, query_starts, sequence_lengths, queries, plan, places, first, last,
    sequences, capacity, processors, HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
    LATENT: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, MATH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SEQUENCES: tl.constexpr, RANGES: tl.constexpr, SHORTEST: tl.constexpr, OVERHEAD: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """queries [last - first, HEADS, LATENT + ROPE] = [q_nope W_UK, rotated q_rope]; program 0 plans the work."""
    if tl.program_id(0) == 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        _plan(
            query_starts, sequence_lengths, plan, places, first, last, sequences, capacity, processors, HEADS, ROWS, KEYS,
            0, SEQUENCES, RANGES, SHORTEST, OVERHEAD,
        )  # fmt: skip
    else:
        index = tl.program_id(0) - 1
        PARTS: tl.constexpr = LATENT // COLUMNS
        part, head = index % PARTS, index // PARTS % HEADS
        w_rows = head * (NOPE + V) + tl.arange(0, NOPE)
        w = weight_tile(kv_b, kv_b_scales, w_rows, part * COLUMNS, LATENT, COLUMNS, KIND, GROUP, MATH)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        first_token = first + index // (PARTS * HEADS) * TOKENS
        _queries_tile(
            w, q, cos, sin, positions, queries, part, head, first_token, first, last, HEADS, NOPE, ROPE, LATENT, TOKENS,
            COLUMNS,
        )  # fmt: skip


@triton.jit
def mla_queries_mixed(
    q, kv_b, kv_b_scales, cos, sin, positions, query_starts, sequence_lengths, queries, plan, places, first, last,
    sequences, capacity, processors, HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
    LATENT: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, MATH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, LONGEST: tl.constexpr, SEQUENCES: tl.constexpr, RANGES: tl.constexpr, SHORTEST: tl.constexpr,
    OVERHEAD: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `mla_queries`, of the sequences with at most LONGEST queries, by any number of programs: often there are none."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) == 0:
        _plan(
            query_starts, sequence_lengths, plan, places, first, last, sequences, capacity, processors, HEADS, ROWS, KEYS,
            LONGEST, SEQUENCES, RANGES, SHORTEST, OVERHEAD,
        )  # fmt: skip
    else:
        b = tl.arange(0, SEQUENCES)
        start = tl.load(query_starts + b, b < sequences, 0)
        stop = tl.load(query_starts + b + 1, b < sequences, 0)
        stop = tl.where(stop - start <= LONGEST, stop, start)  # longer ones count as empty
        PARTS: tl.constexpr = LATENT // COLUMNS
        tiles = (tl.minimum(tl.max(stop, 0), last) - first + TOKENS - 1) // TOKENS
        for index in range(tl.program_id(0) - 1, tiles * (PARTS * HEADS), tl.num_programs(0) - 1):
            part, head = index % PARTS, index // PARTS % HEADS
            first_token = first + index // (PARTS * HEADS) * TOKENS
            here = (tl.minimum(stop, first_token + TOKENS) > tl.maximum(start, first_token)).to(tl.int32)
            if tl.max(here, 0) > 0:
                w_rows = head * (NOPE + V) + tl.arange(0, NOPE)
                w = weight_tile(kv_b, kv_b_scales, w_rows, part * COLUMNS, LATENT, COLUMNS, KIND, GROUP, MATH)
                _queries_tile(
                    w, q, cos, sin, positions, queries, part, head, first_token, first, last, HEADS, NOPE, ROPE, LATENT,
                    TOKENS, COLUMNS,
                )  # fmt: skip


@triton.jit
def mla_attend(
    queries, cache, block_table, plan, partial, sums, scale, blocks_per_sequence, HEADS: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One piece a program: partial [piece, ROWS, LATENT], normalized, and sums, log2 of the sum of exponentials.

    BLOCK is the tokens of a cache block, a divisor or a multiple of KEYS.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    piece = tl.program_id(0)
    if piece < tl.load(plan):
        at = plan + (1 + piece) * 8
        sequence, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        begin, end, visible, local = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)
        WIDTH: tl.constexpr = LATENT + ROPE
        dtype: tl.constexpr = queries.dtype.element_ty
        rows, columns, ropes, keys = tl.arange(0, ROWS), tl.arange(0, LATENT), tl.arange(0, ROPE), tl.arange(0, KEYS)
        inside = (rows < count)[:, None]
        q_at = queries + (first.to(tl.int64) + rows)[:, None] * WIDTH
        q_latent = tl.load(q_at + columns[None, :], inside, 0.0)
        q_rope = tl.load(q_at + LATENT + ropes[None, :], inside, 0.0)
        seen = tl.minimum(visible + (local + rows) // HEADS, end)
        blocks = block_table + sequence.to(tl.int64) * blocks_per_sequence
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        values = tl.zeros((ROWS, LATENT), tl.float32)
        for key in tl.range(begin, end, KEYS, num_stages=STAGES):
            there = (key + keys < end)[:, None]
            if BLOCK % KEYS == 0:
                slots = tl.load(blocks + key // BLOCK).to(tl.int64) * BLOCK + key % BLOCK + keys
            else:
                block = tl.load(blocks + (key + keys) // BLOCK, key + keys < end, 0)
                slots = block.to(tl.int64) * BLOCK + (key + keys) % BLOCK
            k_at = cache + slots[:, None] * WIDTH
            k_latent = tl.load(k_at + columns[None, :], there, 0.0).to(dtype)
            k_rope = tl.load(k_at + LATENT + ropes[None, :], there, 0.0).to(dtype)
            s = tl.dot(q_latent, k_latent.T, input_precision="ieee")
            s = tl.dot(q_rope, k_rope.T, s, input_precision="ieee") * scale
            s = tl.where((key + keys)[None, :] < seen[:, None], s, float("-inf"))
            higher = tl.maximum(highest, tl.max(s, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - base[:, None])
            factor = tl.exp2(highest - base)
            total = total * factor + tl.sum(p, 1)
            values = tl.dot(p.to(dtype), k_latent, values * factor[:, None], input_precision="ieee")
            highest = higher
        inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
        to = partial + (piece.to(tl.int64) * ROWS + rows)[:, None] * LATENT + columns[None, :]
        tl.store(to, (values * inverse[:, None]).to(partial.dtype.element_ty), inside)
        tl.store(sums + piece * ROWS + rows, highest + tl.log2(total), rows < count)


@triton.jit
def _values_tile(
    partial, sums, kv_b, kv_b_scales, places, o, part, head, first_token, first, last, HEADS: tl.constexpr,
    NOPE: tl.constexpr, V: tl.constexpr, LATENT: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    MATH: tl.constexpr, ROWS: tl.constexpr, RANGES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """OUTPUTS columns of a head for TOKENS tokens."""
    t = first_token + tl.arange(0, TOKENS)
    inside = t < last
    w_rows = head * (NOPE + V) + NOPE + part * OUTPUTS + tl.arange(0, OUTPUTS)
    place = places + (t - first) * 4
    piece, ranges, tiles = tl.load(place, inside, 0), tl.load(place + 1, inside, 0), tl.load(place + 2, inside, 0)
    row = tl.load(place + 3, inside, 0) + head
    slot = (piece + row // ROWS) * ROWS + row % ROWS
    step = tiles * ROWS
    most = tl.max(ranges, 0)
    result = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    if most <= 1:  # nothing to merge: partial sums are the sums
        for first_column in tl.range(0, LATENT * most, COLUMNS):  # not at all for tokens of no piece
            columns = first_column + tl.arange(0, COLUMNS)
            x = tl.load(partial + slot.to(tl.int64)[:, None] * LATENT + columns[None, :], (ranges == 1)[:, None], 0.0)
            w = weight_tile(kv_b, kv_b_scales, w_rows, first_column, LATENT, COLUMNS, KIND, GROUP, MATH)
            result = tl.dot(x.to(w.dtype), w.T, result, input_precision="ieee")
    else:
        every = tl.arange(0, RANGES)[None, :]
        logs = tl.load(sums + slot[:, None] + every * step[:, None], every < ranges[:, None], float("-inf"))
        highest = tl.max(logs, 1)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(tl.exp2(logs - base[:, None]), 1)
        inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
        for first_column in tl.static_range(0, LATENT, COLUMNS):
            columns = first_column + tl.arange(0, COLUMNS)
            w = weight_tile(kv_b, kv_b_scales, w_rows, first_column, LATENT, COLUMNS, KIND, GROUP, MATH)
            merged = tl.zeros((TOKENS, COLUMNS), tl.float32)
            for s0 in range(0, most, MERGED):
                for i in tl.static_range(MERGED):
                    there = s0 + i < ranges
                    at = (slot + (s0 + i) * step).to(tl.int64)
                    weight = tl.exp2(tl.load(sums + at, there, float("-inf")) - base) * inverse
                    found = tl.load(partial + at[:, None] * LATENT + columns[None, :], there[:, None], 0.0)
                    merged += found * weight[:, None]
            result = tl.dot(merged.to(w.dtype), w.T, result, input_precision="ieee")
    o_at = o + t.to(tl.int64)[:, None] * (HEADS * V) + head * V + part * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    tl.store(o_at, result.to(o.dtype.element_ty), inside[:, None])


@triton.jit
def mla_values(
    partial, sums, kv_b, kv_b_scales, places, o, first, last, HEADS: tl.constexpr, NOPE: tl.constexpr, V: tl.constexpr,
    LATENT: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, MATH: tl.constexpr, ROWS: tl.constexpr,
    RANGES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, MERGED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """o[t, head] = (the merged pieces of the token and head) W_UV^T: TOKENS tokens and OUTPUTS of V columns a program.

    MERGED ranges are read at once, COLUMNS of the latent at a time. Tokens of no piece give zeros.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _values_tile(
        partial, sums, kv_b, kv_b_scales, places, o, tl.program_id(0), tl.program_id(1),
        first + tl.program_id(2) * TOKENS, first, last, HEADS, NOPE, V, LATENT, KIND, GROUP, MATH, ROWS, RANGES, TOKENS,
        OUTPUTS, COLUMNS, MERGED,
    )  # fmt: skip


@triton.jit
def mla_values_mixed(
    partial, sums, kv_b, kv_b_scales, places, o, plan, query_starts, first, last, sequences, HEADS: tl.constexpr,
    NOPE: tl.constexpr, V: tl.constexpr, LATENT: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    MATH: tl.constexpr, ROWS: tl.constexpr, RANGES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `mla_values` by any number of programs, for steps that often have neither pieces nor tokens of no sequence."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: tl.constexpr = V // OUTPUTS
    tiles = (last - first + TOKENS - 1) // TOKENS
    if (tl.load(plan) == 0) & (tl.load(query_starts + sequences) >= last):
        tiles = 0
    for index in range(tl.program_id(0), tiles * (PARTS * HEADS), tl.num_programs(0)):
        _values_tile(
            partial, sums, kv_b, kv_b_scales, places, o, index % PARTS, index // PARTS % HEADS,
            first + index // (PARTS * HEADS) * TOKENS, first, last, HEADS, NOPE, V, LATENT, KIND, GROUP, MATH, ROWS, RANGES,
            TOKENS, OUTPUTS, COLUMNS, MERGED,
        )  # fmt: skip


@triton.jit
def mla_values_few(
    partial, sums, kv_b, kv_b_scales, places, o, first, last, HEADS: tl.constexpr, NOPE: tl.constexpr, V: tl.constexpr,
    LATENT: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, MATH: tl.constexpr, ROWS: tl.constexpr,
    RANGES: tl.constexpr, OUTPUTS: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `mla_values`, one token a program, for steps of so few tokens that one context fills the chip with pieces."""
    part, head, local = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    w_rows = head * (NOPE + V) + NOPE + part * OUTPUTS + tl.arange(0, OUTPUTS)
    w = weight_tile(kv_b, kv_b_scales, w_rows, 0, LATENT, LATENT, KIND, GROUP, MATH)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = places + local * 4
    ranges, tiles, row = tl.load(place + 1), tl.load(place + 2), tl.load(place + 3) + head
    slot, step = (tl.load(place) + row // ROWS) * ROWS + row % ROWS, tiles * ROWS
    every = tl.arange(0, RANGES)
    logs = tl.load(sums + slot + every * step, every < ranges, float("-inf"))
    highest = tl.max(logs, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(logs - base), 0)
    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
    columns = tl.arange(0, LATENT)[None, :]
    merged = tl.zeros((LATENT,), tl.float32)
    for s0 in range(0, ranges, MERGED):
        s = s0 + tl.arange(0, MERGED)
        at = (slot + s * step).to(tl.int64)
        weights = tl.exp2(tl.load(sums + at, s < ranges, float("-inf")) - base) * inverse
        found = tl.load(partial + at[:, None] * LATENT + columns, (s < ranges)[:, None], 0.0)
        merged += tl.sum(found * weights[:, None], 0)
    result = tl.sum(w.to(tl.float32) * merged[None, :], 1)
    to = o + (first + local).to(tl.int64) * (HEADS * V) + head * V + part * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(to, result.to(o.dtype.element_ty))
