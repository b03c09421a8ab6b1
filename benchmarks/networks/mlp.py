"""A multilayer perceptron with dropout."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear, ReLU and dropout, several times, then a linear classifier."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        widths = [features] + [hidden] * layers
        blocks = [
            nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout))
            for before, after in pairwise(widths)
        ]
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))
