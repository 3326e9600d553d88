"""The least time a step can take: for every op the stored bytes it must read or write and the arithmetic it must do.

An op's floor is the larger of bytes / memory rate and FLOPs / arithmetic rate; a step's is the sum over its ops. Stored are
weights and the cache: what a kernel hands to the next could stay on the chip. Of experts only those count that the step's
tokens reach, of tables only the rows that are looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

from dsc.plugins.formats import parse_format
from dsc.plugins.schema import Type, load_op
from dsc.runtime.program import Program, ProgramNode

EXPERT_SLOTS = ("gate", "up", "down")


@dataclass(frozen=True)
class Rates:
    """What a device does at best, measured: bytes a second of memory, FLOPs a second with bf16 and with fp8 operands."""

    memory: float
    bf16: float
    fp8: float


# A copy's rate (read and write), and the largest matrix products of cuBLASLt, on one GPU of the target.
RATES = {"sm_90a": Rates(memory=4.25e12, bf16=790e12, fp8=1237e12)}


@dataclass(frozen=True)
class StepFacts:
    """What a step computes, in numbers.

    tokens    query tokens; logit_rows rows of the head
    context   tokens in the cache that attention reads, over all sequences
    pairs     query-key pairs that attention computes
    experts   distinct experts hit, by router node; an unknown node counts as all
    """

    tokens: int
    sequences: int
    logit_rows: int
    context: int
    pairs: int
    experts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def decode(cls, sequences: int, context: int, experts: Mapping[str, float] | None = None) -> StepFacts:
        """One token of each sequence, the last of `context`."""
        return cls(sequences, sequences, sequences, sequences * context, sequences * context, experts or {})

    @classmethod
    def prefill(cls, sequences: int, start: int, tokens: int, experts: Mapping[str, float] | None = None) -> StepFacts:
        """`tokens` tokens of each sequence, after `start` that the cache has; logits of the last ones."""
        pairs = tokens * start + tokens * (tokens + 1) // 2
        facts = (sequences * tokens, sequences, sequences, sequences * (start + tokens), sequences * pairs)
        return cls(*facts, experts or {})


@dataclass(frozen=True)
class Floor:
    """One op's least bytes, FLOPs and seconds."""

    node: str
    op: str
    bytes: int
    flop: float
    seconds: float


def step_floor(program: Program, facts: StepFacts, rates: Rates) -> list[Floor]:
    """The floor of every node of a program, in order."""
    routers = {name: node.name for node in program.nodes if node.op == "Router" for name in node.outputs}
    return [_node_floor(program, node, facts, rates, routers) for node in program.nodes]


def _node_floor(
    program: Program, node: ProgramNode, facts: StepFacts, rates: Rates, routers: Mapping[str, str]
) -> Floor:
    slots = dict(zip(load_op(node.op).slot_names(), node.inputs, strict=False))
    dims = dims_of(program, node, facts)
    share = 1.0
    if node.op == "Moe":
        share = facts.experts.get(routers.get(slots["ids"], ""), dims.E) / dims.E
    num_bytes = 0.0
    for slot, name in slots.items():
        if name:
            num_bytes += _touched(program, node, slot, name, facts, share)
    flop = _attention_flop(dims, facts) if node.op == "MlaAttention" else load_op(node.op).cost(dims).flop
    rate = rates.fp8 if node.op != "MlaAttention" and _multiplies_fp8(node) else rates.bf16
    return Floor(node.name, node.op, round(num_bytes), flop, max(num_bytes / rates.memory, flop / rate))


def experts_of(program: Program, node: ProgramNode, facts: StepFacts) -> float | None:
    """Distinct experts that a Moe node reaches, all where its router is unknown; None for other ops."""
    if node.op != "Moe":
        return None
    ids = node.inputs[load_op(node.op).slot("ids")]
    router = next((other.name for other in program.nodes if other.op == "Router" and ids in other.outputs), "")
    return facts.experts.get(router, float(dims_of(program, node, facts).E))


def dims_of(program: Program, node: ProgramNode, facts: StepFacts) -> SimpleNamespace:
    """Every letter and width of the node's op as a number."""
    operands = program.operands
    types = [Type(operands[name].dtype, operands[name].shape) if name else None for name in node.inputs]
    _, bound = load_op(node.op).check(types, node.attributes)
    letters = {**program.letters, "T": facts.tokens, "B": facts.sequences, "R": facts.logit_rows}
    numbers = {name: letters.get(size, 0) if isinstance(size, str) else size for name, size in bound.items()}
    texts = {name: node.attributes.get(name, "") for name in ("mode", "quantize")}
    return SimpleNamespace(**numbers, **texts)


def _touched(program: Program, node: ProgramNode, slot: str, name: str, facts: StepFacts, share: float) -> float:
    """Bytes of a stored operand that a step reads or writes."""
    operand = program.operands[name]
    if operand.role == "weight":
        if slot in ("cos", "sin") or (node.op == "Embedding" and operand.shape):
            return operand.bytes * min(1.0, facts.tokens / int(operand.shape[0]))
        return operand.bytes * (share if slot.partition(".")[0] in EXPERT_SLOTS and node.op == "Moe" else 1.0)
    if operand.role == "state":
        tokens = facts.tokens if node.op == "Qkv" else facts.context
        return int(node.attributes["block_bytes"]) / int(node.attributes["block_tokens"]) * tokens
    return 0.0


def _attention_flop(d: SimpleNamespace, facts: StepFacts) -> float:
    """Attention and what kv_b does: to the queries and outputs where it is absorbed, to the context where it is expanded."""
    absorbed = d.mode == "absorbed"
    through_kv_b = 2.0 * (facts.tokens if absorbed else facts.context) * d.heads * d.latent_dim * (d.nope + d.v)
    widths = 2 * d.latent_dim + d.rope if absorbed else d.nope + d.rope + d.v
    return float(through_kv_b + 2.0 * facts.pairs * d.heads * widths)


def _multiplies_fp8(node: ProgramNode) -> bool:
    """Whether a product's operands are both FP8: the weight is, and so activations are quantized."""
    formats = [str(v) for k, v in node.attributes.items() if k.endswith("_format") and v]
    return bool(formats) and parse_format(formats[0]).kind == "fp8" and node.op != "Embedding"


def independent_hits(experts: int, per_token: int, tokens: int) -> float:
    """Experts that so many tokens reach on average when each chooses its own at random."""
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens) if experts else 0.0
