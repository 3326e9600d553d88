"""MlaAttention: both modes against an independent float64 attention, every way of batching against one by one.

Legend: H heads, N nope, R rope, V value, L latent.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_op import IMPLEMENTATIONS, CpuOp
from support.paged import make_batch, rope_tables
from support.random_weights import FORMATS, random_weight
from support.tolerances import check_rows
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsc.plugins.cpu_node import StepMemo
from dsc.plugins.latent_cache import cache_rows, context_slots
from dsc.plugins.mla_attention import ragged

H, N, R, V, L = 4, 128, 64, 128, 512
SMALL = {"heads": 2, "nope": 32, "rope": 16, "v": 8, "latent_dim": 64}  # values narrower than the rope part
MODES = ("expanded", "absorbed")
EVERY_WAY = [(implementation, mode) for implementation in IMPLEMENTATIONS for mode in MODES]
RAGGED = {  # lengths, queries, padding rows
    "one token": ([1], [1], 0),
    "decode across block borders": ([63, 64, 65, 1], [1, 1, 1, 1], 0),
    "equal lengths": ([40, 40], [1, 1], 0),
    "several queries": ([70, 64, 3], [2, 2, 2], 0),
    "ragged queries, one sequence idle, padding": ([65, 30, 129, 1], [3, 0, 1, 1], 2),
    "first chunks": ([50, 20, 64], [50, 20, 64], 1),
    "later chunks and decode": ([1, 130, 200], [1, 30, 65], 0),
    "long and short": ([4097, 5, 9], [1, 1, 2], 0),
    "long, a chunk": ([4097], [70], 0),
    "idle only": ([5, 0], [0, 0], 3),
    "no sequence": ([], [], 0),
}


def attention(
    implementation, mode, case, *, dtype="float32", cache_dtype=None, format_="fp32", sizes=None, seed=0, shuffled=True
):
    """The op over a random batch, and the batch."""
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes or {"heads": H, "nope": N, "rope": R, "v": V, "latent_dim": L}
    heads, nope, rope, v, latent = sizes.values()
    cache_dtype = cache_dtype or dtype
    lengths, queries, padding = case
    batch = make_batch(
        lengths, queries, latent + rope, dtype=cache_dtype, padding=padding, shuffled=shuffled, generator=generator
    )
    q = torch.randn(len(batch.positions), heads * (nope + rope), generator=generator).to(getattr(torch, dtype))
    cos, sin = rope_tables(rope)
    operands = {
        "q": q,
        "kv_b": random_weight(format_, (heads * (nope + v), latent), generator),
        "cos": cos,
        "sin": sin,
        "positions": batch.positions,
        "query_starts": batch.query_starts,
        "sequence_lengths": batch.sequence_lengths,
        "block_table": batch.block_table,
        "cache": batch.cache,
    }
    attributes = dict(
        **sizes,
        scale=0.135234,
        mode=mode,
        cache_dtype=cache_dtype,
        block_tokens=64,
        block_bytes=batch.cache.shape[1],
    )
    return CpuOp(implementation, "MlaAttention", operands, attributes, ("cos", "sin")), batch


def independent(op, batch):
    """float64, query by query: keys and values as DeepSeek's modeling code makes them, no cache, no blocks."""
    heads, nope, rope, v, latent = (op.attributes[k] for k in ("heads", "nope", "rope", "v", "latent_dim"))
    kv_b = op.operands["kv_b"].dequantize().double()
    frequencies = 1e4 ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
    out = torch.zeros(len(op.operands["q"]), heads, v, dtype=torch.float64)
    starts = batch.query_starts.tolist()
    for sequence, context in enumerate(batch.context):
        latents, key_rope = context.double()[:, :latent], context.double()[:, latent:]
        made = (latents @ kv_b.T).view(len(context), heads, nope + v)
        count = starts[sequence + 1] - starts[sequence]
        for j in range(count):
            row, visible = starts[sequence] + j, len(context) - count + j + 1
            query = op.operands["q"][row].double().view(heads, nope + rope)
            pairs = torch.view_as_complex(query[:, nope:].reshape(heads, -1, 2).contiguous())
            turned = torch.view_as_real(pairs * torch.exp(1j * (visible - 1) * frequencies)).flatten(1)
            scores = torch.einsum("hn,shn->hs", query[:, :nope], made[:visible, :, :nope])
            scores = scores + turned @ key_rope[:visible].T
            p = torch.softmax(scores * op.attributes["scale"], -1)
            out[row] = torch.einsum("hs,shv->hv", p, made[:visible, :, nope:])
    return out.flatten(1)


@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize(("implementation", "mode"), EVERY_WAY)
def test_equals_an_independent_attention(implementation, mode, case):
    op, batch = attention(implementation, mode, case)
    got = op()["o"]
    check_rows(got, independent(op, batch), "attention", "float32")
    padding = case[2]
    assert not got[len(got) - padding :].any()


@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_cpu_equals_the_reference_in_other_dtypes(mode, case, dtype, cache_dtype):
    want = attention("reference", mode, case, dtype=dtype, cache_dtype=cache_dtype, format_="bf16")[0]()["o"]
    got = attention("cpu", mode, case, dtype=dtype, cache_dtype=cache_dtype, format_="bf16")[0]()["o"]
    check_rows(got, want, "attention", dtype)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_absorbed_equals_expanded_in_every_format(implementation, format_):
    case = RAGGED["later chunks and decode"]
    absorbed, expanded = (attention(implementation, mode, case, format_=format_)[0] for mode in MODES)
    check_rows(absorbed()["o"], expanded()["o"], "attention", "float32")
    assert expanded()["o"].abs().mean() > 0.01


@pytest.mark.parametrize(("implementation", "mode"), EVERY_WAY)
def test_values_narrower_than_the_rope_part(implementation, mode):
    op, batch = attention(implementation, mode, RAGGED["several queries"], sizes=SMALL)
    check_rows(op()["o"], independent(op, batch), "attention", "float32")


@pytest.mark.parametrize("mode", MODES)
def test_batched_equals_one_by_one(mode):
    op, batch = attention("cpu", mode, ([65, 30, 129, 64], [3, 1, 129, 0], 0))
    together = op()["o"]
    starts = batch.query_starts.tolist()
    for b in range(4):
        rows = slice(starts[b], starts[b + 1])
        alone = op(
            q=attention("cpu", mode, ([65, 30, 129, 64], [3, 1, 129, 0], 0))[0].operands["q"][rows],
            positions=batch.positions[rows],
            query_starts=torch.tensor([0, starts[b + 1] - starts[b]], dtype=torch.int32),
            sequence_lengths=batch.sequence_lengths[b : b + 1],
            block_table=batch.block_table[b : b + 1],
        )["o"]
        check_rows(alone, together[rows], "attention", "float32")


@pytest.mark.parametrize(("implementation", "mode"), EVERY_WAY)
def test_chunks_equal_the_whole(implementation, mode):
    op, _ = attention(implementation, mode, ([150], [150], 0))
    q, positions = op.operands["q"], op.operands["positions"]
    whole = op()["o"]
    for first, last in itertools.pairwise((0, 1, 64, 127, 150)):
        chunk = op(
            q=q[first:last],
            positions=positions[first:last],
            query_starts=torch.tensor([0, last - first], dtype=torch.int32),
            sequence_lengths=torch.tensor([last], dtype=torch.int32),
        )["o"]
        check_rows(chunk, whole[first:last], "attention", "float32")


@pytest.mark.parametrize("lengths", [[200], [200, 64]])
@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_blocks_does_not_matter(mode, lengths):
    op, batch = attention("cpu", mode, (lengths, [1] * len(lengths), 0))
    scattered = op()["o"]
    assert batch.block_table[0].tolist() != sorted(batch.block_table[0].tolist())
    table = torch.tensor([[0, 1, 2, 3], [4, 0, 0, 0]], dtype=torch.int32)[: len(lengths)]
    cache = torch.full_like(batch.cache, 0xFF)
    rows = cache_rows(cache, "float32", L + R)
    for sequence, context in enumerate(batch.context):
        rows[context_slots(table[sequence], len(context), 64)] = context
    assert torch.equal(op(block_table=table, cache=cache)["o"], scattered)


def test_a_sequence_with_nan_in_its_cache_spoils_no_other():
    case = RAGGED["decode across block borders"]
    op, batch = attention("cpu", "absorbed", case)
    clean = op()["o"]
    slots = context_slots(batch.block_table[1], 64, 64)
    cache_rows(batch.cache, "float32", L + R)[slots] = torch.nan
    spoiled = op()["o"]
    assert spoiled[1].isnan().all()
    others = torch.tensor([0, 2, 3])
    assert torch.equal(spoiled[others], clean[others])


@pytest.mark.parametrize("mode", MODES)
def test_small_memory_limits_change_nothing(mode, monkeypatch):
    case = ([130, 5, 70, 69], [80, 1, 1, 3], 1)
    op, _ = attention("cpu", mode, case)
    whole = op()["o"]
    monkeypatch.setattr(ragged, "MASK_CELLS", 3000)
    monkeypatch.setattr(ragged, "GROUP_ELEMENTS", 60000)
    monkeypatch.setattr("dsc.plugins.mla_attention.cpu.GROUP_ELEMENTS", 60000)
    split = op()["o"]
    check_rows(split, whole, "attention", "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:.*[Ff]lash attention")
@pytest.mark.parametrize("case", ["later chunks and decode", "first chunks"])
def test_scores_are_never_kept_whole(case, mode, dtype):
    """torch's fused kernel takes every call; its other one would hold heads x queries x keys in float32."""
    op, _ = attention("cpu", mode, RAGGED[case], dtype=dtype, format_="bf16")
    q = torch.zeros(1, 1, 2, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with pytest.raises(RuntimeError, match="kernel"), torch.inference_mode():
            torch.nn.functional.scaled_dot_product_attention(q, q, q[..., :4])  # so it does tell
        assert op()["o"].isfinite().all()


def test_one_step_plans_once_for_all_layers():
    op, _ = attention("cpu", "absorbed", RAGGED["several queries"])
    step = StepMemo()
    first, again = op(step)["o"], op(step)["o"]
    assert torch.equal(first, again)
    plan = step.once(("mla_attention", True), lambda: pytest.fail("no plan was kept"))
    assert sum(len(group.parts) for group in plan.groups) == 1


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), max_size=9),
    mask_cells=st.sampled_from([200, 5000, 1 << 23]),
    elements=st.sampled_from([3000, 50000, 1 << 24]),
)
def test_a_plan_covers_every_row_once_within_its_limits(spans, mask_cells, elements):
    """Whatever the lengths: each query once, seeing exactly its keys, and no mask above the limit."""
    queries = [q for q, _ in spans]
    lengths = [q + before for q, before in spans]
    table = torch.arange(sum(-(-n // 16) for n in lengths) + 1).flip(0)
    table = torch.stack([table.roll(-b)[: 1 + 340 // 16] for b in range(len(spans))]) if spans else table[None, :0]
    starts = torch.tensor([0, *queries]).cumsum(0)
    total = int(starts[-1])
    limits = (ragged.MASK_CELLS, ragged.GROUP_ELEMENTS)
    ragged.MASK_CELLS, ragged.GROUP_ELEMENTS = mask_cells, elements
    try:
        turns = torch.zeros(total, 1, dtype=torch.complex64)
        plan = ragged.make_plan(starts, torch.tensor(lengths, dtype=torch.int32), table.int(), turns, 16, 8, 8)
    finally:
        ragged.MASK_CELLS, ragged.GROUP_ELEMENTS = limits
    seen = {}
    parts = [(group.size, part) for group in plan.groups for part in group.parts]
    for size, part in parts:
        rows = torch.arange(total)[part.rows].view(size, part.queries)
        real = torch.ones(rows.numel(), dtype=torch.bool)
        if part.real is not None:
            real = torch.zeros_like(real)
            real[part.real[0]] = True
            assert torch.equal(rows.flatten()[part.real[0]], part.real[1])
        mask = replace(part).mask(torch.float32)
        if mask is not None and not part.causal:
            assert part.queries == 1 or mask.numel() <= max(mask_cells, part.keys)
        visible = torch.zeros(size, part.queries, part.keys) if mask is None else mask
        for row, ok, line in zip(rows.flatten().tolist(), real.tolist(), visible.flatten(0, 1), strict=True):
            if ok:
                assert row not in seen
                seen[row] = int((line == 0).sum())
    want = {
        int(starts[b]) + j: n - q + j + 1
        for b, (q, n) in enumerate(zip(queries, lengths, strict=True))
        for j in range(q)
    }
    assert seen == want
