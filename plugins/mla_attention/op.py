"""Multi-head latent attention over the paged latent cache, expanded or absorbed."""

from dsc.plugins.schema import F32, FLOATS, I32, Cost, Op, Tensor, Weight

OP = Op(
    "MlaAttention",
    inputs=(
        Tensor("q", "T heads*(nope+rope)", FLOATS),
        Weight("kv_b", "heads*(nope+v) latent_dim"),
        Tensor("cos", "context rope//2", F32),
        Tensor("sin", "context rope//2", F32),
        Tensor("positions", "T", I32),
        Tensor("query_starts", "B1", I32),
        Tensor("sequence_lengths", "B", I32),
        Tensor("block_table", "B P", I32),
        Tensor("cache", "N block_bytes", ("uint8",)),
        Tensor("latent", "T latent_dim", FLOATS, optional=True),
        Tensor("k_rope", "T rope", FLOATS, optional=True),
    ),
    outputs=(Tensor("o", "T heads*v", FLOATS, like="q"),),
    attributes={
        "heads": int,
        "nope": int,
        "rope": int,
        "v": int,
        "latent_dim": int,
        "scale": float,
        "mode": str,
        "cache_dtype": str,
        "block_tokens": int,
        "block_bytes": int,
    },
    # An upper bound in the context: how much of P is filled is known on the device only.
    cost=lambda d: Cost(
        flop=2 * d.T * d.heads * d.P * d.block_tokens * (2 * d.latent_dim + d.rope),
        bytes=d.B * d.P * d.block_bytes + 2 * d.T * d.heads * (d.nope + d.rope + d.v),
    ),
    doc="""Rotates the rope part of each head's query by `positions`, then attends causally to the whole cached context.

    Query j of the q queries of a sequence of length n sees keys 0 .. n - q + j; the step's own tokens are in the cache
    already. Queries are rows query_starts[b] .. query_starts[b+1]; none is allowed; rows of no sequence give zeros.
    mode expanded: k_nope and v of every cached latent through kv_b, then attention of nope+rope over v.
    mode absorbed: q_nope W_UK against the latents themselves, and W_UV on what they sum to (DeepSeek-V2, section 2.1.2).
    kv_b holds per head nope rows of W_UK, then v rows of W_UV, and is dequantized whatever its format.
    scale multiplies the scores. latent and k_rope, the step's own rows, are for kernels; they equal what the cache holds.
    """,
)
