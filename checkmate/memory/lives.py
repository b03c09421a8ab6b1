"""The allocations of a step and their lifetimes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Lives:
    """The allocations of a step, in order. Time is counted in allocations from 0."""

    sizes: np.ndarray  # (N,) int64, bytes, multiples of `ALIGNMENT`
    born: np.ndarray  # (N,) int64
    died: np.ndarray  # (N,) int64: an allocation at that time may have the same bytes

    @property
    def peak(self) -> int:
        """The most bytes alive at once, a lower bound for every placement."""
        changes = np.zeros(int(self.died.max(initial=0)) + 1, dtype=np.int64)
        np.add.at(changes, self.born, self.sizes)
        np.add.at(changes, self.died, -self.sizes)
        return int(np.cumsum(changes).max(initial=0))
