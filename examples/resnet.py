"""Train a small ResNet on 24x24 images within 60 % of plain PyTorch's bytes: python examples/resnet.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.memory import measure_peak
from checkmate.units import format_bytes


class Block(nn.Module):
    """Two convolutions beside a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's sum."""
        return F.relu(x + self.two(self.second(F.relu(self.one(self.first(x))))))


torch.manual_seed(0)
head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Block(16) for _ in range(6)), head)
images, labels = torch.randn(16, 3, 24, 24), torch.randint(10, (16,))
held = sum(t.nbytes for t in (*network.parameters(), *network.buffers(), images, labels))


def loss_fn(x: Tensor, y: Tensor) -> Tensor:
    """With the loss inside the function it is within the plan."""
    return F.cross_entropy(network(x), y)


def step(loss_fn: Any) -> None:
    """One step; gradients are let go of."""
    loss_fn(images, labels).backward()
    network.zero_grad()


plain = held + measure_peak(lambda: step(loss_fn)).peak
print(f"plain PyTorch takes {format_bytes(plain)} for a step")

compiled = checkmate.compile(loss_fn, budget=0.6 * plain, time_limit=5)  # this line
step(compiled)  # captures, measures and plans
use = measure_peak(lambda: step(compiled))
(plan,) = compiled.plans
print(f"planned are {format_bytes(plan.peak or 0)}, with {plan.overhead:.1%} of the step run again")
print(f"measured are {format_bytes(held + use.peak)}")
