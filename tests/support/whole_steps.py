"""Train whole steps, forward, backward and update, and keep everything that must agree bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel

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
    loss_fn: Callable[..., Tensor],
    optimizers: Sequence[optim.Optimizer],
    clip_norm: float | None = None,
    *,
    norm_type: float = 2.0,
    clip_value: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    ema: tuple[AveragedModel, nn.Module] | None = None,
) -> Callable[..., Tensor]:
    """The loop of plain PyTorch; its ``update`` is what the last call of an accumulation does after its backward."""
    scaler = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler
    calls = itertools.count()

    def update() -> None:
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if clip_norm is not None or clip_value is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm, norm_type)
        if clip_value is not None:
            nn.utils.clip_grad_value_(parameters, clip_value)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if ema is not None:
            ema[0].update_parameters(ema[1])

    def step(*batch: Any, **options: Any) -> Tensor:
        number = next(calls)
        if number % accumulate == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        loss = loss_fn(*batch, **options)
        scaler.scale(loss).backward()
        if (number + 1) % accumulate == 0:
            update()
        return loss.detach()

    step.update = update
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
