"""Sample on GPUs without sorting: the place in the sorted order is found by sums over thresholds.

Probabilities are kept as whole numbers, round(2^44 e^((logit - largest) / temperature)), so that their sums are the same in
any order, and a threshold that was passed stays passed. Logits compare as their bits do ("keys"), which makes thresholds
exact; equal logits are told apart by their index.

Legend: R rows, V vocabulary, W words of a mask row, S splits of a row, K thresholds of a pass.
"""

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode
from dsc.runtime.steps import Variant

SPLIT = 4096  # logits of one program that reads a part of a row
THRESHOLDS = 8
CHUNK = 512  # logits compared with all thresholds at a time
READ = 4096  # logits that a program reads at a time where it does little with them
CANDIDATES = 4096  # logits that a program searches without reading them again
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
    logits, token_mask, floats, ints, V: tl.constexpr, W: tl.constexpr, S: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of each part of a row: floats[r, :, s] = largest logit, their sum of exponentials, largest and smallest allowed;
    ints[r, :, s] = where the largest allowed is, how many are allowed. A NaN makes the largest logit infinite."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = split * SPLIT + tl.arange(0, SPLIT)
    raw, values = _load(logits + row * V, token_mask + row * W, at, V)
    raw = tl.where(raw != raw, float("inf"), raw)
    values = tl.where(values != values, float("-inf"), values)
    largest, best = tl.max(raw, 0), tl.max(values, 0)
    total = tl.sum(tl.exp(tl.where(raw > float("-inf"), raw - largest, float("-inf"))), 0)
    allowed = values > float("-inf")
    to = floats + row * 4 * S + split
    tl.store(to, largest)
    tl.store(to + S, total)
    tl.store(to + 2 * S, best)
    tl.store(to + 3 * S, tl.min(tl.where(allowed, values, float("inf")), 0))
    tl.store(ints + row * 2 * S + split, tl.min(tl.where(values == best, at, V), 0))
    tl.store(ints + row * 2 * S + S + split, tl.sum(allowed.to(tl.int32), 0))


@triton.jit
def sample_coarse(
    logits, token_mask, temperature, min_p, floats, thresholds, masses, counts, V: tl.constexpr, W: tl.constexpr,
    S: tl.constexpr, S2: tl.constexpr, SPLIT: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each part of a row that is not greedy: masses[r, s, :] and counts[r, s, :] of what reaches each of the row's K
    thresholds; masses[r, s, K] all, masses[r, s, K + 1] of tokens with at least min_p of the largest probability."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat != 0.0:
        splits = tl.arange(0, S2)
        best = tl.load(floats + row * 4 * S + 2 * S + splits, splits < S, float("-inf"))
        least = tl.load(floats + row * 4 * S + 3 * S + splits, splits < S, float("inf"))
        largest = tl.max(best, 0)
        low = tl.maximum(tl.min(least, 0), largest - FAR * heat)
        k = tl.arange(0, K)
        keys_K = _between(largest, low, (k + 1).to(tl.float32) / K)
        floor = tl.load(min_p + row).to(tl.float64)
        mass, count = tl.zeros((K, CHUNK), tl.int64), tl.zeros((K, CHUNK), tl.int32)
        total, above = tl.zeros((CHUNK,), tl.int64), tl.zeros((CHUNK,), tl.int64)
        for start in range(0, SPLIT, CHUNK):
            at = split * SPLIT + start + tl.arange(0, CHUNK)
            _, values = _load(logits + row * V, token_mask + row * W, at, V)
            allowed = values > float("-inf")
            ratio = tl.exp((values - largest).to(tl.float64) / heat.to(tl.float64))
            weights = tl.where(allowed, (ratio * ONE + 0.5).to(tl.int64), 0)
            mass, count = _add(mass, count, tl.where(allowed, _key(values), LOWEST), weights, keys_K)
            total += weights
            above += tl.where(ratio >= floor, weights, 0)
        to = row * S + split
        tl.store(masses + to * (K + 2) + k, tl.sum(mass, 1))
        tl.store(masses + to * (K + 2) + K, tl.sum(total, 0))
        tl.store(masses + to * (K + 2) + K + 1, tl.sum(above, 0))
        tl.store(counts + to * K + k, tl.sum(count, 1))
        if split == 0:
            tl.store(thresholds + row * K + k, keys_K)


@triton.jit
def sample_pick(
    logits, token_mask, temperature, top_p, top_k, min_p, seeds, positions, floats, ints, thresholds, masses, counts,
    candidates, tokens, logprobs, V: tl.constexpr, W: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, K: tl.constexpr,
    CHUNK: tl.constexpr, READ: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Token and logprob of one row."""
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
    heat = tl.load(temperature + row)
    if sound & (heat != 0.0):
        least = tl.load(floats + row * 4 * S + 3 * S + splits, real, float("inf"))
        allowed = tl.sum(tl.load(ints + row * 2 * S + S + splits, real, 0), 0)
        token = _draw(
            logits + row * V, token_mask + row * W, candidates + row * CANDIDATES, largest, tl.min(least, 0), allowed,
            heat.to(tl.float64), tl.load(top_p + row), tl.load(top_k + row), tl.load(seeds + row),
            tl.load(positions + row), thresholds + row * K, masses + row * S * (K + 2), counts + row * S * K,
            V, S, S2, K, CHUNK, READ, CANDIDATES,
        )  # fmt: skip
    scaled = tl.where(real & (raw > float("-inf")), sums * tl.exp(raw - peak), 0.0)
    chosen = tl.load(logits + row * V + tl.minimum(token, V - 1))
    logprob = chosen - peak - tl.log(tl.sum(scaled, 0))
    tl.store(tokens + row, tl.where(sound, token, -1))
    tl.store(logprobs + row, tl.where(sound, logprob, float("nan")))


@triton.jit
def _draw(
    logits, token_mask, candidates, largest, least, allowed, heat, top_p, top_k, seed, position, thresholds, masses,
    counts, V: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    READ: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Three searches for the first token whose cumulative sum exceeds a goal: top_k's by number, top_p's and the draw's by
    mass. The first two give the mass that is kept."""
    splits = tl.arange(0, S2)
    kept = tl.sum(tl.load(masses + splits * (K + 2) + K, splits < S, 0), 0)
    above = tl.sum(tl.load(masses + splits * (K + 2) + K + 1, splits < S, 0), 0)
    zero = position * 0
    word, _, _, _ = tl.philox(seed, position, zero, zero, zero)
    uniform = (word >> 8).to(tl.float64) * (1.0 / (1 << 24))

    found, rank = kept * 0, kept * 0
    for stage in range(3):
        by_count = stage == 0
        wanted = tl.where(stage == 1, top_p.to(tl.float64), uniform) * kept.to(tl.float64)
        goal = wanted.to(tl.int64)
        # top_p asks for a sum of at least so much, the draw for more than so much.
        goal = tl.where((stage == 1) & (goal.to(tl.float64) >= wanted), goal - 1, goal)
        goal = tl.where(by_count, (top_k - 1).to(tl.int64), goal)
        if tl.where(by_count, (top_k > 0) & (top_k < allowed), (stage == 2) | (top_p < 1.0)):
            found, rank, mass = _search(
                logits, token_mask, candidates, largest, least, allowed, heat, goal, by_count, thresholds, masses,
                counts, V, S, S2, K, CHUNK, READ, CANDIDATES,
            )  # fmt: skip
            kept = tl.minimum(kept, mass)
        if stage == 1:
            kept = tl.minimum(kept, above)
    return _nth(logits, token_mask, found.to(tl.int32), rank, V, READ)


@triton.jit
def _search(
    logits, token_mask, candidates, largest, least, allowed, heat, goal, by_count, thresholds, masses, counts,
    V: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, READ: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The first token, in the order of falling logits, up to which the sum of masses or numbers exceeds a goal.

    Its key, its place among the tokens of this key (from 1), and the mass up to it. The key lies in [low, high); the
    sums over keys from `high` on are known.
    """
    low, high = _key(least).to(tl.int64), _key(largest).to(tl.int64) + 1
    base_mass, base_count, upto = goal * 0, allowed * 0, allowed
    splits, k = tl.arange(0, S2)[:, None], tl.arange(0, K)
    keys_K = tl.load(thresholds + k)
    mass_K = tl.sum(tl.load(masses + splits * (K + 2) + k[None, :], splits < S, 0), 0)
    count_K = tl.sum(tl.load(counts + splits * K + k[None, :], splits < S, 0), 0)
    low, high, base_mass, base_count, upto = _narrow(
        low, high, base_mass, base_count, upto, goal, by_count, keys_K, mass_K, count_K
    )
    while (upto - base_count > CANDIDATES) & (low + 1 < high):
        share = k.to(tl.float32) / K
        keys = _between(_value(low.to(tl.int32)), _value((high - 1).to(tl.int32)), share).to(tl.int64)
        # One threshold halves the keys, so that it ends whatever the logits are.
        keys = tl.where(k == 0, low + (high - low) // 2, keys)
        keys_K = tl.minimum(tl.maximum(keys, low + 1), high - 1).to(tl.int32)
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
    if upto - base_count <= CANDIDATES:
        keys = _gather(logits, token_mask, candidates, low, high, upto - base_count, V, READ, CANDIDATES)
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
def _gather(
    logits, token_mask, candidates, low, high, count, V: tl.constexpr, READ: tl.constexpr, CANDIDATES: tl.constexpr
):
    """The keys of a row that lie in [low, high), `count` of them, LOWEST behind."""
    done = count * 0
    for start in tl.range(0, V, READ, num_stages=3):
        _, values = _load(logits, token_mask, start + tl.arange(0, READ), V)
        key = _key(values)
        inside = (key >= low) & (key < high) & (values > float("-inf"))
        number = tl.sum(inside.to(tl.int32), 0)
        if number > 0:
            tl.store(candidates + done + tl.cumsum(inside.to(tl.int32), 0) - 1, key, inside)
        done += number
    tl.debug_barrier()
    at = tl.arange(0, CANDIDATES)
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
    """Two launches over parts of rows, one of R programs, one of a single program."""
    V, W = node.width("V"), node.width("MW")
    S, K, pdl = -(-V // SPLIT), THRESHOLDS, node.arch.has_pdl
    rows = {name: node.at(name) for name in ("logits", "token_mask")}
    floats, ints = node.add_scratch("floats", "float32", ("R", 4, S)), node.add_scratch("ints", "int32", ("R", 2, S))
    sums = {
        "thresholds": node.add_scratch("thresholds", "int32", ("R", K)),
        "masses": node.add_scratch("masses", "int64", ("R", S, K + 2)),
        "counts": node.add_scratch("counts", "int32", ("R", S, K)),
    }
    sizes = {"V": V, "W": W, "S": S, "PDL": pdl}
    more = {"S2": triton.next_power_of_2(S), "K": K, "CHUNK": CHUNK}
    scan = node.triton(
        sample_scan,
        ("R", S),
        {**rows, **sizes, "floats": floats, "ints": ints, "SPLIT": SPLIT},
        num_warps=8,
        pdl=True,
    )
    coarse = node.triton(
        sample_coarse,
        ("R", S),
        {
            **rows, **sums, **sizes, **more, "floats": floats, "SPLIT": SPLIT,
            "temperature": node.at("temperature"), "min_p": node.at("min_p"),
        },
        num_warps=8,
        pdl=True,
    )  # fmt: skip
    limits = {n: node.at(n) for n in ("temperature", "top_p", "top_k", "min_p", "seeds", "positions")}
    pick = node.triton(
        sample_pick,
        ("R",),
        {
            **rows, **limits, **sums, **sizes, **more, "floats": floats, "ints": ints, "tokens": node.at("tokens"),
            "logprobs": node.at("logprobs"), "READ": READ, "CANDIDATES": CANDIDATES,
            "candidates": node.add_scratch("candidates", "int32", ("R", CANDIDATES)),
        },
        num_warps=8,
        pdl=True,
    )  # fmt: skip
    accept = node.triton(
        sample_accept,
        (1,),
        {**{n: node.at(n) for n in ("tokens", "drafts", "accepted")}, "R": "R", "BLOCK": 256, "PDL": pdl},
        num_warps=4,
        pdl=True,
    )
    return (Variant((scan, coarse, pick, accept)),)
