"""Train whole steps, forward, backward and update, and keep everything that must agree bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim

from checkmate.memory import measure_peak

NewOptimizers = Callable[[nn.Module], Sequence[optim.Optimizer]]


@dataclass
class TrainedWhole:
    """What a few whole steps left behind."""

    losses: list[Tensor] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)  # of the model and the optimizers, in the end
    random_state: Tensor | None = None
    peaks: list[int] = field(default_factory=list)  # bytes above the level at entry, of each step after the first

    def bits(self) -> Any:
        """What must agree."""
        return self.losses, self.state, self.random_state


def plain_step(
    loss_fn: Callable[..., Tensor], optimizers: Sequence[optim.Optimizer], clip_norm: float | None = None
) -> Callable[..., Tensor]:
    """The loop of plain PyTorch."""

    def step(*batch: Any) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_fn(*batch)
        loss.backward()
        if clip_norm is not None:
            parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step


def train_whole(
    step: Callable[..., Tensor],
    module: nn.Module,
    optimizers: Sequence[optim.Optimizer],
    batch: Sequence[Any],
    *,
    steps: int = 3,
    between: Callable[[int], None] = lambda i: None,
    metered: bool = True,
) -> TrainedWhole:
    """Run a step a few times from the same random state; the first is not metered: a compiled one plans in it.

    Args:
        between: is called before each step, with its number.
        metered: False: no step is, for a loop that plans later on.
    """
    found = TrainedWhole()
    torch.manual_seed(7)
    for i in range(steps):
        between(i)
        if i and metered:
            use = measure_peak(lambda: step(*batch))
            found.peaks.append(use.peak)
            found.losses.append(use.result)
            del use
        else:
            found.losses.append(step(*batch))
    state = {"model": module.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    found.state, found.random_state = copy.deepcopy(state), torch.get_rng_state()
    return found
