"""Router on GPUs: logits with float32's exactness, then one program a token chooses its experts.

A few tokens are multiplied on the plain cores, weights fetched before the predecessor is done; more on tensor cores.

T tokens, E experts, D hidden; S parts of D that are summed apart.
"""

import triton
import triton.language as tl

from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.runtime.steps import Step, Variant

FEW, FEW_PART, FEW_EXPERTS = 4, 1024, 4  # tokens at most; columns and experts of a program
SPLITS = ((32, 16, 28), (256, 32, 8), (0, 64, 2))  # at most so many tokens (0: any), tokens a tile, parts of D


@triton.jit
def _product(xs, ws):
    """ws xs in float32: every product exact, and a short chain of sums, because tensor cores cut off what they add."""
    if xs.dtype == tl.float32:
        return tl.dot(ws.to(tl.float32), xs, input_precision="ieee")
    else:
        # A float32 is the sum of three bfloat16, and a product of two bfloat16 is a float32.
        whole = ws.to(tl.float32)
        first = whole.to(tl.bfloat16)
        rest = whole - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        part = tl.dot((rest - second.to(tl.float32)).to(tl.bfloat16), xs)
        return tl.dot(first, xs, tl.dot(second, xs, part))


@triton.jit
def router_logits(
    x,
    w,
    logits,
    T,
    E: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """logits[s, t, e] = the part of x[t] . w[e] over columns [s * PART, (s + 1) * PART); grid: token tiles, expert tiles, s."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    split = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    for k0 in range(split * PART, tl.minimum((split + 1) * PART, D), BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        xs = tl.load(x + tokens[None, :].to(tl.int64) * D + k[:, None], (tokens < T)[None, :] & (k < D)[:, None], 0.0)
        ws = tl.load(w + experts[:, None] * D + k[None, :], (experts < E)[:, None] & (k < D)[None, :], 0.0)
        sums += _product(xs, ws)
    at = (split * T + tokens[None, :]).to(tl.int64) * E + experts[:, None]
    tl.store(logits + at, sums, (tokens < T)[None, :] & (experts < E)[:, None])


@triton.jit
def router_logits_few(
    x,
    w,
    logits,
    T,
    E: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `router_logits` for at most BLOCK_T tokens; grid: expert tiles, s."""
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    split = tl.program_id(1)
    k = split * PART + tl.arange(0, PART)
    ws = tl.load(w + experts[:, None] * D + k[None, :], (experts < E)[:, None] & (k < D)[None, :], 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for t in tl.static_range(BLOCK_T):
        xs = tl.load(x + t * D + k, (k < D) & (t < T), 0.0).to(tl.float32)
        sums = tl.sum(ws * xs[None, :], 1)
        tl.store(logits + (split * T + t) * E + experts, sums, (experts < E) & (t < T))


@triton.jit
def _keys(values, index, COUNT: tl.constexpr):
    """int64 that order as the floats do, the lower index first among equals."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0 equals 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (COUNT - 1 - index)


@triton.jit
def router_choose(
    logits,
    bias,
    slots,
    expert_map,
    ids,
    weights,
    T,
    scale,
    E: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SCORING: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """ids, or what expert_map says of them, and weights of one token; experts lie as [group, expert of the group]."""
    LOWEST: tl.constexpr = -(2**63)  # below the key of -inf
    IN_GROUP: tl.constexpr = E // GROUPS
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    expert = group[:, None] * IN_GROUP + member[None, :]
    real = (group < GROUPS)[:, None] & (member < IN_GROUP)[None, :]
    added = tl.zeros((BLOCK_G, BLOCK_E), tl.float32)
    if bias is not None:
        added = tl.load(bias + expert, real, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    live = tl.load(slots + token) >= 0
    sums = tl.zeros((BLOCK_G, BLOCK_E), tl.float32)
    if S <= 8:  # unrolled, so that the loads do not wait for each other; of more there are too many for the registers
        for split in tl.static_range(S):
            sums += tl.load(logits + (split * T + token) * E + expert, real, 0.0)
    else:
        for split in range(S):
            sums += tl.load(logits + (split * T + token) * E + expert, real, 0.0)
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-sums))
    else:
        top = tl.max(tl.max(tl.where(real, sums, -float("inf")), 1), 0)
        powers = tl.where(real, tl.exp(sums - top), 0.0)
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores + added
    if GROUP_SCORE != "none":
        member_keys = tl.where(real, _keys(choice, member[None, :], BLOCK_E), LOWEST)
        best = tl.max(member_keys, 1)
        group_score = tl.max(tl.where(real, choice, -float("inf")), 1)
        if GROUP_SCORE == "top2_sum":
            others = real & (member_keys != best[:, None])
            group_score += tl.max(tl.where(others, choice, -float("inf")), 1)
        group_keys = tl.where(group < GROUPS, _keys(group_score, group, BLOCK_G), LOWEST)
        kept = group < 0
        for _ in tl.static_range(TOPK_GROUPS):
            best_group = group_keys == tl.max(group_keys, 0)
            kept = kept | best_group
            group_keys = tl.where(best_group, LOWEST, group_keys)
        choice = tl.where(kept[:, None], choice, -float("inf"))
    keys = tl.where(real, _keys(choice, expert, E), LOWEST)
    column = tl.arange(0, BLOCK_K)
    chosen, gained = tl.full((BLOCK_K,), -1, tl.int32), tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(K):
        best_key = tl.max(tl.max(keys, 1), 0)
        here = keys == best_key
        gain = tl.sum(tl.sum(tl.where(here, scores, 0.0), 1), 0)
        chosen = tl.where(column == k, E - 1 - (best_key & 0xFFFFFFFF).to(tl.int32), chosen)
        gained = tl.where(column == k, gain, gained)
        keys = tl.where(here, LOWEST, keys)
    if NORMALIZE:
        gained = gained / (tl.sum(gained, 0) + 1e-20)
    if expert_map is not None:
        chosen = tl.load(expert_map + chosen, column < K, -1)
    tl.store(ids + token * K + column, tl.where(live, chosen, -1), column < K)
    tl.store(weights + token * K + column, tl.where(live, gained * scale, 0.0), column < K)


def lower(node: GpuNode) -> tuple[Variant, ...]:
    """Two launches; a variant for each size of step, with more parts of D the fewer tokens there are."""
    experts, width = node.width("E"), node.width("D")
    most = max(-(-width // _part(width, parts)) * tokens for tokens, _, parts in SPLITS[:-1])
    most = max(most, -(-width // FEW_PART) * FEW)
    logits = node.add_scratch("logits", "float32", (f"max({most}, {SPLITS[-1][2]}*T)", experts))
    few = (_few_logits(node, logits), _choose(node, logits, -(-width // FEW_PART)))
    variants = [Variant(few, f"T <= {FEW}")]
    for tokens, block, parts in SPLITS:
        part = _part(width, parts)
        splits = -(-width // part)
        steps = (_logits(node, logits, block, part, splits), _choose(node, logits, splits))
        variants.append(Variant(steps, f"T <= {tokens}" if tokens else ""))
    return tuple(variants)


def _part(width: int, parts: int) -> int:
    """Columns of one of about `parts` parts, in steps of 256."""
    return -(-width // (parts * 256)) * 256


def _few_logits(node: GpuNode, logits: Typed) -> Step:
    arguments: dict[str, object] = {
        "x": node.at("x"),
        "w": node.at("w"),
        "logits": logits,
        "T": "T",
        "E": node.width("E"),
        "D": node.width("D"),
        "PART": FEW_PART,
        "BLOCK_T": FEW,
        "BLOCK_E": FEW_EXPERTS,
        "PDL": node.arch.has_pdl,
    }
    grid = (-(-node.width("E") // FEW_EXPERTS), -(-node.width("D") // FEW_PART))
    return node.triton(router_logits_few, grid, arguments, num_warps=4, pdl=True)


def _logits(node: GpuNode, logits: Typed, block: int, part: int, splits: int) -> Step:
    exact = node.at("x").dtype == "float32"
    block_e = 16 if exact else 64
    block = 16 if exact else block
    arguments: dict[str, object] = {
        "x": node.at("x"),
        "w": node.at("w"),
        "logits": logits,
        "T": "T",
        "E": node.width("E"),
        "D": node.width("D"),
        "PART": part,
        "BLOCK_T": block,
        "BLOCK_E": block_e,
        "BLOCK_D": 64,
        "PDL": node.arch.has_pdl,
    }
    grid = (f"ceil_div(T, {block})", -(-node.width("E") // block_e), splits)
    return node.triton(router_logits, grid, arguments, num_warps=4, num_stages=3, pdl=True)


def _choose(node: GpuNode, logits: Typed, splits: int) -> Step:
    experts, groups = node.width("E"), int(node.attributes["groups"])
    if node.attributes["group_score"] == "none":
        groups = 1
    top_k = int(node.attributes["top_k"])
    arguments = {
        "logits": logits,
        "bias": node.maybe("bias"),
        "slots": node.at("slots"),
        "expert_map": node.maybe("expert_map"),
        "ids": node.at("ids"),
        "weights": node.at("weights"),
        "T": "T",
        "scale": float(node.attributes["scale"]),
        "E": experts,
        "S": splits,
        "K": top_k,
        "GROUPS": groups,
        "TOPK_GROUPS": int(node.attributes["topk_groups"]),
        "SCORING": str(node.attributes["scoring"]),
        "GROUP_SCORE": str(node.attributes["group_score"]),
        "NORMALIZE": int(node.attributes["normalize"]),
        "BLOCK_G": triton.next_power_of_2(groups),
        "BLOCK_E": triton.next_power_of_2(experts // groups),
        "BLOCK_K": triton.next_power_of_2(top_k),
        "PDL": node.arch.has_pdl,
    }
    return node.triton(router_choose, ("T",), arguments, num_warps=1, pdl=True)
