"""Root-mean-square norms on CPUs in few calls. Imports torch and numpy only."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray


class Norm:
    """x / sqrt(mean(x^2) + epsilon) * weight as x / sqrt(|x|^2 + D*epsilon) * (sqrt(D) * weight), in float32.

    weight [..., D]: rows of several norms may be stacked, for x [..., rows, D].
    """

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        width = weight.shape[-1]
        self._weight = (weight.float() * math.sqrt(width)).numpy()
        self._floor = np.float32(width * epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The normed rows of x [..., D], float32 and freshly made."""
        return torch.from_numpy(self.rows(x.float().numpy()))

    def rows(self, x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """The same on arrays."""
        length = np.sqrt(np.vecdot(x, x) + self._floor)
        made: NDArray[np.float32] = np.divide(x, length[..., None], out)
        made *= self._weight
        return made
