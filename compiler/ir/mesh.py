"""The mesh of ranks that a graph is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Ranks of one pipeline stage: attention, dense MLPs, shared experts and the head over `tensor` of them; experts over
    `expert`, and each expert's width over the ranks left.
    """

    tensor: int
    expert: int

    @property
    def num_ranks(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def expert_width_ways(self) -> int:
        return self.num_ranks // self.expert


ONE_RANK = Mesh(1, 1)
