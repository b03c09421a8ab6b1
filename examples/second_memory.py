"""Let values wait in a file where that costs less than running ops again: python examples/second_memory.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import checkmate
from checkmate.memory import measure_peak
from checkmate.units import format_bytes

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(512, 512), nn.Tanh())))
x = torch.randn(2048, 512)
held = sum(t.nbytes for t in (*model.parameters(), x))


def loss_fn(x: Tensor) -> Tensor:
    """A loss."""
    return model(x).square().mean()


def step(loss_fn: Any) -> None:
    """One step; gradients are let go of."""
    loss_fn(x).backward()
    model.zero_grad()


plain = held + measure_peak(lambda: step(loss_fn)).peak
print(f"plain PyTorch takes {format_bytes(plain)} for a step")

compiled = checkmate.compile(loss_fn, budget=0.5 * plain, host_budget="100 MB", time_limit=5)  # this line
step(compiled)  # captures, measures and plans
use = measure_peak(lambda: step(compiled))
sent = sum(use.sent for use in compiled.memory().second_memories)
print(
    f"planned are {format_bytes(compiled.plans[0].peak or 0)}; {format_bytes(sent)} wait in a file, the rest runs again"
)
print(f"measured are {format_bytes(held + use.peak)}")
