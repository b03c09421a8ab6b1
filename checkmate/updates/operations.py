"""The ops that a step's graph calls on gradients: sum, exchange, unscale, clip, update, in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from checkmate.capture.nodes import PlannedOp
from checkmate.capture.sharded.shards import local
from checkmate.updates.all_reduce import AGREEING_BYTES, Exchange
from checkmate.updates.gradients import Clipping, Scaling, are_not_finite, total
from checkmate.updates.optimizers import Update, parameters_of
from checkmate.updates.updates import Updates

Run = Callable[..., Any]
AVERAGED = 3  # the position of what an update overwrites beside its parameter, in its arguments


def update(updates: Updates, of: Update, *, by_sum: bool = False, adds: bool = False) -> PlannedOp:
    """Update by a gradient; further arguments are the parameter and the update's cost key.

    With ``by_sum`` the sum of gradients that is there is taken: with ``adds`` the gradient is added to it before, else
    the first argument only says that it is ready.
    """
    average, sums = updates.average, updates.sums

    # The function that the graph calls.
    def run(read: torch.Tensor, parameter: torch.Tensor, about: str, *others: Any) -> None:
        if adds and sums is not None:
            sums.add(of.parameter, read)
        if by_sum:
            updates.update_in_place(of)
        else:
            updates.update(of, read)

    # The function measured in its place, with its own states, sums and averages.
    def rehearsal() -> Run:
        update_one, add_one = of.rehearsal(), _rehearsed_add()
        follow = None if average is None or of.parameter not in average.pairs else average.rehearsal()

        def rehearse(read: torch.Tensor, parameter: torch.Tensor, about: str, *others: Any) -> None:
            gradient = add_one(read if adds else parameter, parameter) if by_sum else read
            update_one(gradient, parameter, about)
            if follow is not None:
                follow(parameter)

        return rehearse

    name = "add_and_update_parameter" if adds else "update_parameter_by_sum" if by_sum else "update_parameter"
    moved = 2 * of.state_bytes + local(of.parameter).nbytes
    return PlannedOp(name, run, rehearsal, "updates {}", (1, AVERAGED), moved=moved, workspace=of.workspace_bytes)


def add(updates: Updates, of: Update, *, exchanges: bool = False) -> PlannedOp:
    """Add a gradient to its parameter's sum, after the previous exchange, if any.

    Gives a number that says that the gradient was added to its sum, and with ``exchanges`` that this was averaged.
    """
    sums = updates.sums
    assert sums is not None

    # The function that the graph calls.
    def run(gradient: torch.Tensor, like: torch.Tensor, *before: torch.Tensor) -> torch.Tensor:
        sums.add(of.parameter, gradient)
        if exchanges:
            updates.exchange_sum(of.parameter)
        return _token_of(of.parameter)

    # The function measured in its place, with its own sum.
    def rehearsal() -> Run:
        add_one = _rehearsed_add()

        def rehearse(gradient: torch.Tensor, like: torch.Tensor, *before: torch.Tensor) -> torch.Tensor:
            summed = add_one(gradient, like)
            if exchanges:
                summed.mul_(0.5)
            return _token_of(like)

        return rehearse

    name, does, moved = "add_gradient", "adds to the gradient of {}", of.parameter.nbytes
    if exchanges:
        name, does, moved = "add_and_exchange_gradient", f"{does} and averages it over all ranks", 2 * moved
    return PlannedOp(name, run, rehearsal, does, moved=moved)


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

    def averaging(mean: Run) -> Run:
        return lambda gradient, like, before, out=None: (mean(gradient, out), _token_of(like))

    run, does = averaging(exchange.mean), "averages the gradient of {} over all ranks"
    rehearsal = partial(averaging, exchange.part)
    return PlannedOp("exchange_gradient", run, rehearsal, does, out=(0,), moved=parameter.nbytes)


def prepare(updates: Updates) -> PlannedOp:
    """Wait for all sums; the result stands for their being ready for updates."""

    def run(added: Sequence[torch.Tensor]) -> torch.Tensor:
        updates.prepare()
        return _token_of(added[0])

    # Clip gradients of zeros, which cost what those of the step do.
    def rehearsal() -> Run:
        ghosts: list[nn.Parameter] = []

        def rehearse(added: Sequence[torch.Tensor]) -> torch.Tensor:
            if updates.clipping.most is not None:
                if not ghosts:
                    ghosts.extend(nn.Parameter(one.clone()) for one in added)
                    for ghost in ghosts:
                        ghost.grad = torch.zeros_like(ghost)
                nn.utils.clip_grad_norm_(ghosts, updates.clipping.most, updates.clipping.order)
            return _token_of(added[0])

        return rehearse

    moved = 2 * sum(p.nbytes for p in parameters_of(updates.optimizers))
    return PlannedOp("prepare_gradients", run, rehearsal, "unscales or clips all gradients", moved=moved)


def coefficient(clipping: Clipping) -> PlannedOp:
    """The clipping factor of all gradients, from their norms."""

    def rehearse(norms: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.clamp(1.0 / (total(norms, clipping.order) + 1.0), max=1.0)

    return PlannedOp("clip_coefficient", clipping.coefficient, lambda: rehearse)


def decide(scaling: Scaling, optimizer: optim.Optimizer) -> PlannedOp:
    """Decide from the largest value of each gradient whether the update is skipped; the scaler notes it."""
    return PlannedOp("decide_to_skip", partial(scaling.decide, optimizer), lambda: are_not_finite)


def unscale(scaling: Scaling) -> PlannedOp:
    """The unscaled gradient."""
    return PlannedOp("unscaled", scaling.unscaled, lambda: Scaling(scaling.scaler).unscaled)


def _rehearsed_add() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function that adds to a made-up sum for a parameter, to measure its cost."""
    sums: dict[torch.Tensor, torch.Tensor] = {}

    def add(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in sums:
            sums[parameter] = torch.zeros_like(gradient)
        return sums[parameter].add_(gradient)

    return add


def _token_of(parameter: torch.Tensor) -> torch.Tensor:
    """A number whose existence says that a gradient was processed."""
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device)
