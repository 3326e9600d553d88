"""Choose the next tokens, check drafts, and give the logarithms of the chosen tokens' probabilities."""

from dsc.plugins.schema import F32, I32, Cost, Op, Tensor

OP = Op(
    "Sample",
    inputs=(
        Tensor("logits", "R V", F32),
        Tensor("temperature", "R", F32),
        Tensor("top_p", "R", F32),
        Tensor("top_k", "R", I32),
        Tensor("min_p", "R", F32),
        Tensor("seeds", "R", ("int64",)),
        Tensor("positions", "R", I32),
        Tensor("token_mask", "R MW", I32),
        Tensor("drafts", "R", I32),
    ),
    outputs=(Tensor("tokens", "R", I32), Tensor("accepted", "R", I32), Tensor("logprobs", "R", F32)),
    cost=lambda d: Cost(flop=16 * d.R * d.V, bytes=4 * d.R * (d.V + d.MW)),
    doc="""One token per row of logits; a row's choice depends on that row alone.

    1. Token v is allowed where bit v%32 of word v//32 of token_mask is set.
    2. temperature 0: the allowed token with the largest logit, the lower index on ties. Otherwise
       p = softmax(logits / temperature) over the allowed tokens, sorted by (-logit, index), so by falling p.
    3. top_k (0: off) keeps the first k; top_p then keeps the tokens before which the kept ones sum to less than
       top_p of what top_k kept, so at least one; min_p keeps those with at least min_p of the largest probability.
    4. u = uniform(seed, position) in [0, 1), from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy
       as 1, 2, 3") with the seed as key and the position as counter; the token is the first whose cumulative kept
       probability exceeds u times their sum.
    accepted[r] is 1 where tokens[r] equals drafts[r] and all earlier drafts of the row's sequence were accepted; a
    sequence's last row has draft -1, and a row after such a row starts a sequence.
    logprobs: log-softmax of the raw logits, without mask and temperature, at the token.
    A row whose logits hold a NaN or +inf, or that is left without a finite allowed one, gets token -1 and logprob NaN.
    """,
)
