"""Run a whole training step plainly and as it is planned, and compare all that it leaves behind, bit by bit.

Both begin with the same parameters, states and random numbers; these are put back behind each.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import optim

from checkmate.backends.tensor_state import differing, names_of, restored, tensors_within
from checkmate.capture.device import main_device, may_waver
from checkmate.capture.sharded.shards import local
from checkmate.core.solution import Solution
from checkmate.errors import VerificationError
from checkmate.memory import measure_peak
from checkmate.torch_internals.trees import tree_leaves, tree_map_only
from checkmate.updates.alone import known
from checkmate.updates.optimizers import parameters_of
from checkmate.verification.compare import check_peak, outcome_of
from checkmate.verification.outcomes import (
    PLAIN_RUNS,
    Outcome,
    as_error,
    compare_with_spread,
    names_that_differ,
)

log = logging.getLogger("checkmate.verification.compare")

NORM = "the norm of all gradients"


def compare_whole(
    plain: Callable[[], Any],
    planned: Callable[[], Any],
    plan_now: Callable[[], Solution | None],
    optimizers: Sequence[optim.Optimizer],
    reach: Any,
) -> None:
    """Run both from the same state, and put that back.

    Args:
        plain: runs the step plainly, once.
        planned: runs it as it is planned; its first call plans.
        plan_now: the plan that it follows; None: there is none, as nothing was captured.
        optimizers: those of the step.
        reach: what the step is given and holds: its tensors are found in it.

    Raises:
        VerificationError: naming what differs, or the measured peak where it is above the planned one.
    """
    parameters = parameters_of(optimizers)
    state = list({id(t): t for t in (*tensors_within(reach), *parameters)}.values())
    names, device = names_of(state, (reach, parameters)), main_device(state)

    def run(step: Callable[[], Any]) -> Outcome:
        with put_back(state, optimizers, device):
            return _outcome(partial(_on_states_of_its_own, step, optimizers), state, names, optimizers, device)

    with put_back(state, optimizers, device):
        planned()  # plans, and measures for it: no meter may run yet
        to_come = _state_bytes(optimizers)  # which the first step makes
    to_come -= _state_bytes(optimizers)
    to_come += _state_bytes([o for o in optimizers if known(o) is None])  # copied within what is metered
    expected, found = run(plain), run(planned)
    plan = plan_now()
    if different := names_that_differ(expected, found):
        again = run(plain)
        if not may_waver(device):
            raise VerificationError(as_error(different[0], repeats=not names_that_differ(expected, again)))
        runs = [expected, again, *(run(plain) for _ in range(PLAIN_RUNS - 2))]
        compare_with_spread(different, runs, found, lambda name: not name.startswith("output"))
    if draws := differing(found.random_states, expected.random_states):
        raise VerificationError(
            f"The planned step draws other random numbers than plain PyTorch: {', '.join(draws)}. Please report this."
        )
    if plan is not None:
        # what the first step makes of the optimizer's state is in what is resident in a plan, and in the peak
        check_peak(plan.problem.resident - to_come + found.use.peak, plan, device, plan.budget)
    log.info("verified: the whole step has the bits of plain PyTorch, in %d tensors", len(expected.results))


@contextmanager
def put_back(state: list[torch.Tensor], optimizers: Sequence[optim.Optimizer], device: torch.device) -> Iterator[None]:
    """Put tensors, their gradients, the optimizers' states and the random state back as they were after the block."""
    gradients = [t.grad if t.is_leaf else None for t in state]
    states = [{p: dict(values) for p, values in o.state.items()} for o in optimizers]
    copies = [copy.deepcopy([*of.values()]) for of in states]
    about = [[(one, dict(one)) for one in (vars(o), *o.param_groups)] for o in optimizers]  # which a step may set
    try:
        with restored(state, device):
            yield
    finally:
        for held, before in itertools.chain(*about):
            held.clear()
            held.update(before)
        for optimizer, of, values in zip(optimizers, states, copies, strict=True):
            optimizer.state.clear()
            for (parameter, held), before in zip(of.items(), values, strict=True):
                optimizer.state[parameter] = {name: _as_before(held[name], was) for name, was in before.items()}
        for tensor, gradient in zip(state, gradients, strict=True):
            if tensor.is_leaf:
                tensor.grad = gradient


def _as_before(held: Any, was: Any) -> Any:
    """The same object, where it is a tensor, with what it held."""
    if not isinstance(held, torch.Tensor):
        return was
    with torch.no_grad():
        return held.copy_(was)


def _on_states_of_its_own(step: Callable[[], Any], optimizers: Sequence[optim.Optimizer]) -> Any:
    """Run a step on copies of states that it may replace: a meter sees only that go which it has seen come."""
    for optimizer in optimizers:
        for parameter in [*optimizer.state] if known(optimizer) is None else ():
            optimizer.state[parameter] = tree_map_only(torch.Tensor, torch.clone, optimizer.state[parameter])
    return step()


def _state_bytes(optimizers: Sequence[optim.Optimizer]) -> int:
    kept = tree_leaves([[*o.state.values()] for o in optimizers])
    return sum(local(t).nbytes for t in kept if isinstance(t, torch.Tensor))


def _outcome(
    step: Callable[[], Any],
    state: list[torch.Tensor],
    names: dict[int, str],
    optimizers: Sequence[optim.Optimizer],
    device: torch.device,
) -> Outcome:
    use = measure_peak(step, device)
    result, norm = use.result
    results = {f"output {i}": t for i, t in enumerate(tree_leaves(result)) if isinstance(t, torch.Tensor)}
    if norm is not None:
        results[NORM] = norm
    for t in state:
        results[f"{names[id(t)]} of shape {tuple(t.shape)}"] = t
        if t.is_leaf and t.grad is not None:
            results[f"the gradient of {names[id(t)]} of shape {tuple(t.shape)}"] = t.grad
    for optimizer in optimizers:
        for p, values in optimizer.state.items():
            kept = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
            results |= {f"{name} of {type(optimizer).__name__} for {names[id(p)]}": t for name, t in kept.items()}
    return outcome_of(results, device, use)
