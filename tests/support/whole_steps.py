"""Train whole steps, forward, backward and update, and keep everything that must agree bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel

import checkmate
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits

X, Y = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)), torch.arange(64) % 10


class Scored(nn.Sequential):
    """Parts in a row, and the cross entropy of what they say."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x), y)


def classifier(*, blocks: int = 2, dropout: float = 0.1) -> nn.Sequential:
    """Blocks of a layer with batch norm and dropout for the rows of X, and the scores of ten classes."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(blocks)]
    for part in parts if dropout else ():
        part.append(nn.Dropout(dropout))
    return nn.Sequential(*parts, nn.Linear(32, 10))


def loss_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> Callable[[Tensor, Tensor], Tensor]:
    """The cross entropy of a model whose products are cast to a type."""

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return F.cross_entropy(model(x), y)

    return loss_fn


@dataclass
class TrainedWhole:
    """Results of a few whole steps."""

    losses: list[Tensor] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)  # of the model and the optimizers, in the end
    random_state: Tensor | None = None
    peaks: list[int] = field(default_factory=list)  # bytes above the level at entry, of each step after the first

    def bits(self) -> Any:
        """All that must agree."""
        return self.losses, self.state, self.random_state


def planned_step(loss_fn: Any, optimizers: Any, **options: Any) -> checkmate.TrainingStep:
    """A step with the best plan, within a budget that holds whatever tests train if no other is given."""
    return checkmate.training_step(
        loss_fn, optimizers, **{"budget": "1 GB", "wait": "best", "time_limit": 0.5, **options}
    )


def assert_as_plain(train: Callable[[Callable[..., Any]], Any], **planning: Any) -> tuple[checkmate.TrainingStep, Any]:
    """Run a function with planned steps and with plain ones: what it leaves has the same bits.

    Args:
        train: is given what makes a step of a loss and optimizers.
        planning: options of the planned step that the plain one has not.

    Returns:
        The planned step, and what is left.
    """
    made: list[checkmate.TrainingStep] = []

    def make(*about: Any, **options: Any) -> checkmate.TrainingStep:
        made.append(planned_step(*about, **options, **planning))
        return made[-1]

    left = []
    for how in (make, plain_step):
        torch.manual_seed(7)
        left.append(train(how))
    assert_same_bits(*(each.bits() if isinstance(each, TrainedWhole) else each for each in left))
    return made[0], left[0]


def plain_step(
    loss_fn: Callable[..., Tensor],
    optimizers: Sequence[optim.Optimizer] | optim.Optimizer,
    clip_norm: float | None = None,
    *,
    norm_type: float = 2.0,
    clip_value: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    ema: tuple[AveragedModel, nn.Module] | None = None,
) -> Callable[..., Tensor]:
    """The loop of plain PyTorch; its ``update`` is what the last call of an accumulation does after its backward.

    Its ``norm`` is that of the last gradients that were clipped.
    """
    optimizers = [optimizers] if isinstance(optimizers, optim.Optimizer) else optimizers
    scaler = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler
    calls = itertools.count()

    def update() -> None:
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if clip_norm is not None or clip_value is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if clip_norm is not None:
            step.norm = nn.utils.clip_grad_norm_(parameters, clip_norm, norm_type)
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


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2)


def itself(model: nn.Module) -> nn.Module:
    """The loss of a model whose forward gives it."""
    return model


def training(
    new_model: Callable[[], nn.Module] = classifier,
    new_optimizers: Callable[[Any], Any] = adamw,
    *,
    loss: Callable[[Any], Any] = loss_of,
    batch: Sequence[Any] | Callable[[int], Sequence[Any]] = (X, Y),
    steps: int = 3,
    between: Callable[[int, Any, Any], None] = lambda i, model, optimizers: None,
    metered: bool = True,
    look: Callable[[Any, Any], Any] = lambda model, optimizers: None,
    **options: Any,
) -> Callable[[Callable[..., Any]], TrainedWhole]:
    """Make the training of a new model, by whatever makes a step of its loss and its optimizers: for `assert_as_plain`.

    Args:
        between: is called before each step, with its number, the model and what ``new_optimizers`` gave.
        look: finds in these more that must agree in the end.
        options: of the step, as they are, or what makes one of the model; states of these must agree, too.
    """

    def train(make: Callable[..., Any]) -> TrainedWhole:
        model = new_model()
        made = new_optimizers(model)
        given = {name: option(model) if callable(option) else option for name, option in options.items()}
        step = make(loss(model), made, **given)
        several = [made] if isinstance(made, optim.Optimizer) else made
        before = lambda i: between(i, model, made)  # noqa: E731
        found = train_whole(step, model, several, batch, steps=steps, between=before, metered=metered)
        stateful = {name: option[0] if isinstance(option, tuple) else option for name, option in given.items()}
        found.state |= {name: o.state_dict() for name, o in stateful.items() if hasattr(o, "state_dict")}
        found.state["looked at"] = look(model, made)
        return found

    return train


def train_whole(
    step: Callable[..., Tensor],
    module: nn.Module,
    optimizers: Sequence[optim.Optimizer],
    batch: Sequence[Any] | Callable[[int], Sequence[Any]],
    *,
    steps: int = 3,
    between: Callable[[int], None] = lambda i: None,
    metered: bool = True,
) -> TrainedWhole:
    """Run a step a few times from the same random state; the first is not metered: a compiled one plans in it.

    Args:
        batch: of each step, or what gives that of a number.
        between: is called before each step, with its number.
        metered: False: no step is, for a loop that plans later on.
    """
    found = TrainedWhole()
    torch.manual_seed(7)
    for i in range(steps):
        between(i)
        given = batch(i) if callable(batch) else batch
        if i and metered:
            use = measure_peak(lambda: step(*given))  # noqa: B023
            found.peaks.append(use.peak)
            found.losses.append(use.result)
            del use
        else:
            found.losses.append(step(*given))
    state = {"model": module.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    found.state, found.random_state = copy.deepcopy(state), torch.get_rng_state()
    return found
