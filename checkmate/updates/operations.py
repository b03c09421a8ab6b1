"""The ops that a step's graph calls on gradients: sum, exchange, unscale, clip, update, in the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import optim

from checkmate.capture.nodes import Held, PlannedOp
from checkmate.capture.sharded.shards import local
from checkmate.updates.all_reduce import AGREEING_BYTES, Exchange
from checkmate.updates.gradients import Scaling, are_not_finite, total
from checkmate.updates.optimizers import Update
from checkmate.updates.updates import Updates

NUMBER_BYTES = 8
AVERAGED = 3  # the position of what an update overwrites beside its parameter, in its arguments


def update(updates: Updates, own_update: Update) -> PlannedOp:
    """Update by a gradient; further arguments are the parameter and the update's cost key."""
    average = updates.average

    # The function that the graph calls.
    def run(gradient: torch.Tensor, parameter: torch.Tensor, cost_key: str, *_: Any) -> None:
        updates.update(own_update, gradient, parameter)

    def states() -> list[Held]:  # numbers, such as a count of steps, are no values
        return [own_update.held(name, size) for name, size in own_update.states.items() if size > NUMBER_BYTES]

    # The function measured in its place, with its own states and averages.
    def rehearsal() -> Callable[..., Any]:
        update_one = own_update.rehearsal()
        follow = None if average is None or own_update.parameter not in average.pairs else average.rehearsal()

        def rehearse(gradient: torch.Tensor, parameter: torch.Tensor, cost_key: str, *_: Any) -> None:
            update_one(gradient, parameter, cost_key)
            if follow is not None:
                follow(parameter)

        return rehearse

    moved = 2 * own_update.state_bytes + local(own_update.parameter).nbytes
    costs: dict[str, Any] = {"moved": moved, "workspace": own_update.workspace_bytes}
    return PlannedOp("update_parameter", run, rehearsal, "updates {}", (1, AVERAGED), states, **costs)


def add(updates: Updates, own_update: Update, *, exchanges: bool = False) -> PlannedOp:
    """Add a gradient to its parameter's sum, and give that; with ``exchanges`` averaged, after the previous one."""
    sums = updates.sums
    assert sums is not None

    # The function that the graph calls.
    def run(gradient: torch.Tensor, like: torch.Tensor, *before: torch.Tensor) -> torch.Tensor | None:
        sums.add(own_update.parameter, gradient)
        if exchanges:
            updates.exchange_sum(own_update.parameter)
        return own_update.parameter.grad

    # The function measured in its place, with its own sum.
    def rehearsal() -> Callable[..., Any]:
        rooms: dict[torch.Tensor, torch.Tensor] = {}

        def rehearse(gradient: torch.Tensor, like: torch.Tensor, *before: torch.Tensor) -> torch.Tensor:
            if like not in rooms:
                rooms[like] = sums.room(own_update.parameter, like.device).zero_()
            summed = rooms[like].add_(gradient)
            return summed.mul_(0.5) if exchanges else summed

        return rehearse

    name, does, moved = "add_gradient", "adds to the gradient of {}", own_update.parameter.nbytes
    if exchanges:
        name, does, moved = "add_and_exchange_gradient", f"{does} and averages it over all ranks", 2 * moved
    return PlannedOp(name, run, rehearsal, does, held=lambda: [sums.of(own_update.parameter)], stores=True, moved=moved)


def agree(updates: Updates, order: Sequence[torch.Tensor]) -> PlannedOp:
    """Agree on a gradient and its parameter; the result stands for all ranks sending gradients in this order."""

    def run(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        updates.agree(order)
        return _token_of(like)

    def rehearse(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        torch.zeros(AGREEING_BYTES, dtype=torch.uint8, device=like.device)
        return _token_of(like)

    return PlannedOp("agree_with_ranks", run, lambda: rehearse, "agrees with other ranks on their gradients")


def exchange(exchange: Exchange, parameter: torch.Tensor) -> PlannedOp:
    """Average a gradient over ranks, after the previous exchange.

    Gives the mean of all ranks, and the number of this exchange: all ranks send in one order.
    """

    def averaging(mean: Callable[..., Any]) -> Callable[..., Any]:
        return lambda gradient, like, before, out=None: (mean(gradient, out), _token_of(like))

    run, does = averaging(exchange.mean), "averages the gradient of {} over all ranks"
    rehearsal = partial(averaging, exchange.part)
    return PlannedOp("exchange_gradient", run, rehearsal, does, out=(0,), moved=parameter.nbytes)


def coefficient(updates: Updates, parameters: Sequence[torch.Tensor]) -> PlannedOp:
    """The clipping factor of all gradients, from the norms of these parameters'; those elsewhere count too."""

    def run(norms: Sequence[torch.Tensor], *before: torch.Tensor) -> torch.Tensor:
        return updates.coefficient(dict(zip(parameters, norms, strict=True)))

    def rehearse(norms: Sequence[torch.Tensor], *before: torch.Tensor) -> torch.Tensor:
        return torch.clamp(1.0 / (total(norms, updates.clipping.order) + 1.0), max=1.0)

    return PlannedOp("clip_coefficient", run, lambda: rehearse)


def decide(updates: Updates, optimizer: optim.Optimizer, parameters: Collection[torch.Tensor]) -> PlannedOp:
    """Decide from the largest value of each gradient whether the update is skipped; the scaler notes it.

    ``parameters``: all whose gradients are values of the step; those elsewhere count too.
    """

    def run(largest: Sequence[torch.Tensor], *before: torch.Tensor) -> torch.Tensor:
        assert updates.scaling is not None
        updates.take_others(parameters)
        return updates.scaling.decide(optimizer, largest)

    return PlannedOp("decide_to_skip", run, lambda: lambda largest, *before: are_not_finite(largest))


def unscale(scaling: Scaling) -> PlannedOp:
    """The unscaled gradient."""
    return PlannedOp("unscaled", scaling.unscaled, lambda: Scaling(scaling.scaler).unscaled)


def _token_of(parameter: torch.Tensor) -> torch.Tensor:
    """A number whose existence says that a gradient was processed."""
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device)
