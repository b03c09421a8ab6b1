"""The ops of a step that do something with gradients, as functions for the nodes of its graph.

``does``: what an op does beside what it makes, in words with a place for the name of its second argument, a parameter;
such an op runs once. ``updates``: positions of the arguments that it overwrites. ``rehearsal``: makes a function that
costs the same and leaves everything as it is. ``written``: how it writes its result over an argument. ``moved_bytes``:
of what is no argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim

from checkmate.capture.ways.table import Written
from checkmate.updates.clipping import Clipping, total
from checkmate.updates.exchange import AGREEING_BYTES, Exchange
from checkmate.updates.one_parameter import Update
from checkmate.updates.scaling import Scaling, are_not_finite
from checkmate.updates.sums import Sums, rehearsed_add, token_of
from checkmate.updates.updates import Updates

Op = Callable[..., Any]
AVERAGED = 3  # the position of what an update overwrites beside its parameter, in its arguments


def update(updates: Updates, of: Update) -> Op:
    """Of a gradient, the parameter, and what the costs of an update depend on."""

    def update_parameter(gradient: torch.Tensor, parameter: torch.Tensor, about: str, *others: Any) -> None:
        updates.update(of, gradient)

    return _as_update(update_parameter, updates, of, lambda gradient, parameter: gradient)


def add_and_update(updates: Updates, of: Update) -> Op:
    """The same; the gradient is added to its sum before."""
    sums = updates.sums
    assert sums is not None

    def add_and_update_parameter(gradient: torch.Tensor, parameter: torch.Tensor, about: str, *others: Any) -> None:
        sums.add(of.parameter, gradient)
        updates.update_in_place(of)

    return _as_update(add_and_update_parameter, updates, of, rehearsed_add())


def update_by_sum(updates: Updates, of: Update) -> Op:
    """The same, of a sum that is there; the first argument says that it is."""

    def update_parameter_by_sum(ready: torch.Tensor, parameter: torch.Tensor, about: str, *others: Any) -> None:
        updates.update_in_place(of)

    add = rehearsed_add()
    return _as_update(update_parameter_by_sum, updates, of, lambda ready, parameter: add(parameter, parameter))


def _as_update(op: Op, updates: Updates, of: Update, sum_of: Callable[..., torch.Tensor]) -> Op:
    average = updates.average

    def rehearsal() -> Op:
        update_one = of.rehearsal()
        follow = None if average is None or of.parameter not in average.pairs else average.rehearsal()

        def rehearse(read: torch.Tensor, parameter: torch.Tensor, about: str, *others: Any) -> None:
            update_one(sum_of(read, parameter), parameter, about)
            if follow is not None:
                follow(parameter)

        return rehearse

    state = 2 * of.state_bytes + of.parameter.nbytes
    return _with(op, does="updates {}", updates=(1, AVERAGED), rehearsal=rehearsal, moved_bytes=state)


def add(sums: Sums, parameter: torch.Tensor) -> Op:
    """Of a gradient and the parameter; gives a number that says that it was added."""

    def add_gradient(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        sums.add(parameter, gradient)
        return token_of(parameter)

    def rehearsal() -> Op:
        add_one = rehearsed_add()

        def rehearse(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            add_one(gradient, like)
            return token_of(like)

        return rehearse

    return _with(add_gradient, does="adds to the gradient of {}", rehearsal=rehearsal, moved_bytes=parameter.nbytes)


def agree(updates: Updates, order: Sequence[torch.Tensor]) -> Op:
    """Of a gradient and its parameter; gives a number that says that all ranks send gradients in this order."""

    def agree_with_ranks(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        updates.agree(order)
        return token_of(like)

    def rehearsal() -> Op:
        def rehearse(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            torch.zeros(AGREEING_BYTES, dtype=torch.uint8, device=like.device)
            return token_of(like)

        return rehearse

    return _with(agree_with_ranks, does="agrees with other ranks on their gradients", rehearsal=rehearsal)


def exchange(exchange: Exchange, parameter: torch.Tensor) -> Op:
    """Of a gradient, the parameter, and the number of the exchange before.

    Gives the mean of all ranks, and the number of this exchange: all ranks send in one order.
    """

    def exchange_gradient(
        gradient: torch.Tensor, like: torch.Tensor, before: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return exchange.mean(gradient, out), token_of(parameter)

    def rehearsal() -> Op:
        return lambda gradient, like, before, out=None: (exchange.part(gradient, out), token_of(like))

    does, over = "averages the gradient of {} over all ranks", Written(exchange_gradient, (0,))
    about: dict[str, Any] = {"does": does, "rehearsal": rehearsal, "moved_bytes": parameter.nbytes}
    return _with(exchange_gradient, written=over, **about)


def add_and_exchange(updates: Updates, of: Update) -> Op:
    """The same, of a gradient that is added to its sum before; gives the number only."""
    sums = updates.sums
    assert sums is not None

    def add_and_exchange_gradient(gradient: torch.Tensor, like: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        sums.add(of.parameter, gradient)
        updates.exchange_sum(of.parameter)
        return token_of(of.parameter)

    def rehearsal() -> Op:
        add_one = rehearsed_add()

        def rehearse(gradient: torch.Tensor, like: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
            add_one(gradient, like).mul_(0.5)
            return token_of(like)

        return rehearse

    does, moved = "adds to the gradient of {} and averages it over all ranks", 2 * of.parameter.nbytes
    return _with(add_and_exchange_gradient, does=does, rehearsal=rehearsal, moved_bytes=moved)


def prepare(updates: Updates) -> Op:
    """Of numbers that say that all sums are there; gives one that says that they are ready for the updates."""

    def prepare_gradients(added: Sequence[torch.Tensor]) -> torch.Tensor:
        updates.prepare()
        return token_of(added[0])

    def rehearsal() -> Op:
        ghosts: list[nn.Parameter] = []

        def rehearse(added: Sequence[torch.Tensor]) -> torch.Tensor:
            if updates.clipping.most is not None:
                if not ghosts:
                    ghosts.extend(nn.Parameter(one.clone()) for one in added)
                    for ghost in ghosts:
                        ghost.grad = torch.zeros_like(ghost)
                nn.utils.clip_grad_norm_(ghosts, updates.clipping.most, updates.clipping.order)
            return token_of(added[0])

        return rehearse

    moved = sum(p.nbytes for o in updates.optimizers for group in o.param_groups for p in group["params"])
    return _with(prepare_gradients, does="unscales or clips all gradients", rehearsal=rehearsal, moved_bytes=2 * moved)


def coefficient(clipping: Clipping) -> Op:
    """Of the norms of all gradients; gives the factor that clips them."""

    def clip_coefficient(norms: Sequence[torch.Tensor]) -> torch.Tensor:
        return clipping.coefficient(norms)

    def rehearsal() -> Op:
        return lambda norms: torch.clamp(1.0 / (total(norms, clipping.order) + 1.0), max=1.0)

    return _with(clip_coefficient, rehearsal=rehearsal)


def decide(scaling: Scaling, optimizer: optim.Optimizer) -> Op:
    """Of the largest value in each gradient; gives whether the update is skipped, which the scaler notes."""

    def decide_to_skip(largest: Sequence[torch.Tensor]) -> torch.Tensor:
        return scaling.decide(optimizer, largest)

    return _with(decide_to_skip, rehearsal=lambda: are_not_finite)


def unscale(updates: Updates) -> Op:
    """Of a gradient; gives it without the scale."""
    scaling = updates.scaling
    assert scaling is not None

    def unscaled(gradient: torch.Tensor) -> torch.Tensor:
        return scaling.unscaled(gradient)

    return _with(unscaled, rehearsal=lambda: Scaling(scaling.scaler).unscaled)


def _with(op: Op, **about: Any) -> Op:
    for name, what in about.items():
        setattr(op, name, what)
    return op
