"""The logits of all ranks' parts of the vocabulary, side by side."""

from dsc.plugins.schema import F32, Cost, Op, Tensor

OP = Op(
    "GatherLogits",
    inputs=(Tensor("part", "R part", F32),),
    outputs=(Tensor("logits", "R vocabulary", F32),),
    attributes={"ranks": int, "vocabulary": int},
    cost=lambda d: Cost(flop=0, bytes=4 * d.R * (d.part + 2 * d.vocabulary)),
    doc="""logits = every rank's `part` side by side, in the order of the ranks, on every rank.

    Parts are equally wide, so the last ones may be longer than the vocabulary: columns from `vocabulary` on are padding,
    and no logits.
    """,
)
