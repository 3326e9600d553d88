"""Sample on GPUs without sorting: the place in the sorted order is found by sums over thresholds.

Probabilities are kept as whole numbers, round(2^44 e^((logit - largest) / temperature)), so that their sums are the same in
any order, and a threshold that was passed stays passed. Logits compare as their bits do ("keys"), which makes thresholds
exact; equal logits are told apart by their index.

Legend: R rows, V vocabulary, W words of a mask row, S splits of a row, K thresholds of a pass.
"""

from typing import Any

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode
from dsc.runtime.steps import Kernel, Variant

SPLIT = 4096  # logits of one program that reads a part of a row
THRESHOLDS = 8
AHEAD = 64  # parts whose rows a program looks at together
CHUNK = 512  # logits compared with all thresholds at a time
CANDIDATES = 4096  # tokens at the head of a row that are searched without reading it again
WINDOW = 2048  # tokens of a row without so short a head that are searched without reading it again, and read at a time
FAR = tl.constexpr(31.0)  # e^-31 < 2^-44: tokens further below the largest, in units of temperature, have no weight
ONE = tl.constexpr(float(1 << 44))
LOWEST = tl.constexpr(-(1 << 31))


@triton.jit
def _key(values):
    """int32 that compare as float32 do."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(keys):
    """The inverse of `_key`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _between(low, high, share):
    """The key of low + share * (high - low), without overflow."""
    return _key(low * (1.0 - share) + high * share)


@triton.jit
def _weights(values, largest, temperature):
    """Whole numbers proportional to the probabilities; 0 for what is not allowed."""
    ratio = tl.exp((values - largest).to(tl.float64) / temperature)
    return tl.where(values == float("-inf"), 0, (ratio * ONE + 0.5).to(tl.int64))


@triton.jit
def _load(logits, token_mask, at, V: tl.constexpr):
    """Logits of a row at some indices and the same as they may be chosen: -inf where not allowed, no negative zero."""
    inside = at < V
    raw = tl.load(logits + at, inside, float("-inf"))
    word = tl.load(token_mask + at // 32, inside, 0)
    values = tl.where((word >> (at % 32)) & 1 != 0, raw, float("-inf"))
    return raw, tl.where(values == 0.0, 0.0, values)


@triton.jit
def _add(mass, count, keys, weights, thresholds):
    """Sums [K, CHUNK] of weights and numbers of the keys that reach each threshold."""
    reached = keys[None, :] >= thresholds[:, None]
    return mass + tl.where(reached, weights[None, :], 0), count + tl.where(reached & (keys > LOWEST)[None, :], 1, 0)


@triton.jit
def sample_scan(
    logits, token_mask, temperature, floats, ints, V: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each part of a row: floats[r, :, s] = largest logit, their sum of exponentials, largest and smallest allowed;
    ints[r, :, s] = where the largest allowed is, how many are allowed. A NaN makes the largest logit infinite.

    Greedy rows do without the smallest and the number, and where all is allowed also without a look at every token's bit.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = split * SPLIT + tl.arange(0, SPLIT)
    raw = tl.load(logits + row * V + at, at < V, float("-inf"))
    word = split * (SPLIT // 32) + tl.arange(0, SPLIT // 32)
    masked = tl.max((tl.load(token_mask + row * W + word, word < W, -1) != -1).to(tl.int32), 0)
    sampled = tl.load(temperature + row) != 0.0
    largest = tl.max(raw, 0)
    # Nothing is subtracted where all are -inf; a NaN among the logits makes the sum one.
    total = tl.sum(tl.exp(raw - tl.where(largest > float("-inf"), largest, 0.0)), 0)
    to = floats + row * 4 * S + split
    if sampled | (masked != 0):
        _, values = _load(logits + row * V, token_mask + row * W, at, V)
        values = tl.where(values != values, float("-inf"), values)
        best = tl.max(values, 0)
        where = tl.min(tl.where(values == best, at, 0x7FFFFFFF), 0)
        if sampled:
            allowed = values > float("-inf")
            tl.store(to + 3 * S, tl.min(tl.where(allowed, values, float("inf")), 0))
            tl.store(ints + row * 2 * S + S + split, tl.sum(allowed.to(tl.int32), 0))
    else:
        best = tl.where(largest == 0.0, 0.0, largest)
        where = tl.min(tl.where(raw == largest, at, 0x7FFFFFFF), 0)
    tl.store(to, tl.where(total != total, float("inf"), largest))
    tl.store(to + S, total)
    tl.store(to + 2 * S, best)
    tl.store(ints + row * 2 * S + split, where)


@triton.jit
def _any_sampled(temperature, first, step, parts, S: tl.constexpr, AHEAD: tl.constexpr):
    """Whether one of the parts `first`, `first + step`, ... (AHEAD of them) belongs to a row that is not greedy."""
    part = first + tl.arange(0, AHEAD) * step
    return tl.max((tl.load(temperature + part // S, part < parts, 0.0) != 0.0).to(tl.int32), 0) != 0


@triton.jit
def sample_coarse(
    logits, token_mask, temperature, min_p, floats, thresholds, masses, counts, R, V: tl.constexpr, W: tl.constexpr,
    S: tl.constexpr, S2: tl.constexpr, SPLIT: tl.constexpr, K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each part of a row that is not greedy: masses[r, s, :] and counts[r, s, :] of what reaches each of the row's K
    thresholds; masses[r, s, K] all, masses[r, s, K + 1] of tokens with at least min_p of the largest probability.

    Programs take parts in turn: one a part would cost greedy rows as much as their scan.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part, step = tl.program_id(0), tl.num_programs(0)
    while part < R * S:
        upto = tl.minimum(part + step * AHEAD, R * S)
        if _any_sampled(temperature, part, step, R * S, S, AHEAD):
            while part < upto:
                row, split = (part // S).to(tl.int64), part % S
                heat = tl.load(temperature + row)
                if heat != 0.0:
                    _coarse(
                        logits + row * V, token_mask + row * W, heat, tl.load(min_p + row), floats + row * 4 * S,
                        thresholds + row * K, masses + (row * S + split) * (K + 2), counts + (row * S + split) * K, split,
                        V, S, S2, SPLIT, K,
                    )  # fmt: skip
                part += step
        else:
            part += step * AHEAD


@triton.jit
def _coarse(
    logits, token_mask, heat, min_p, floats, thresholds, masses, counts, split, V: tl.constexpr, S: tl.constexpr,
    S2: tl.constexpr, SPLIT: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The part of `sample_coarse` that is one part of a row."""
    splits = tl.arange(0, S2)
    largest = tl.max(tl.load(floats + 2 * S + splits, splits < S, float("-inf")), 0)
    at = split * SPLIT + tl.arange(0, SPLIT)
    _, values = _load(logits, token_mask, at, V)
    allowed = values > float("-inf")
    ratio = tl.exp((values - largest).to(tl.float64) / heat.to(tl.float64))
    weights = tl.where(allowed, (ratio * ONE + 0.5).to(tl.int64), 0)
    keys = tl.where(allowed, _key(values), LOWEST)
    for k in tl.static_range(K):
        # Distances below the largest grow: where the mass is, thresholds are close.
        threshold = tl.maximum(_key(largest - heat * (FAR * ((k + 1) * (k + 1)) / (K * K))), LOWEST + 1)
        reached = keys >= threshold
        tl.store(masses + k, tl.sum(tl.where(reached, weights, 0), 0))
        tl.store(counts + k, tl.sum(reached.to(tl.int32), 0))
        if split == 0:
            tl.store(thresholds + k, threshold)
    tl.store(masses + K, tl.sum(weights, 0))
    tl.store(masses + K + 1, tl.sum(tl.where(ratio >= min_p.to(tl.float64), weights, 0), 0))


@triton.jit
def _goal(stage, kept, top_p, top_k, uniform):
    """What a cumulative sum must exceed: numbers in stage 0 (top_k), masses in stages 1 (top_p) and 2 (the draw)."""
    wanted = tl.where(stage == 1, top_p.to(tl.float64), uniform) * kept.to(tl.float64)
    goal = wanted.to(tl.int64)
    # top_p asks for a sum of at least so much, the draw for more than so much.
    goal = tl.where((stage == 1) & (goal.to(tl.float64) >= wanted), goal - 1, goal)
    return tl.where(stage == 0, (top_k - 1).to(tl.int64), goal)


@triton.jit
def _uniform(seed, position):
    """`dsc.plugins.sample.philox.uniform` of one row."""
    zero = position * 0
    word, _, _, _ = tl.philox(seed, position, zero, zero, zero)
    return (word >> 8).to(tl.float64) * (1.0 / (1 << 24))


@triton.jit
def sample_gather(
    logits, token_mask, temperature, top_p, top_k, seeds, positions, ints, thresholds, masses, counts, candidates,
    lengths, R, V: tl.constexpr, W: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, SPLIT: tl.constexpr,
    K: tl.constexpr, CANDIDATES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """candidates[r] = keys, then indices, of the tokens from the largest on down to the threshold that the first search
    of the row cannot pass, in the order of their indices; lengths[r] = how many, whether or not they have room."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part, step = tl.program_id(0), tl.num_programs(0)
    while part < R * S:
        upto = tl.minimum(part + step * AHEAD, R * S)
        if _any_sampled(temperature, part, step, R * S, S, AHEAD):
            while part < upto:
                row, split = (part // S).to(tl.int64), part % S
                if tl.load(temperature + row) != 0.0:
                    _gather_part(
                        logits + row * V, token_mask + row * W, tl.load(top_p + row), tl.load(top_k + row),
                        _uniform(tl.load(seeds + row), tl.load(positions + row)), ints + row * 2 * S + S,
                        thresholds + row * K, masses + row * S * (K + 2), counts + row * S * K,
                        candidates + row * 2 * CANDIDATES, lengths + row, split, V, S, S2, SPLIT, K, CANDIDATES,
                    )  # fmt: skip
                part += step
        else:
            part += step * AHEAD


@triton.jit
def _gather_part(
    logits, token_mask, share, most, uniform, numbers, thresholds, masses, counts, candidates, lengths, split,
    V: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, SPLIT: tl.constexpr, K: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The part of `sample_gather` that is one part of a row."""
    splits, k = tl.arange(0, S2), tl.arange(0, K)
    real = splits < S
    allowed = tl.sum(tl.load(numbers + splits, real, 0), 0)
    parts = masses + splits * (K + 2)
    kept = tl.sum(tl.load(parts + K, real, 0), 0)
    above = tl.sum(tl.load(parts + K + 1, real, 0), 0)
    stage = tl.where((most > 0) & (most < allowed), 0, tl.where(share < 1.0, 1, 2))
    kept = tl.where(stage == 2, tl.minimum(kept, above), kept)
    goal = _goal(stage, kept, share, most, uniform)
    mass_K = tl.sum(tl.load(parts[:, None] + k[None, :], real[:, None], 0), 0)
    number_SK = tl.load(counts + splits[:, None] * K + k[None, :], real[:, None], 0)
    number_K = tl.sum(number_SK, 0)
    reached = tl.where(stage == 0, number_K.to(tl.int64), mass_K) > goal
    chosen = tl.min(tl.where(reached, k, K), 0)
    length = tl.where(chosen < K, tl.sum(tl.where(k == chosen, number_K, 0), 0), allowed)
    if split == 0:
        tl.store(lengths, length)
    if length <= CANDIDATES:
        low = tl.load(thresholds + tl.minimum(chosen, K - 1))
        low = tl.where(chosen < K, low, LOWEST + 1)
        own = tl.where((splits < split)[:, None] & (k == chosen)[None, :], number_SK, 0)
        first = tl.sum(tl.sum(own, 1), 0)
        earlier = tl.load(numbers + splits, splits < split, 0)
        first = tl.where(chosen < K, first, tl.sum(earlier, 0))
        at = split * SPLIT + tl.arange(0, SPLIT)
        _, values = _load(logits, token_mask, at, V)
        keys = _key(values)
        inside = (keys >= low) & (values > float("-inf"))
        if tl.sum(inside.to(tl.int32), 0) > 0:
            to = candidates + first + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(to, keys, inside)
            tl.store(to + CANDIDATES, at, inside)


@triton.jit
def sample_pick(
    logits, token_mask, temperature, top_p, top_k, seeds, positions, floats, ints, thresholds, masses, counts,
    candidates, lengths, tokens, logprobs, V: tl.constexpr, W: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    K: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, CANDIDATES: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Token and logprob of one row: with WHOLE of greedy rows and those whose candidates all have room, else of others."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, S2)
    real = splits < S
    raw = tl.load(floats + row * 4 * S + splits, real, float("-inf"))
    sums = tl.load(floats + row * 4 * S + S + splits, real, 0.0)
    best = tl.load(floats + row * 4 * S + 2 * S + splits, real, float("-inf"))
    where = tl.load(ints + row * 2 * S + splits, real, V)
    peak, largest = tl.max(raw, 0), tl.max(best, 0)
    token = tl.min(tl.where(best == largest, where, V), 0)
    sound = (tl.abs(peak) < float("inf")) & (tl.abs(largest) < float("inf"))
    scaled = tl.where(real & (raw > float("-inf")), sums * tl.exp(raw - peak), 0.0)
    total = peak + tl.log(tl.sum(scaled, 0))
    heat = tl.load(temperature + row)
    draws = sound & (heat != 0.0)
    length = tl.load(lengths + row, draws, 0)
    if draws & ((length <= CANDIDATES) == WHOLE):
        least = tl.load(floats + row * 4 * S + 3 * S + splits, real, float("inf"))
        allowed = tl.sum(tl.load(ints + row * 2 * S + S + splits, real, 0), 0)
        token = _draw(
            logits + row * V, token_mask + row * W, candidates + row * 2 * CANDIDATES, length, largest,
            tl.min(least, 0), allowed, heat.to(tl.float64), tl.load(top_p + row), tl.load(top_k + row),
            _uniform(tl.load(seeds + row), tl.load(positions + row)), thresholds + row * K,
            masses + row * S * (K + 2), counts + row * S * K, V, S, S2, K, CHUNK, WINDOW, CANDIDATES, WHOLE,
        )  # fmt: skip
    if (length <= CANDIDATES) == WHOLE:
        logprob = tl.load(logits + row * V + tl.minimum(token, V - 1)) - total
        tl.store(tokens + row, tl.where(sound, token, -1))
        tl.store(logprobs + row, tl.where(sound, logprob, float("nan")))


@triton.jit
def _draw(
    logits, token_mask, candidates, length, largest, least, allowed, heat, top_p, top_k, uniform, thresholds, masses,
    counts, V: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    WINDOW: tl.constexpr, CANDIDATES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Three searches for the first token whose cumulative sum exceeds a goal: top_k's by number, top_p's and the draw's by
    mass. The first two give the mass that is kept."""
    HELD: tl.constexpr = CANDIDATES if WHOLE else WINDOW
    splits, at = tl.arange(0, S2), tl.arange(0, HELD)
    kept = tl.sum(tl.load(masses + splits * (K + 2) + K, splits < S, 0), 0)
    above = tl.sum(tl.load(masses + splits * (K + 2) + K + 1, splits < S, 0), 0)
    keys = tl.load(candidates + at, WHOLE & (at < length), LOWEST)
    found, rank = kept * 0, kept * 0
    for stage in range(3):
        by_count = stage == 0
        goal = _goal(stage, kept, top_p, top_k, uniform)
        if tl.where(by_count, (top_k > 0) & (top_k < allowed), (stage == 2) | (top_p < 1.0)):
            found, rank, mass = _search(
                logits, token_mask, candidates, keys, largest, least, allowed, heat, goal, by_count, thresholds, masses,
                counts, V, S, S2, K, CHUNK, WINDOW, WHOLE,
            )  # fmt: skip
            kept = tl.minimum(kept, mass)
        if stage == 1:
            kept = tl.minimum(kept, above)
    key = found.to(tl.int32)
    if WHOLE:
        same = keys == key
        order = tl.cumsum(same.to(tl.int32), 0)
        indices = tl.load(candidates + CANDIDATES + at, at < length, V)
        token = tl.min(tl.where(same & (order == rank), indices, V), 0)
    else:
        token = _nth(logits, token_mask, key, rank, V, WINDOW)
    return token


@triton.jit
def _search(
    logits, token_mask, candidates, keys, largest, least, allowed, heat, goal, by_count, thresholds, masses, counts,
    V: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The first token, in the order of falling logits, up to which the sum of masses or numbers exceeds a goal.

    Its key, its place among the tokens of this key (from 1), and the mass up to it. The key lies in [low, high); the
    sums over keys from `high` on are known. `keys` are those of all tokens in question with WHOLE;
    else the row is read until a window of few enough is left, or of one key.
    """
    low, high = _key(least).to(tl.int64), _key(largest).to(tl.int64) + 1
    base_mass, base_count, upto = goal * 0, allowed * 0, allowed
    if WHOLE:
        upto = base_count
    else:
        splits, k = tl.arange(0, S2)[:, None], tl.arange(0, K)
        keys_K = tl.load(thresholds + k)
        mass_K = tl.sum(tl.load(masses + splits * (K + 2) + k[None, :], splits < S, 0), 0)
        count_K = tl.sum(tl.load(counts + splits * K + k[None, :], splits < S, 0), 0)
        low, high, base_mass, base_count, upto = _narrow(
            low, high, base_mass, base_count, upto, goal, by_count, keys_K, mass_K, count_K
        )
        while (upto - base_count > WINDOW) & (low + 1 < high):
            share = k.to(tl.float32) / K
            middles = _between(_value(low.to(tl.int32)), _value((high - 1).to(tl.int32)), share).to(tl.int64)
            # One threshold halves the keys, so that it ends whatever the logits are.
            middles = tl.where(k == 0, low + (high - low) // 2, middles)
            keys_K = tl.minimum(tl.maximum(middles, low + 1), high - 1).to(tl.int32)
            mass, count = tl.zeros((K, CHUNK), tl.int64), tl.zeros((K, CHUNK), tl.int32)
            for start in tl.range(0, V, CHUNK, num_stages=4):
                _, values = _load(logits, token_mask, start + tl.arange(0, CHUNK), V)
                key = tl.where(values > float("-inf"), _key(values), LOWEST)
                key = tl.where(key < high, key, LOWEST)
                mass, count = _add(mass, count, key, _weights(values, largest, heat), keys_K)
            low, high, base_mass, base_count, upto = _narrow(
                low, high, base_mass, base_count, upto, goal, by_count, keys_K, base_mass + tl.sum(mass, 1),
                base_count + tl.sum(count, 1),
            )  # fmt: skip
    if upto - base_count <= WINDOW:
        if not WHOLE:
            keys = _gather(logits, token_mask, candidates, low, high, upto - base_count, V, WINDOW)
        weights = _weights(tl.where(keys > LOWEST, _value(keys), float("-inf")), largest, heat)
        while low + 1 < high:
            middle = low + (high - low) // 2
            if by_count:
                reached = base_count + tl.sum((keys >= middle).to(tl.int32), 0) > goal
            else:
                reached = base_mass + tl.sum(tl.where(keys >= middle, weights, 0), 0) > goal
            low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        base_mass += tl.sum(tl.where(keys > low, weights, 0), 0)
        base_count += tl.sum((keys > low).to(tl.int32), 0)
    weight = _weights(_value(low.to(tl.int32)), largest, heat)
    by_mass = (goal - base_mass) // tl.maximum(weight, 1) + 1
    rank = tl.where(by_count, goal + 1 - base_count, by_mass)
    return low, rank, base_mass + rank * weight


@triton.jit
def _narrow(low, high, base_mass, base_count, upto, goal, by_count, keys_K, mass_K, count_K):
    """The window between the thresholds that the goal lies between, with the sums from its upper end on and the number
    of tokens from its lower end on."""
    reached = tl.where(by_count, count_K.to(tl.int64), mass_K) > goal
    keys = keys_K.to(tl.int64)
    low = tl.maximum(low, tl.max(tl.where(reached, keys, low), 0))
    high = tl.minimum(high, tl.min(tl.where(reached, high, keys), 0))
    base_mass = tl.maximum(base_mass, tl.max(tl.where(reached, base_mass, mass_K), 0))
    base_count = tl.maximum(base_count, tl.max(tl.where(reached, base_count, count_K), 0))
    upto = tl.minimum(upto, tl.min(tl.where(reached, count_K, upto), 0))
    return low, high, base_mass, base_count, upto


@triton.jit
def _gather(logits, token_mask, candidates, low, high, count, V: tl.constexpr, WINDOW: tl.constexpr):
    """The keys of a row that lie in [low, high), `count` of them, LOWEST behind."""
    done = count * 0
    for start in tl.range(0, V, WINDOW, num_stages=3):
        _, values = _load(logits, token_mask, start + tl.arange(0, WINDOW), V)
        key = _key(values)
        inside = (key >= low) & (key < high) & (values > float("-inf"))
        number = tl.sum(inside.to(tl.int32), 0)
        if number > 0:
            tl.store(candidates + done + tl.cumsum(inside.to(tl.int32), 0) - 1, key, inside)
        done += number
    tl.debug_barrier()
    at = tl.arange(0, WINDOW)
    keys = tl.load(candidates + at, at < count, LOWEST)
    tl.debug_barrier()
    return keys


@triton.jit
def _nth(logits, token_mask, key, rank, V: tl.constexpr, BLOCK: tl.constexpr):
    """Index of the token number `rank` (from 1) of those with a key."""
    at, seen, start = key * 0 + V, rank * 0, key * 0
    while (at == V) & (start < V):
        indices = start + tl.arange(0, BLOCK)
        _, values = _load(logits, token_mask, indices, V)
        same = (_key(values) == key) & (indices < V)
        number = tl.sum(same.to(tl.int32), 0)
        if seen + number >= rank:
            order = seen + tl.cumsum(same.to(tl.int32), 0)
            at = tl.min(tl.where(same & (order == rank), indices, V), 0)
        seen += number
        start += BLOCK
    return at


@triton.jit
def _follow(reset, value, later_reset, later_value):
    """Two runs of drafts one after the other: a reset forgets what was before it."""
    return reset | later_reset, tl.where(later_reset != 0, later_value, value & later_value)


@triton.jit
def sample_accept(tokens, drafts, accepted, R, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """accepted[r] = 1 up to the first refused draft of each sequence; a row with draft -1 ends one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chain, start = R * 0 + 1, R * 0
    while start < R:
        at = start + tl.arange(0, BLOCK)
        token, draft = tl.load(tokens + at, at < R, -1), tl.load(drafts + at, at < R, -1)
        ends = draft < 0
        good = (ends | (token == draft)).to(tl.int32)
        resets, values = tl.associative_scan((ends.to(tl.int32), good), 0, _follow)
        values = tl.where(resets != 0, values, values & chain)
        tl.store(accepted + at, tl.where(ends, 0, values), at < R)
        chain = tl.sum(tl.where(at == start + BLOCK - 1, values, 0), 0)
        start += BLOCK


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """Three launches over parts of rows, two of R programs, one of a single program."""
    V, W = node.width("V"), node.width("MW")
    S, K, pdl = -(-V // SPLIT), THRESHOLDS, node.arch.has_pdl
    given = {
        "V": V, "W": W, "S": S, "S2": triton.next_power_of_2(S), "SPLIT": SPLIT, "K": K, "CHUNK": CHUNK, "AHEAD": AHEAD,
        "WINDOW": WINDOW, "CANDIDATES": CANDIDATES, "PDL": pdl, "R": "R", "BLOCK": 256,
        "floats": node.add_scratch("floats", "float32", ("R", 4, S)),
        "ints": node.add_scratch("ints", "int32", ("R", 2, S)),
        "thresholds": node.add_scratch("thresholds", "int32", ("R", K)),
        "masses": node.add_scratch("masses", "int64", ("R", S, K + 2)),
        "counts": node.add_scratch("counts", "int32", ("R", S, K)),
        "candidates": node.add_scratch("candidates", "int32", ("R", 2, CANDIDATES)),
        "lengths": node.add_scratch("lengths", "int32", ("R",)),
        **{name: node.at(name) for name in (*node.inputs, *node.outputs)},
    }  # fmt: skip

    def launch(function: Any, grid: tuple[Any, ...], num_warps: int, **more: bool) -> Kernel:
        arguments = {parameter.name: {**given, **more}[parameter.name] for parameter in function.params}
        return node.triton(function, grid, arguments, num_warps=num_warps, pdl=True)

    return (
        Variant(
            (
                launch(sample_scan, ("R", S), 8),
                launch(sample_coarse, (f"min(R*{S}, SMS)",), 8),
                launch(sample_gather, (f"min(R*{S}, SMS)",), 16),
                launch(sample_pick, ("R",), 8, WHOLE=True),
                launch(sample_pick, ("R",), 8, WHOLE=False),
                launch(sample_accept, (1,), 4),
            )
        ),
    )
