"""Plan a whole step, updates by AdamW included, which free gradients early: python examples/whole_step.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.memory import measure_peak
from checkmate.units import format_bytes

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
model = nn.Sequential(*blocks, nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
x, y = torch.randn(256, 256), torch.randint(10, (256,))


def loss_fn(x: Tensor, y: Tensor) -> Tensor:
    """The loss of a batch."""
    return F.cross_entropy(model(x), y)


def plain_step() -> None:
    """As one writes it."""
    optimizer.zero_grad()
    loss_fn(x, y).backward()
    optimizer.step()


plain_step()  # makes the optimizer's state
optimizer.zero_grad()
states = [t for state in optimizer.state.values() for t in state.values()]
held = sum(t.nbytes for t in (*model.parameters(), *states, x, y))
plain = held + measure_peak(plain_step).peak
print(f"plain PyTorch takes {format_bytes(plain)} for forward, backward and update")
optimizer.zero_grad()

step = checkmate.training_step(loss_fn, optimizer, budget=0.8 * plain, time_limit=5)  # these two lines
step(x, y)  # captures, measures and plans
use = measure_peak(lambda: step(x, y))
print(f"planned are {format_bytes(step.plans[0].peak or 0)}, with {step.plans[0].overhead:.1%} of the step run again")
print(f"measured are {format_bytes(held + use.peak)}")
