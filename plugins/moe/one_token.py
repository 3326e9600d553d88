"""Steps of one_token.cu: which weights it takes, how they are shared out, its memory, its launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dsc.plugins.formats import Format
from dsc.plugins.gpu_node import Typed
from dsc.plugins.moe.few_tokens import KINDS, PIECES, SHARED_BYTES, streams
from dsc.plugins.moe.gpu_work import Experts, Work
from dsc.runtime.steps import Kernel

# Multiprocessors of the usual chip of an architecture; of another some stay idle, or a second round begins.
BLOCKS = {80: 108, 90: 132, 100: 148}
ROWS = {"gate_up": 8, "down": 32}  # of a matrix, of an item
SIDES = {"gate_up": 1, "down": 2}  # of 16 rows, of a product
MOST_WARPS, SHALLOWEST, DEEPEST = 20, 2, 16


def one_token_steps(work: Work) -> tuple[Kernel, Kernel] | None:
    """Gate and up, then down, for a step of one token; None if the weights do not fit."""
    sets = [work.routed, *([work.shared] if work.shared else [])]
    if not all(streams(work, experts) for experts in sets):
        return None
    stages = [_Stage(work, sets, stage) for stage in ROWS]
    if not all(stage.warps for stage in stages):
        return None
    return stages[0].launch(stages[0].gate_up()), stages[1].launch(stages[1].down())


@dataclass(frozen=True)
class _Stage:
    """One of the two kernels, by the terms of one_token.cu."""

    work: Work
    sets: list[Experts]
    stage: str

    @cached_property
    def formats(self) -> list[Format]:
        return [self.work.formats(experts)[0] for experts in self.sets]

    @cached_property
    def items(self) -> list[int]:
        """Of an expert of each set."""
        rows, width = ROWS[self.stage], self.work.node.width("D")
        return [(experts.width if self.stage == "gate_up" else width) // rows for experts in self.sets]

    @cached_property
    def cost(self) -> int:
        """Of an item of the shared expert, in those of the others."""
        if len(self.sets) < 2:
            return 1
        return max(1, round(self._item_bytes(1) / self._item_bytes(0)))

    @cached_property
    def most_items(self) -> int:
        """Of a thread block."""
        units = self.work.node.width("K") * self.items[0] + sum(self.cost * each for each in self.items[1:])
        return -(-units // BLOCKS[self.work.node.arch.capability])

    @cached_property
    def warps(self) -> int:
        """As many as there are items, or half as many or so, until their rings are deep enough; 0: they never are."""
        for rounds in range(-(-self.most_items // MOST_WARPS), self.most_items + 1):
            warps = -(-self.most_items // rounds)
            ring = (self._budget // warps - self._scales) // 16 * 16
            if min(self._depths(ring)) >= SHALLOWEST:
                return warps
        return 0

    @cached_property
    def ring(self) -> int:
        """Bytes of a warp's."""
        most = (self._budget // self.warps - self._scales) // 16 * 16
        return max(depth * self._slot(i) for i, depth in enumerate(self._depths(most)))

    @cached_property
    def put_rows(self) -> int:
        """Rows of activations that a thread block can need: x is one; of down's, every expert has its own."""
        return 1 if self.stage == "gate_up" else (self.most_items - 2) // self.items[0] + 2

    @cached_property
    def _activations(self) -> int:
        """Bytes of what is put down."""
        if self.stage == "gate_up":
            return _row_bytes(self.work.node.width("D")) * len({(f.kind, f.ue8m0) for f in self.formats})
        return _row_bytes(max(experts.width for experts in self.sets)) * self.put_rows

    @property
    def _budget(self) -> int:
        return SHARED_BYTES[self.work.node.arch.capability] - 1024 - self._activations

    def _columns(self, i: int) -> int:
        return self.work.node.width("D") if self.stage == "gate_up" else self.sets[i].width

    def _item_bytes(self, i: int) -> int:
        return 16 * SIDES[self.stage] * PIECES[self.formats[i].kind] * self._columns(i)

    def _slot(self, i: int) -> int:
        """Bytes of a step of the ring."""
        return 2 * SIDES[self.stage] * PIECES[self.formats[i].kind] * 512

    def _depths(self, ring: int) -> list[int]:
        return [min(DEEPEST, ring // self._slot(i)) for i in range(len(self.sets))]

    @property
    def _scales(self) -> int:
        """Bytes of a warp's scales of weights."""
        sizes = {"wint4": 16 * SIDES[self.stage] * 2, "fp8": 8}  # of 128 columns
        return max(-(-sizes.get(f.kind, 0) * (self._columns(i) // 128) // 16) * 16 for i, f in enumerate(self.formats))

    def _hidden(self, experts: Experts) -> Typed:
        """What enters down: float32 where it is quantized next."""
        dtype = "float32" if self.work.formats(experts)[0].kind == "fp8" else "bfloat16"
        rows = self.work.node.width("K") if experts.routed else 1
        return self.work.node.add_scratch(f"one.{experts.gate}", dtype, (rows, experts.width))

    def gate_up(self) -> list[object]:
        """Arguments."""
        node, made = self.work.node, list[object]()
        for experts in self.sets:
            made += [node.at("x"), node.at("ids")] if experts.routed else []
            for name in (experts.gate, experts.up):
                made += [node.at(name), node.maybe(f"{name}.scales")]
            made.append(self._hidden(experts))
        return [*made, *[None] * (5 * (2 - len(self.sets)))]

    def down(self) -> list[object]:
        """Arguments."""
        node, made = self.work.node, list[object]()
        for experts in self.sets:
            made += [self._hidden(experts), *([node.at("ids"), node.at("weights")] if experts.routed else [])]
            made += [node.at(experts.down), node.maybe(f"{experts.down}.scales")]
            made += [self.work.out] if experts.routed else []
        return [*made, *[None] * (3 * (2 - len(self.sets)))]

    def launch(self, arguments: list[object]) -> Kernel:
        """The step."""
        node, shared = self.work.node, len(self.sets) > 1
        depths = self._depths(self.ring)
        defines = {
            "GATE_UP": int(self.stage == "gate_up"),
            "EXPERT_KIND": KINDS[self.formats[0].kind],
            "EXPERT_UE8M0": int(self.formats[0].ue8m0),
            "EXPERT_DEPTH": depths[0],
            "SHARED_KIND": KINDS[self.formats[1].kind] if shared else -1,
            "SHARED_UE8M0": int(self.formats[1].ue8m0) if shared else 0,
            "SHARED_DEPTH": depths[1] if shared else 0,
            "SHARED_COST": self.cost,
            "D": node.width("D"),
            "F": self.sets[0].width,
            "SHARED_F": self.sets[1].width if shared else 0,
            "TOP_K": node.width("K"),
            "WARPS": self.warps,
            "RING": self.ring,
            "SCALES": self._scales,
            "PUT_ROWS": self.put_rows,
            "SPREAD": int(self.work.expert_groups > 1),
            "PDL": int(node.arch.has_pdl),
        }
        return node.cuda(
            __name__,
            "one_token.cu",
            f"moe_one_{self.stage}",
            (BLOCKS[node.arch.capability],),
            32 * self.warps,
            arguments,
            defines=defines,
            shared_bytes=self._activations + self.warps * (self.ring + self._scales),
            pdl=True,
        )


def _row_bytes(columns: int) -> int:
    """Of a row put down, with its scales."""
    return 2 * columns + (columns // 128 * 4 + 15) // 16 * 16
