"""A tiny model with every kind of parameter that an optimizer meets, and optimizers that share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from tests.support.whole_steps import TrainedWhole, itself, training

BATCH = torch.arange(12) % 7, torch.arange(12) % 5
SMALLER = BATCH[0][:6], BATCH[1][:6]
Setting = tuple[str, dict[str, Any]]  # the name of an optimizer, and what it is made with


class AllKinds(nn.Module):
    """Tied, frozen, unused, of two types, with statistics and randomness."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.rounded = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.last = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.frozen(self.embedding(x)) * self.scale)
        h = F.dropout(self.rounded(F.gelu(h).bfloat16()).float(), 0.2, self.training)
        h = h @ self.embedding.weight.T @ self.embedding.weight  # tied
        return F.cross_entropy(self.last(h), y)


def groups(model: nn.Module, settings: Sequence[Setting]) -> list[list[nn.Parameter]]:
    """The model's parameters dealt to so many optimizers; to one that takes matrices only, the matrices."""
    dealt: list[list[nn.Parameter]] = [[] for _ in settings]
    for i, p in enumerate(model.parameters()):
        able = [n for n, (kind, _) in enumerate(settings) if kind != "Muon" or p.dim() == 2]
        dealt[able[i % len(able)]].append(p)
    return dealt


def new_optimizers(model: nn.Module, settings: Sequence[Setting]) -> list[optim.Optimizer]:
    """An optimizer for each setting, of two groups with another rate and another decay."""
    made = []
    for (kind, setting), parameters in zip(settings, groups(model, settings), strict=True):
        lr = setting.get("lr", 0.01)
        half = {"params": parameters[1::2], "lr": lr / 2, "weight_decay": 0.02}
        lone = {"lr": lr, **setting, "params": [{"params": parameters[::2]}, half]}
        made.append(getattr(optim, kind)(**lone))
    return made


def training_of_all_kinds(
    new_optimizers: Callable[[AllKinds], Any], *, loss: Callable[[AllKinds], Any] = itself, **how: Any
) -> Callable[[Callable[..., Any]], TrainedWhole]:
    """Train `AllKinds` by its own loss, or another."""
    return training(AllKinds, new_optimizers, **{"loss": loss, "batch": BATCH, **how})
