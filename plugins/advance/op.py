"""After sampling, the inputs of the next decode step, so that the host need not be asked in between."""

from dsc.plugins.schema import I32, Cost, Op, Tensor

_STATE = ("tokens", "positions", "slots", "sequence_lengths", "places")

OP = Op(
    "Advance",
    inputs=(
        Tensor("chosen", "B", I32),
        *(Tensor(name, "B", I32) for name in _STATE),
        Tensor("block_table", "B P", I32),
    ),
    outputs=tuple(Tensor(f"next_{name}", "B", I32, alias=name) for name in _STATE),
    attributes={"block_tokens": int},
    cost=lambda d: Cost(flop=0, bytes=11 * 4 * d.B),
    doc="""One token a sequence, in place: tokens = chosen; positions, sequence_lengths and places (of the tokens being
    sampled) one up; slots = block_table[b, positions // block_tokens] * block_tokens + positions % block_tokens.
    The block table must have the blocks of the next positions already.
    Padding rows (slot -1) stay as they are. A row whose chosen token is -1 (broken logits) becomes one.
    """,
)
