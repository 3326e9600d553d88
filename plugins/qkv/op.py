"""The front of an MLA layer in one op: joint projection, latent norms, rope of the shared key, append to the cache."""

from dsc.plugins.activation_codes import TAKEN_DOC, taken
from dsc.plugins.schema import F32, FLOATS, I32, Cost, Op, Tensor, Weight

OP = Op(
    "Qkv",
    inputs=(
        Tensor("x", "T D", FLOATS),
        Weight("w", "q_width+joint*(latent+rope) D"),
        Weight("w_kv", "latent+rope D", optional=True),
        Tensor("q_norm", "q_lora", FLOATS, optional=True),
        Tensor("kv_norm", "latent", FLOATS),
        Tensor("cos", "context rope//2", F32),
        Tensor("sin", "context rope//2", F32),
        Tensor("positions", "T", I32),
        Tensor("slots", "T", I32),
        Tensor("cache", "N block_bytes", ("uint8",)),
        *taken("D"),
    ),
    outputs=(
        Tensor("q", "T q_width", FLOATS, like="x"),
        Tensor("latent", "T latent", FLOATS, like="x"),
        Tensor("k_rope", "T rope", FLOATS, like="x"),
        Tensor("cache_out", "N block_bytes", ("uint8",), alias="cache"),
    ),
    attributes={
        "q_width": int,
        "q_lora": int,
        "heads": int,
        "nope": int,
        "latent": int,
        "rope": int,
        "epsilon": float,
        "cache_dtype": str,
        "block_tokens": int,
        "block_bytes": int,
        "joint": int,
    },
    cost=lambda d: Cost(
        flop=2 * d.T * d.D * (d.q_width + d.latent + d.rope),
        bytes=2 * (d.T * (d.D + d.q_width + 2 * (d.latent + d.rope)) + d.D * (d.q_width + d.latent + d.rope)),
    ),
    doc=f"""c = x W^T, split into q [q_width], latent [latent] and k_pe [rope].

    q_lora > 0: q = RMSNorm(q, q_norm), and q_width is q_lora; q_lora 0: q is the heads' queries, heads*(nope+rope), as
    they are. latent = RMSNorm(latent, kv_norm); k_pe has no norm. k_rope = k_pe rotated in interleaved pairs by the row
    `positions` of the tables. [latent, k_rope] in cache_dtype goes to row `slots` of the cache (slot -1: nowhere).
    joint 1: the rows of w are q's, then the latent's and k_pe's; joint 0: w has q's only and w_kv the others.
    {TAKEN_DOC}
    """,
)
