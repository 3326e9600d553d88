"""What all GPU kernels of one Moe node share: the sets of experts, the work list, the results and their sum."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.plugins.formats import Format
from dsc.plugins.gpu_node import GpuNode, Typed
from dsc.plugins.moe.scratch import SMALLEST_TILE, step_tokens
from dsc.plugins.moe.triton_experts import moe_sum, split_planes
from dsc.plugins.triton_activations import quantize
from dsc.plugins.triton_dequantize import dequantize
from dsc.runtime.steps import Kernel

PLAN_THREADS = 512
SUM_BLOCK = 1024


@dataclass(frozen=True)
class Experts:
    """The routed experts, or the shared one.

    gate, up, down   their operands' names; `width` is F
    rows             how many rows enter down: pairs, or tokens
    """

    gate: str
    up: str
    down: str
    width: int
    rows: str

    @property
    def routed(self) -> bool:
        return self.gate == "gate"


@dataclass(frozen=True)
class Work:
    """A node with what its variants share.

    order, tiles   the work list (plan.cu)
    out            [T * K, D] weighted rows of the pairs, then [T, D] of the shared expert
    """

    node: GpuNode
    routed: Experts
    shared: Experts | None
    order: Typed
    tiles: Typed
    out: Typed

    @staticmethod
    def of(node: GpuNode) -> Work:
        """The node's sets of experts, and memory for the rest."""
        pairs = f"{node.width('K')}*T"
        shared = None
        if node.has("shared_gate"):
            shared = Experts("shared_gate", "shared_up", "shared_down", node.width("FS"), "T")
        rows = f"{node.width('K') + (shared is not None)}*T"
        assert node.width("E") <= PLAN_THREADS, (node.name, node.width("E"))
        return Work(
            node,
            Experts("gate", "up", "down", node.width("F"), pairs),
            shared,
            node.add_scratch("order", "int32", (pairs,)),
            node.add_scratch("tiles", "int32", (num_tiles(node, SMALLEST_TILE), 4)),
            node.add_scratch("out", node.at("x").dtype, (rows, node.width("D"))),
        )

    def formats(self, experts: Experts) -> tuple[Format, Format]:
        """Of gate and up, and of down."""
        gate, up, down = (self.node.format(name) for name in (experts.gate, experts.up, experts.down))
        assert gate == up, (self.node.name, gate, up)
        return gate, down

    def rows_of(self, experts: Experts) -> Typed:
        """Where results of a set of experts go."""
        if experts.routed:
            return self.out
        width = self.node.width("D") * (4 if self.out.dtype == "float32" else 2)
        return self.node.at(self.out.pointer.operand, offset=f"{self.node.width('K')}*T*{width}")

    def quantized(self, experts: Experts) -> tuple[tuple[Kernel, ...], Typed, Typed]:
        """Steps that quantize x for a set of experts in fp8, the codes and their scales: the same for both sets. No step where
        the norm before did it.
        """
        node, ue8m0 = self.node, self.formats(experts)[0].ue8m0
        return quantize(node, node.at("x"), node.width("D"), "T", ue8m0=ue8m0, name="x.ue8m0" if ue8m0 else "x")

    def planes(self) -> tuple[Kernel, Typed]:
        """The step that puts the even columns of x before the odd ones, and its result."""
        node = self.node
        width, planes = node.width("D"), node.add_scratch("x.planes", "bfloat16", ("T", node.width("D")))
        arguments = {"x": node.at("x"), "planes": planes, "K": width, "BLOCK": SUM_BLOCK, "PDL": node.arch.has_pdl}
        return node.triton(split_planes, ("T", -(-width // (2 * SUM_BLOCK))), arguments, num_warps=4, pdl=True), planes

    def values(self, experts: Experts, name: str) -> Typed:
        """Memory for a stack of experts in bfloat16: `gate`'s or, as large, down's; `up`'s."""
        shape = (self._number(experts) * experts.width, self.node.width("D"))
        return self.node.add_scratch(f"{experts.gate}.{name}.values", "bfloat16", shape)

    def dequantize(self, experts: Experts, name: str, values: Typed) -> Kernel:
        """The step that puts a stack of experts there."""
        rows, width = self.node.width("D"), experts.width
        if name != experts.down:
            rows, width = width, rows
        return dequantize(self.node, name, self._number(experts) * rows, width, values)

    def _number(self, experts: Experts) -> int:
        return self.node.width("E") if experts.routed else 1

    @property
    def expert_groups(self) -> int:
        """Of ranks, among which the layer's experts are spread."""
        return int(self.node.attributes.get("expert_groups", 1))

    @property
    def num_experts(self) -> int:
        """Of the layer, on all ranks."""
        return self.node.width("E") * self.expert_groups

    def tokens(self, pairs: float) -> int:
        """Tokens of a step in which an expert has `pairs` on average."""
        return step_tokens(pairs, self.num_experts, self.node.width("K"))

    def plan(self, tile: int, late: bool = False) -> Kernel:
        """The step that makes the work list, in tiles of at most `tile` pairs.

        late   the step before it makes nothing that it reads
        """
        node = self.node
        return node.cuda(
            __name__,
            "plan.cu",
            "moe_plan",
            (1,),
            PLAN_THREADS,
            [node.at("ids"), self.order, self.tiles, self.routed.rows, num_tiles(node, tile)],
            defines={
                "EXPERTS": node.width("E"),
                "TILE": tile,
                "THREADS": PLAN_THREADS,
                "PDL": int(node.arch.has_pdl),
                "LATE": int(late),
            },
            pdl=True,
        )

    def sum(self) -> Kernel:
        """The step that adds up every token's rows."""
        node = self.node
        arguments = {
            "out": self.out,
            "ids": node.at("ids"),
            "y": node.at("y"),
            "shared_row": self.routed.rows,
            "K": node.width("K"),
            "D": node.width("D"),
            "SHARED": self.shared is not None,
            "BLOCK": SUM_BLOCK,
            "PDL": node.arch.has_pdl,
        }
        return node.triton(moe_sum, ("T", -(-node.width("D") // SUM_BLOCK)), arguments, num_warps=4, pdl=True)


def num_tiles(node: GpuNode, tile: int) -> str:
    """The most tiles of at most `tile` pairs of one expert that a step can have."""
    pairs = f"{node.width('K')}*T"
    return f"min({pairs}, {node.width('E')} + {pairs}//{tile})"
